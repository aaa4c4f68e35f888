"""Build the configuration from a command line, and from the files that it names.

words -> CommandLine -> merge of layers (`LAYERS`) -> sections -> Config

A layer is a source of values: a function of the command line and of the values of the layers above it, which yields
`Part`s and changes nothing. Read `read_arguments` first, below them. A model comes from flags, a preset, a
`config.json`, a checkpoint or a folder of Hugging Face; a strategy from a file, or from the search (`--strategy auto`).
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_terapipe.arguments.foreign_flags import foreign_flags
from megatron_terapipe.arguments.parser import (
    OTHER_DEFAULTS,
    PROGRAM,
    CommandLine,
    OwnFlags,
    asked_for,
    default_of,
    flags,
    notices,
    read_command_line,
    trainer_help,
)
from megatron_terapipe.arguments.spellings import normalize_flags, resolve_spellings
from megatron_terapipe.checkpoint.directories import (
    latest_checkpoint,
    names_model_folder,
    no_checkpoint,
    readable_checkpoint,
    tagged_checkpoint,
)
from megatron_terapipe.checkpoint.foreign import MEGATRON, foreign_origin, is_megatron
from megatron_terapipe.config import CheckpointConfig, Config, ModelConfig, PrecisionConfig
from megatron_terapipe.config.deepspeed import FLAG, RUN_UNDER_ZERO_1, DeepSpeedFile
from megatron_terapipe.config.options import flag, with_value
from megatron_terapipe.config.parallel import AUTO
from megatron_terapipe.config.parsing import read_json
from megatron_terapipe.config.presets import MODEL_PRESETS, find_preset
from megatron_terapipe.config.recurrences import pattern_and_stages
from megatron_terapipe.errors import CheckpointError, ConfigError
from megatron_terapipe.huggingface.families.registry import (
    FAMILIES,
    family_of,
    is_model_folder,
    read_fields,
    tokenizer_of,
)
from megatron_terapipe.huggingface.families.settings import CONFIG_FILE
from megatron_terapipe.strategy import DIMENSIONS, SOLVED, FoundStrategy, Strategy

Values = Mapping[str, Any]

TOKENIZER_FLAGS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


class Part(NamedTuple):
    """Values from one source."""

    values: Values
    source: str
    """For errors; empty for flags as they were typed."""
    must_agree: bool = False
    """Whether it is an error if a layer above has another value."""
    family: str | None = None
    """Family of Hugging Face of a model that begins with these values; None if unknown."""


def resumed_run(line: CommandLine, above: Values) -> Iterator[Part]:
    """Load the newest checkpoint of `--save` once there is one, where a run begins with a model of another trainer.

    One command then starts and restarts the run. Until there is one, a folder of Hugging Face gives weights only.
    """
    load, save = line.given.get("load", ""), line.given.get("save")
    is_folder = load != "" and names_model_folder(load)
    begins = is_folder or (load != "" and foreign_origin(load) == MEGATRON)
    if begins and save is not None and not is_model_folder(save) and latest_checkpoint(save) is not None:
        values = {"load": save, "finetune": False, "no_load_optim": False, "load_tag": None, "ckpt_step": None}
        yield Part(values, f"--save {save}")
    if is_folder:
        yield Part({"finetune": True, "use_checkpoint_args": False}, f"--load {load}")


def command_line(line: CommandLine, above: Values) -> Iterator[Part]:
    """Read the flags. A preset only sets other fields: a checkpoint must not differ by its name."""
    values = {name: value for name, value in normalize_flags(line.given).items() if name != "model_preset"}
    if unused_loss_scale(line, deepspeed_file(line)):
        values.pop("loss_scale")
    for name, value in values.items():
        spelled = line.set_by.get(name, flag(name))
        yield Part({name: value}, "" if spelled == flag(name) else spelled)


def strategy_file(line: CommandLine, above: Values) -> Iterator[Part]:
    """Read the file of `--strategy`: a strategy, or an entry of the search's output, which has one.

    Fields that it leaves out, or holds null for where null means "your choice", are not set.
    """
    path = above.get("strategy")
    if path in (None, AUTO):
        return
    document = read_json(path, "--strategy")
    if isinstance(document, Mapping) and isinstance(document.get("strategy"), Mapping):
        document = document["strategy"]
    settings = Strategy.from_json(document).settings()
    assert isinstance(document, Mapping)
    stated = {each.setting for each in DIMENSIONS if each.name in document and each.setting}
    if settings["global_batch_size"] is None:
        stated.discard("global_batch_size")
    chosen = {name: value for name, value in settings.items() if name in stated}
    yield Part(chosen, f"--strategy {path}", must_agree=True)


def preset(line: CommandLine, above: Values) -> Iterator[Part]:
    """Read the published model, or the `config.json`, of `--model-preset`."""
    name = line.given.get("model_preset")
    if not name:
        return
    family, settings, source = None, None, f"--model-preset {name}"
    there = os.path.exists(name)  # Path.exists raises on a name that is too long.
    if name not in MODEL_PRESETS and ("/" in name or there):
        if not there and not name.endswith(".json"):
            raise ConfigError(
                f"{source} is not here, and is not downloaded: download {CONFIG_FILE} of the model, and give its path"
            )
        family, settings = read_fields(name, "--model-preset")
    yield Part(find_preset(name).settings if settings is None else settings, source, family=family)


def model_folder(line: CommandLine, above: Values) -> Iterator[Part]:
    """Read the folder of Hugging Face that `--load` names: its model, and its tokenizer if no flag gives one."""
    load, save = line.given.get("load"), line.given.get("save")
    if not load or not names_model_folder(load):
        return
    source = f"--load {load}"
    for name in ("load_tag", "ckpt_step"):
        if line.given.get(name) is not None:
            raise ConfigError(
                f"{flag(name)} {line.given[name]} names a checkpoint, and {source} is a model of Hugging Face: drop it"
            )
    if save is not None and is_model_folder(save):
        raise ConfigError(f"--save {save} holds a model of Hugging Face: name another directory for checkpoints")
    family, settings = read_fields(load, "--load")
    yield Part(_without_what_follows(settings, above), source, family=family)
    if not any(above.get(name) for name in TOKENIZER_FLAGS):
        found = tokenizer_of(Path(load))
        if not found and not above.get("mock_data"):
            raise ConfigError(f"{source} has no tokenizer that can be read: add --tokenizer-type and its files")
        yield Part(found, source)


def model_of_checkpoint(line: CommandLine, above: Values) -> Iterator[Part]:
    """Read the model of the checkpoint that `--use-checkpoint-args` takes.

    The checkpoint is compared with flags that differ when it is loaded.
    """
    if not above.get("use_checkpoint_args"):
        return
    checkpoint = CheckpointConfig(
        **{each.name: above[each.name] for each in fields(CheckpointConfig) if each.name in above}
    )
    found = readable_checkpoint(str(checkpoint.load), checkpoint.tag, or_previous=checkpoint.load_previous_if_damaged)
    if found is None:
        raise CheckpointError(no_checkpoint(str(checkpoint.load)))
    directory, info = found
    # The sequence length of a model that was imported is the longest that it can process, not that of a training.
    left_out: tuple[str, ...] = () if info.was_trained else ("seq_length",)
    if is_megatron(directory):  # Its vocabulary is padded for other ranks; the run has that of its tokenizer.
        left_out = ("vocab_size", "vocab_rows")
    settings = {name: value for name, value in info.model.items() if name not in left_out}
    yield Part(_without_what_follows(settings, above), f"--load {checkpoint.load}", family=info.family)


def _without_what_follows(settings: Values, above: Values) -> Values:
    """Return settings of a model except those that follow from a scaling of rotations by flags."""
    scaled = above.keys() & {"rotary_scaling", "rotary_scaling_factor"}
    follow = {"rotary_attention_factor"} if scaled else set()
    if above.get("rotary_scaling", "longrope") != "longrope":
        follow |= {"rotary_short_factors", "rotary_long_factors"}
    if scaled and settings.get("rotary_scaling") == "none":
        follow |= {"rotary_scaling", "rotary_scaling_factor"}
    return {name: value for name, value in settings.items() if name not in follow}


def fallback_flags(line: CommandLine, above: Values) -> Iterator[Part]:
    """Read the flags that count only where no other flag or file sets their field."""
    for name, (spelling, value) in line.fallbacks.items():
        if name in above and above[name] == default_of(name):
            raise ConfigError(
                f"{spelling} contradicts {line.set_by.get(name, flag(name))} {above[name]}: drop one of them"
            )
        yield Part({name: value}, spelling)


def hybrid_pattern(line: CommandLine, above: Values) -> Iterator[Part]:
    """Read the number of layers, and the stages if it draws any, from a hybrid pattern."""
    pattern = above.get("hybrid_layer_pattern")
    if pattern is None:
        return
    symbols, bounds = pattern_and_stages(pattern)
    found: dict[str, Any] = {"num_layers": len(symbols)}
    if bounds:
        ranks, stages = above.get("pipeline_model_parallel_size", 1), len(bounds) - 1
        found |= {"stage_partition": ",".join(map(str, bounds))}
        found |= {"num_model_chunks": stages // ranks} if stages % ranks == 0 else {}
    yield Part(found, f"--hybrid-layer-pattern {pattern}")


def deepspeed_settings(line: CommandLine, above: Values) -> Iterator[Part]:
    """Read the settings of a DeepSpeed file that are fields of ours; those that contradict flags are refused later."""
    file = deepspeed_file(line)
    # The number of micro-batches follows from the global batch size.
    known = {"gradient_accumulation_steps"} if "global_batch_size" in {*above, *file.values} else set()
    for name, value in file.values.items():
        if name not in known:
            yield Part({name: value}, f"{file.set_by[name]} of {FLAG} {file.path}")


def megatron_defaults(line: CommandLine, above: Values) -> Iterator[Part]:
    """Read Megatron's defaults for `--defaults megatron`."""
    if above.get("defaults") == "megatron":
        yield Part({name: theirs for name, (theirs, _) in OTHER_DEFAULTS.items()}, "--defaults megatron")


def own_data(line: CommandLine, above: Values) -> Iterator[Part]:
    """Read the tokenizer of data that the program makes: ids below `--vocab-size`, if no flag names another."""
    if line.has_own_data and not any(above.get(name) for name in TOKENIZER_FLAGS):
        yield Part({"tokenizer_type": "NullTokenizer"}, "the program, which makes its data")


LAYERS: tuple[Callable[[CommandLine, Values], Iterator[Part]], ...] = (
    resumed_run,
    command_line,
    strategy_file,
    preset,
    model_folder,
    model_of_checkpoint,
    fallback_flags,
    hybrid_pattern,
    deepspeed_settings,
    megatron_defaults,
    own_data,
)
"""Sources of values: the first that sets a field counts, and the default of the field if none does."""


@dataclass(frozen=True, slots=True)
class Merged:
    """Values of fields, each with its source."""

    values: dict[str, Any]
    sources: dict[str, str]
    """Source by field, for errors; empty for a flag as it was typed."""
    family: str | None = None
    """Family of Hugging Face that the model begins with."""

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Add to an error the sources of the fields that it is about, unless their flags were typed as it has them."""
        try:
            yield
        except ConfigError as error:
            by_source: dict[str, list[str]] = {}
            for name, source in self.sources.items():
                if source and re.search(rf"{flag(name)}(?![\w-])", str(error)) and source not in str(error):
                    by_source.setdefault(source, []).append(flag(name))
            if not by_source:
                raise
            named = "; ".join(f"{', '.join(flags)} from {source}" for source, flags in by_source.items())
            raise type(error)(f"{error} ({named})") from None

    @classmethod
    def of(cls, line: CommandLine) -> "Merged":
        """Merge all layers."""
        merged = cls({}, {})
        for layer in LAYERS:
            for part in layer(line, merged.values):
                merged = merged.over(part)
        return merged

    def over(self, part: Part) -> "Merged":
        """Return these values, and of a part those that are missing."""
        for name, value in part.values.items() if part.must_agree else ():
            given = self.values.get(name, value)
            if str(given).replace(" ", "") != str(value).replace(" ", ""):
                raise ConfigError(
                    f"{flag(name)} {given} contradicts {part.source}, where it is "
                    f"{'left to the default' if value is None else value}: drop the flag, or change the file"
                )
        sources = dict.fromkeys(part.values, part.source) | self.sources
        return Merged({**part.values, **self.values}, sources, part.family or self.family)


def deepspeed_file(line: CommandLine) -> DeepSpeedFile:
    """Read the file of `--deepspeed-config`; an empty one without it."""
    return DeepSpeedFile.read(line.given.get("deepspeed_config"))


def unused_loss_scale(line: CommandLine, file: DeepSpeedFile) -> float | None:
    """Return the scale of a flag that the fp16 section of a file replaces, as in Megatron-DeepSpeed; None if none."""
    replaced = "fp16" in file.set_by and "--deepspeed" in line.accepted
    return line.given.get("loss_scale") if replaced else None


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


class Arguments(NamedTuple):
    """A command line, read: the configuration, and lines about it for the start of the run."""

    config: Config
    notices: tuple[str, ...]


def parse_arguments(argv: Sequence[str] | None = None) -> Config:
    """Return the configuration that a command line describes; see `read_arguments`."""
    return read_arguments(argv).config


def read_arguments(
    argv: Sequence[str] | None = None,
    find_strategy: StrategyFinder | None = None,
    *,
    program: str = PROGRAM,
    own_flags: OwnFlags | None = None,
    has_own_data: bool = False,
) -> Arguments:
    """Read the command line, and the strategy file and the preset that it names.

    Args:
        argv: words after the name of the program; None = the words of this process.
        find_strategy: finds the strategy of `--strategy auto`; None where no run starts.
        own_flags: adds flags of the program's own, whose values are `Config.own`.
        has_own_data: whether the program makes its data, so that no flag has to name any.
    """
    words = sys.argv[1:] if argv is None else argv
    group = asked_for(words)
    if group is not None:
        print(trainer_help(group, program, own_flags), end="")
        raise SystemExit(0)
    line = read_command_line(words, own_flags, has_own_data=has_own_data)
    merged = Merged.of(line)
    with merged.named_in_errors():
        _check_accepted(line, merged.values)
        searched: tuple[str, ...] = ()
        if merged.values.get("strategy") == AUTO:
            merged, searched = _with_found_strategy(merged, find_strategy)
        values, about_zero = _run_under_zero(merged.values)
        config = build_config(values)
        if not has_own_data:
            config.data.check_source()
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
    sections: dict[str, Any] = {
        section: section_class(
            **{each.name: given[each.name] for each in declared if each.section == section and each.name in given}
        )
        for section, section_class in Config.sections().items()
    }
    return Config(**sections, **{name: given[name] for name in ("own",) if name in given})


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
