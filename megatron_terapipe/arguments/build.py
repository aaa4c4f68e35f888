"""Build the configuration from a command line, and from the files that it names.

words -> CommandLine -> strategy file -> preset, model folder or checkpoint -> DeepSpeed file -> sections -> Config

Read `read_arguments` first. A model comes from flags, a preset, a `config.json`, a checkpoint or a folder of Hugging
Face; a strategy from a file, or from the search (`--strategy auto`).
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from megatron_terapipe.arguments.foreign_flags import foreign_flags
from megatron_terapipe.arguments.help import asked_for, trainer_help
from megatron_terapipe.arguments.parser import (
    OTHER_DEFAULTS,
    CommandLine,
    default_of,
    flags,
    notices,
    read_command_line,
)
from megatron_terapipe.arguments.spellings import in_our_fields, take_megatron_meaning
from megatron_terapipe.checkpoint.directories import (
    latest_checkpoint,
    names_model_folder,
    no_checkpoint,
    readable_checkpoint,
    tagged_checkpoint,
)
from megatron_terapipe.checkpoint.foreign import MEGATRON, foreign_origin, is_megatron
from megatron_terapipe.config import Config
from megatron_terapipe.config.checkpoint import CheckpointConfig
from megatron_terapipe.config.deepspeed import RUN_UNDER_ZERO_1, DeepSpeedValues
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.options import flag, with_value
from megatron_terapipe.config.parallel import AUTO
from megatron_terapipe.config.parsing import read_json
from megatron_terapipe.config.presets import MODEL_PRESETS, find_preset
from megatron_terapipe.config.recurrences import pattern_and_stages
from megatron_terapipe.config.training import PrecisionConfig
from megatron_terapipe.errors import CheckpointError, ConfigError
from megatron_terapipe.huggingface.families.registry import FAMILIES, family_of, is_model_folder, read_fields
from megatron_terapipe.huggingface.families.settings import CONFIG_FILE
from megatron_terapipe.huggingface.tokenizer_files import tokenizer_of
from megatron_terapipe.strategy import DIMENSIONS, SOLVED, FoundStrategy, Strategy


def preset_settings(name_or_path: str) -> tuple[str | None, Mapping[str, Any]]:
    """Return the family of a `config.json`, and the fields of the model section that `--model-preset` sets."""
    if name_or_path not in MODEL_PRESETS and ("/" in name_or_path or Path(name_or_path).exists()):
        if not Path(name_or_path).exists() and not name_or_path.endswith(".json"):
            raise ConfigError(
                f"--model-preset {name_or_path} is not here, and is not downloaded: download {CONFIG_FILE} of the "
                "model, and give its path"
            )
        return read_fields(name_or_path, "--model-preset")
    return None, find_preset(name_or_path).settings


def take_model_from_checkpoint(given: dict[str, Any]) -> str | None:
    """Fill in the model section, and return the family that the model began with.

    The checkpoint is compared with flags that differ when it is loaded.
    """
    checkpoint = CheckpointConfig(
        **{each.name: given[each.name] for each in fields(CheckpointConfig) if each.name in given}
    )
    found = readable_checkpoint(str(checkpoint.load), checkpoint.tag, or_previous=checkpoint.load_previous_if_damaged)
    if found is None:
        raise CheckpointError(no_checkpoint(str(checkpoint.load)))
    directory, info = found
    # The sequence length of a model that was imported is the longest that it can process, not that of a training.
    left_out: tuple[str, ...] = () if info.was_trained else ("seq_length",)
    if is_megatron(directory):  # Its vocabulary is padded for other ranks; the run has that of its tokenizer.
        left_out = ("vocab_size", "vocab_rows")
    _fill_in(given, {name: value for name, value in info.model.items() if name not in left_out})
    return info.family


def _fill_in(given: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Take settings of a model that no flag gives, except those that follow from a scaling of rotations by flags."""
    scaled = given.keys() & {"rotary_scaling", "rotary_scaling_factor"}
    follow = {"rotary_attention_factor"} if scaled else set()
    if given.get("rotary_scaling", "longrope") != "longrope":
        follow |= {"rotary_short_factors", "rotary_long_factors"}
    if scaled and settings.get("rotary_scaling") == "none":
        follow |= {"rotary_scaling", "rotary_scaling_factor"}
    for name, value in settings.items():
        if name not in follow:
            given.setdefault(name, value)


def how_to_load_a_model(load: str) -> str:
    """Return how a run gets its model from `--load`, for a command line that gives no sizes of a model."""
    if tagged_checkpoint(load, None) is not None:
        return f"--use-checkpoint-args takes the model from --load {load}"
    return (
        f"--load {load} holds no model: neither a checkpoint, nor {CONFIG_FILE} and weights of Hugging Face, which are "
        "not downloaded here"
    )


def take_model_folder(given: dict[str, Any]) -> str:
    """Begin with the model of the folder that `--load` names: its settings, its tokenizer, and only its weights.

    A run that has saved checkpoints already continues from the newest, so that one command starts and restarts it; the
    folder then describes the model, and the checkpoint is compared with it. Returns the family of the model.
    """
    load, save = str(given["load"]), given.get("save")
    for name in ("load_tag", "ckpt_step"):
        if given.get(name) is not None:
            raise ConfigError(
                f"{flag(name)} {given[name]} names a checkpoint, and --load {load} is a model of Hugging Face: drop it"
            )
    if save is not None and is_model_folder(save):
        raise ConfigError(f"--save {save} holds a model of Hugging Face: name another directory for checkpoints")
    family, settings = read_fields(load, "--load")
    _fill_in(given, settings)
    if not any(given.get(name) for name in ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")):
        found = tokenizer_of(Path(load))
        if not found and not given.get("mock_data"):
            raise ConfigError(f"--load {load} has no tokenizer that can be read: add --tokenizer-type and its files")
        given.update(found)
    given.pop("use_checkpoint_args", None)
    given["finetune"] = True
    _resume_from_save(given)
    return family


def _resume_from_save(given: dict[str, Any]) -> None:
    """Continue from the newest checkpoint in `--save` if there is one, not from the model that a run began with."""
    save = given.get("save")
    if save is not None and latest_checkpoint(save) is not None:
        given |= {"load": save, "finetune": False, "no_load_optim": False}
        for name in ("load_tag", "ckpt_step"):
            given.pop(name, None)


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


def constraints_of(given: Mapping[str, Any]) -> Constraints:
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
        argv: words after the name of the program; None = those of this process.
        find_strategy: finds the strategy of `--strategy auto`; None where no run starts.
    """
    words = sys.argv[1:] if argv is None else argv
    group = asked_for(words)
    if group is not None:
        print(trainer_help(group), end="")
        raise SystemExit(0)
    line = read_command_line(words)
    given = line.given
    take_megatron_meaning(given)
    if given.get("strategy") not in (None, AUTO):
        _overlay(given, _strategy_settings(given["strategy"]), given["strategy"])
    origin = None
    if given.get("model_preset"):
        # Its sizes are filled in, and a checkpoint must not differ by the name.
        origin, settings = preset_settings(given.pop("model_preset"))
        for name, value in settings.items():
            given.setdefault(name, value)
    if given.get("load") and names_model_folder(given["load"]):
        origin = take_model_folder(given)
    else:
        if given.get("load") and foreign_origin(given["load"]) == MEGATRON:
            _resume_from_save(given)
        if given.get("use_checkpoint_args"):
            origin = take_model_from_checkpoint(given)
    _fall_back(line)
    _take_pattern(given)
    file = DeepSpeedValues.read(given.get("deepspeed_config"), given)
    unused_scale = "fp16" in file.set_by and "--deepspeed" in line.accepted and given.pop("loss_scale", None)
    if unused_scale:
        file = DeepSpeedValues.read(file.path, given)
    given |= file.values
    if given.get("defaults") == "megatron":
        given |= {name: theirs for name, (theirs, _) in OTHER_DEFAULTS.items()} | given
    with file.named_in_errors():
        _check_accepted(line)
        searched = _take_found_strategy(given, find_strategy) if given.get("strategy") == AUTO else ()
        about_zero = list(_run_under_zero(given))
        if unused_scale:
            of_file = f"the fp16 section of --deepspeed-config {file.path}, as in Megatron-DeepSpeed with --deepspeed"
            about_zero.append(f"--loss-scale {unused_scale:g} has no effect beside {of_file}")
        config = build_config(given)
    about_export = _about_export(origin, config.model)
    lines = (*notices(line, config), *file.notices(), *searched, *about_zero, *about_export)
    return Arguments(config=config, notices=lines)


def _take_pattern(given: dict[str, Any]) -> None:
    """Take the number of layers, and the stages if it draws any, from a hybrid pattern."""
    if given.get("hybrid_layer_pattern") is None:
        return
    given["hybrid_layer_pattern"], bounds = pattern_and_stages(given["hybrid_layer_pattern"])
    given.setdefault("num_layers", len(given["hybrid_layer_pattern"]))
    if bounds:
        ranks, chunks = given.get("pipeline_model_parallel_size", 1), given.get("num_model_chunks")
        given.setdefault("stage_partition", ",".join(map(str, bounds)))
        if chunks is None and (len(bounds) - 1) % ranks == 0:
            given["num_model_chunks"] = (len(bounds) - 1) // ranks


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
    given = in_our_fields(given)
    sections = {
        section: section_class(
            **{each.name: given[each.name] for each in declared if each.section == section and each.name in given}
        )
        for section, section_class in get_type_hints(Config).items()
    }
    return Config(**sections)


def _take_found_strategy(given: dict[str, Any], find_strategy: StrategyFinder | None) -> tuple[str, ...]:
    """Add the settings of the strategy that is found for the values given, and return the lines about it."""
    if find_strategy is None:
        raise ConfigError("--strategy auto is found when a run starts: name a strategy file here")
    constraints = constraints_of(given)
    of_strategies = {each.setting for each in DIMENSIONS}
    rest = {name: value for name, value in given.items() if name not in of_strategies}
    # Every configuration has a micro-batch.
    found = find_strategy(build_config(rest | {"micro_batch_size": 1}), constraints)
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
    """Read a strategy file, and return its settings by field of the configuration.

    The file holds a strategy, or an entry of the search's output, which has one under `strategy`. Fields that it
    leaves out, or holds null for where null means "your choice", are not in the answer.
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
    """Add the settings of a strategy file to those of flags; one must not contradict the other."""
    for name, value in strategy.items():
        explicit = given.setdefault(name, value)
        if str(explicit).replace(" ", "") != str(value).replace(" ", ""):
            raise ConfigError(
                f"{flag(name)} {explicit} contradicts --strategy {path}, where it is "
                f"{'left to the default' if value is None else value}: drop the flag, or change the file"
            )


def _run_under_zero(given: dict[str, Any]) -> Iterator[str]:
    """Run ZeRO as ZeRO 1 where DeepSpeed needs it, which changes only where states are; yield a line about it."""
    if given.get("zero_stage") in (2, 3):
        yield f"--zero-stage {given['zero_stage']} is {RUN_UNDER_ZERO_1}"
        given["zero_stage"] = 1
    names = {each.name for each in fields(PrecisionConfig)}
    precision = PrecisionConfig(**{name: value for name, value in given.items() if name in names})
    if given.get("zero_stage") == 0 and precision.needs_zero:
        given["zero_stage"] = 1
        dtype = "fp16" if precision.fp16 else "bf16 with gradients that add up in fp32"
        yield f"--zero-stage 0 is run as --zero-stage 1, which trains the same: DeepSpeed needs it for {dtype}"


def _check_accepted(line: CommandLine) -> None:
    """Check accepted flags against the flags whose value they promise."""
    for spelling in line.accepted:
        accepted = foreign_flags().flags[spelling]
        if accepted.needs and accepted.needs not in line.given:
            raise ConfigError(f"{spelling} needs {flag(accepted.needs)}: add it")
        if accepted.says is not None:
            name, promised = accepted.says
            actual = line.given.get(name, default_of(name))
            if actual != promised:
                words = flag(name) if actual is True else f"{flag(name)} {actual}"
                raise ConfigError(f"{spelling} contradicts {words}: drop one of them")


def _fall_back(line: CommandLine) -> None:
    """Apply the flags that count only where no other flag or file sets their field."""
    for name, (spelling, value) in line.fallbacks.items():
        actual = line.given.setdefault(name, value)
        if actual == default_of(name):
            raise ConfigError(f"{spelling} contradicts {line.set_by.get(name, flag(name))} {actual}: drop one of them")
