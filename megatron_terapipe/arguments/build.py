"""Build the configuration from a command line, and from the files and presets that it names."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_type_hints

from megatron_terapipe.arguments.deepspeed_values import DeepSpeedValues
from megatron_terapipe.arguments.flags import flags
from megatron_terapipe.arguments.help_text import asked_for, trainer_help
from megatron_terapipe.arguments.megatron_flags.accepted_flags import ACCEPTED_FLAGS
from megatron_terapipe.arguments.model_sources import (
    how_to_load_a_model,
    preset_settings,
    take_model_folder,
    take_model_from_checkpoint,
)
from megatron_terapipe.arguments.notices import notices
from megatron_terapipe.arguments.parser import CommandLine, read_command_line
from megatron_terapipe.arguments.searched_strategy import StrategyFinder, constraints_of, without_strategy
from megatron_terapipe.checkpoint.directories import names_model_folder
from megatron_terapipe.config import Config
from megatron_terapipe.config.fields.json_files import read_json
from megatron_terapipe.config.fields.options import flag
from megatron_terapipe.config.parallel.parallel import AUTO
from megatron_terapipe.config.training.precision import PrecisionConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.strategy import DIMENSIONS, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """A command line, read: the configuration, and what the user should know of how it was read."""

    config: Config
    """The configuration."""

    notices: tuple[str, ...]
    """Lines for the start of the run."""


def parse_arguments(argv: Sequence[str] | None = None) -> Config:
    """Return the configuration that a command line describes; see `read_arguments`."""
    return read_arguments(argv).config


def read_arguments(argv: Sequence[str] | None = None, find_strategy: StrategyFinder | None = None) -> Arguments:
    """Read the command line, and the strategy file and the preset that it names.

    Args:
        argv: words after the name of the program; None = those of this process.
        find_strategy: finds the strategy that `--strategy auto` asks for; None where nothing is run.

    Raises:
        ConfigError: if a flag or a value is wrong; one line with the value, the rule and the remedy.
        SystemExit: only for `--help`.
    """
    words = sys.argv[1:] if argv is None else argv
    group = asked_for(words)
    if group is not None:
        print(trainer_help(group), end="")
        raise SystemExit(0)
    line = read_command_line(words)
    given = line.given
    if given.get("strategy") not in (None, AUTO):
        _overlay(given, _strategy_settings(given["strategy"]), given["strategy"])
    if given.get("model_preset"):
        # Once its sizes are filled in, the name says nothing more: a checkpoint must not differ by it.
        for name, value in preset_settings(given.pop("model_preset")).items():
            given.setdefault(name, value)
    if given.get("load") and names_model_folder(given["load"]):
        take_model_folder(given)
    elif given.get("use_checkpoint_args"):
        take_model_from_checkpoint(given)
    _fall_back(line)
    file = DeepSpeedValues.read(given.get("deepspeed_config"), given)
    given |= file.values()
    with file.named_in_errors():
        _check_accepted(line)
        searched = _take_found_strategy(given, find_strategy) if given.get("strategy") == AUTO else ()
        about_zero = list(_run_under_zero(given))
        config = build_config(given)
    return Arguments(config=config, notices=(*notices(line, config), *file.notices(), *searched, *about_zero))


def build_config(given: Mapping[str, Any]) -> Config:
    """Build every section from the values given, by field; the rest keep their defaults.

    Raises:
        ConfigError: if a required value is missing, or a value is wrong.
    """
    declared = list(flags())
    missing = [flag(each.name) for each in declared if each.default is MISSING and each.name not in given]
    if missing:
        said = f"{', '.join(missing)} must be given: add {'it' if len(missing) == 1 else 'them'}"
        of_load = given.get("load") and "--num-layers" in missing
        raise ConfigError(f"{said}; {how_to_load_a_model(given['load'])}" if of_load else said)
    sections = {
        section: section_class(
            **{each.name: given[each.name] for each in declared if each.section == section and each.name in given}
        )
        for section, section_class in get_type_hints(Config).items()
    }
    return Config(**sections)


def _take_found_strategy(given: dict[str, Any], find_strategy: StrategyFinder | None) -> tuple[str, ...]:
    """Add what a strategy sets that is found for the values given, and return the lines about it."""
    if find_strategy is None:
        raise ConfigError("--strategy auto is found when a run starts: name a strategy file here")
    constraints = constraints_of(given)
    found = find_strategy(build_config(without_strategy(given)), constraints)
    settings = found.strategy.settings()
    if given.get("token_slices") == AUTO:
        given.pop("token_slices")  # The search has solved for them.
    if given.get("stage_partition") == AUTO:
        given.pop("stage_partition")
    if found.strategy.stage_partition in constraints.get("stage_partition", ()):
        settings.pop("stage_partition")
    _overlay(given, settings, found.place)
    return found.notices


def _strategy_settings(path: str) -> dict[str, Any]:
    """Read a strategy file, and return what it sets in the configuration, by field of its sections.

    The file holds a strategy, or an entry of the search's output, which has one under `strategy`. Fields that it
    leaves out, or holds null for where null means "your choice", are not in the answer.

    Raises:
        ConfigError: if the file cannot be read, or the strategy cannot be trained.
    """
    document = read_json(path, "--strategy")
    if isinstance(document, Mapping) and isinstance(document.get("strategy"), Mapping):
        document = document["strategy"]
    settings = Strategy.from_json(document).settings()
    assert isinstance(document, Mapping)
    given = {each.setting for each in DIMENSIONS if each.name in document and each.setting}
    if settings["global_batch_size"] is None:
        given.discard("global_batch_size")
    return {name: value for name, value in settings.items() if name in given}


def _overlay(given: dict[str, Any], strategy: Mapping[str, Any], path: str) -> None:
    """Add what a strategy file sets to what flags set; one must not contradict the other."""
    for name, value in strategy.items():
        explicit = given.setdefault(name, value)
        if _comparable(explicit) != _comparable(value):
            raise ConfigError(
                f"{flag(name)} {explicit} contradicts --strategy {path}, where it is "
                f"{'left to the default' if value is None else value}: drop the flag, or change the file"
            )


def _comparable(value: object) -> object:
    return value.replace(" ", "") if isinstance(value, str) else value


def _run_under_zero(given: dict[str, Any]) -> Iterator[str]:
    """Run ZeRO 0 as ZeRO 1 where DeepSpeed needs it, which changes only where states are; yield a line about it."""
    names = {each.name for each in fields(PrecisionConfig)}
    precision = PrecisionConfig(**{name: value for name, value in given.items() if name in names})
    if given.get("zero_stage") == 0 and precision.needs_zero:
        given["zero_stage"] = 1
        dtype = "fp16" if precision.fp16 else "bf16 with gradients that add up in fp32"
        yield f"--zero-stage 0 is run as --zero-stage 1, which trains the same: DeepSpeed needs it for {dtype}"


def _check_accepted(line: CommandLine) -> None:
    """Hold the flags that change nothing against those that do."""
    defaults = {each.name: each.default for each in flags()}
    for spelling in line.accepted:
        accepted = ACCEPTED_FLAGS[spelling]
        if accepted.needs and accepted.needs not in line.given:
            raise ConfigError(f"{spelling} does not say how many: add {flag(accepted.needs)}")
        if accepted.says is not None:
            name, promised = accepted.says
            actual = line.given.get(name, defaults[name])
            if actual != promised:
                words = flag(name) if actual is True else f"{flag(name)} {actual}"
                raise ConfigError(f"{spelling} contradicts {words}: drop one of them")


def _fall_back(line: CommandLine) -> None:
    """Apply the flags that speak only where nothing else does."""
    defaults = {each.name: each.default for each in flags()}
    for name, (spelling, value) in line.fallbacks.items():
        actual = line.given.setdefault(name, value)
        if actual == defaults[name]:
            raise ConfigError(f"{spelling} contradicts {line.set_by.get(name, flag(name))} {actual}: drop one of them")
