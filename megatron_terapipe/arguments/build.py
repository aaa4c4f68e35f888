"""Build the configuration from a command line, and from the files that it names.

words -> CommandLine -> merge of layers (`layers.py`) -> sections -> Config

Read `read_arguments` first. A model comes from flags, a preset, a `config.json`, a checkpoint or a folder of Hugging
Face; a strategy from a file, or from the search (`--strategy auto`).
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, get_type_hints

from megatron_terapipe.arguments.foreign_flags import foreign_flags
from megatron_terapipe.arguments.help import asked_for, trainer_help
from megatron_terapipe.arguments.layers import Merged, Part, Values, deepspeed_file, unused_loss_scale
from megatron_terapipe.arguments.parser import CommandLine, default_of, flags, notices, read_command_line
from megatron_terapipe.arguments.spellings import resolve_spellings
from megatron_terapipe.checkpoint.directories import tagged_checkpoint
from megatron_terapipe.config import Config
from megatron_terapipe.config.deepspeed import FLAG, RUN_UNDER_ZERO_1
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.options import flag, with_value
from megatron_terapipe.config.parallel import AUTO
from megatron_terapipe.config.training import PrecisionConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.families.registry import FAMILIES, family_of
from megatron_terapipe.huggingface.families.settings import CONFIG_FILE
from megatron_terapipe.strategy import DIMENSIONS, SOLVED, FoundStrategy


def how_to_load_a_model(load: str) -> str:
    """Return how a run gets its model from `--load`, for a command line that gives no sizes of a model."""
    if tagged_checkpoint(load, None) is not None:
        return f"--use-checkpoint-args takes the model from --load {load}"
    return (
        f"--load {load} holds no model: neither a checkpoint, nor {CONFIG_FILE} and weights of Hugging Face, which are "
        "not downloaded here"
    )


NOT_SEARCHED = (
    *("num_layers_per_virtual_pipeline_stage", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("model_chunk_placement", "pipeline_model_parallel_layout", "schedule_memory_limit"),
    *("gradient_accumulation_steps", "rampup_batch_size", "step_batch_size_schedule"),
    *("recompute_method", "recompute_num_layers"),
)
"""Fields with layouts of a run that the search does not have."""

BATCH = "global_batch_size"

Constraints = Mapping[str, tuple[Any, ...]]
"""Values that dimensions of a strategy may have, by name."""


StrategyFinder = Callable[[Config, Constraints], FoundStrategy]
"""Finds the strategy of a run by its configuration, with layout and batch at their defaults, and by the constraints of
flags, the global batch size among them."""


def constraints_of(given: Values) -> Constraints:
    """Return the values that flags allow for dimensions of a strategy, by the name of the dimension."""
    for name in NOT_SEARCHED:
        if given.get(name):
            raise ConfigError(
                f"--strategy auto does not search with {with_value(name, given[name])}: drop one of the two"
            )
    if given.get(BATCH) is None:
        raise ConfigError(f"--strategy auto searches for one global batch size: add {flag(BATCH)}")
    found: dict[str, tuple[Any, ...]] = {BATCH: (given[BATCH],)}
    for each in DIMENSIONS:
        value = given.get(each.setting or "")
        if value is None or each.name == BATCH or (each.name == "token_slices" and value == AUTO):
            continue
        word = isinstance(value, bool | str)
        text = {True: "on", False: "off", AUTO: SOLVED}.get(value, str(value)) if word else str(value)
        try:
            found[each.name] = each.parse(text)
        except ConfigError:
            raise ConfigError(
                f"--strategy auto does not search with {flag(each.setting or each.name)} {value}: drop one of the two"
            ) from None
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """A command line, read: the configuration, and lines about it for the user."""

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
        argv: words after the name of the program; None = the words of this process.
        find_strategy: finds the strategy of `--strategy auto`; None where no run starts.
    """
    words = sys.argv[1:] if argv is None else argv
    group = asked_for(words)
    if group is not None:
        print(trainer_help(group), end="")
        raise SystemExit(0)
    line = read_command_line(words)
    merged = Merged.of(line)
    with merged.named_in_errors():
        _check_accepted(line, merged.values)
        searched: tuple[str, ...] = ()
        if merged.values.get("strategy") == AUTO:
            merged, searched = _with_found_strategy(merged, find_strategy)
        values, about_zero = _run_under_zero(merged.values)
        config = build_config(values)
    lines = (
        *notices(line, merged.values, config),
        *_about_deepspeed(line),
        *searched,
        *about_zero,
        *_about_export(merged.family, config.model),
    )
    return Arguments(config=config, notices=lines)


def _about_deepspeed(line: CommandLine) -> Iterator[str]:
    """Yield lines about a DeepSpeed file: settings without effect, and a flag that it replaces."""
    file = deepspeed_file(line)
    if file.without_effect:
        yield f"These settings of {FLAG} {file.path} have no effect here: {'; '.join(file.without_effect)}"
    if unused := unused_loss_scale(line, file):
        yield (
            f"--loss-scale {unused:g} has no effect beside the fp16 section of {FLAG} {file.path}, as in "
            "Megatron-DeepSpeed with --deepspeed"
        )


def _about_export(origin: str | None, model: ModelConfig) -> Iterator[str]:
    """Yield a line if a model that began as one of Hugging Face has become one that no family can express."""
    try:
        if origin in FAMILIES:
            family_of(model, origin)
    except ConfigError as error:
        yield f"This run's checkpoints cannot be exported to Hugging Face: {error}"


def build_config(given: Mapping[str, Any]) -> Config:
    """Build every section from the values given, by field; the rest keep their defaults."""
    declared = list(flags())
    missing = [flag(each.name) for each in declared if each.default is MISSING and each.name not in given]
    if missing:
        said = f"{', '.join(missing)} must be given: add {'it' if len(missing) == 1 else 'them'}"
        of_load = given.get("load") and "--num-layers" in missing
        raise ConfigError(f"{said}; {how_to_load_a_model(given['load'])}" if of_load else said)
    given = resolve_spellings(given)
    if given.get("hybrid_layer_pattern"):  # The stages that it draws are no part of a model.
        given["hybrid_layer_pattern"] = given["hybrid_layer_pattern"].replace("|", "")
    sections = {
        section: section_class(
            **{each.name: given[each.name] for each in declared if each.section == section and each.name in given}
        )
        for section, section_class in get_type_hints(Config).items()
    }
    return Config(**sections)


def _with_found_strategy(merged: Merged, find_strategy: StrategyFinder | None) -> tuple[Merged, tuple[str, ...]]:
    """Return the values with the strategy that is found for them, and the lines about it."""
    if find_strategy is None:
        raise ConfigError("--strategy auto is found when a run starts: name a strategy file here")
    constraints = constraints_of(merged.values)
    of_strategies = {each.setting for each in DIMENSIONS}
    rest = {name: value for name, value in merged.values.items() if name not in of_strategies}
    # Every configuration has a micro-batch.
    found = find_strategy(build_config(rest | {"micro_batch_size": 1}), constraints)
    settings = found.strategy.settings()
    if found.strategy.stage_partition in constraints.get("stage_partition", ()):
        settings.pop("stage_partition")
    # The search has solved for what is left open.
    left_open = {name for name in ("token_slices", "stage_partition") if merged.values.get(name) == AUTO}
    kept = {name: value for name, value in merged.values.items() if name not in left_open}
    part = Part(settings, f"--strategy {found.place}", must_agree=True)
    return replace(merged, values=kept).over(part), found.notices


def _run_under_zero(values: Values) -> tuple[Values, list[str]]:
    """Return the values with ZeRO 1 where DeepSpeed needs it, which changes only where states are; and a line on it."""
    stage, lines = values.get("zero_stage"), []
    if stage in (2, 3):
        lines.append(f"--zero-stage {stage} is {RUN_UNDER_ZERO_1}")
    names = {each.name for each in fields(PrecisionConfig)}
    precision = PrecisionConfig(**{name: value for name, value in values.items() if name in names})
    if stage == 0 and precision.needs_zero:
        dtype = "fp16" if precision.fp16 else "bf16 with gradients that add up in fp32"
        lines.append(f"--zero-stage 0 is run as --zero-stage 1, which trains the same: DeepSpeed needs it for {dtype}")
    return ({**values, "zero_stage": 1} if lines else values), lines


def _check_accepted(line: CommandLine, values: Values) -> None:
    """Check accepted flags against the flags whose value they promise."""
    for spelling in line.accepted:
        accepted = foreign_flags().flags[spelling]
        if accepted.needs and accepted.needs not in values:
            raise ConfigError(f"{spelling} needs {flag(accepted.needs)}: add it")
        if accepted.says is not None:
            name, promised = accepted.says
            actual = values.get(name, default_of(name))
            if actual != promised:
                raise ConfigError(f"{spelling} contradicts {with_value(name, actual)}: drop one of them")
