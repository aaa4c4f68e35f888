"""Stages, schedule and token slices of the pipeline, as flags name them.

Stages come from a number of layers, weights, a list, or Megatron's text (`--pipeline-model-parallel-layout`):

Et*3|(tt|)*6t|L      stages are divided by |
E  t t t | t t | ... | L      E embedding, t transformer layer, L loss; x*3 is xxx, (x)*3 too; commas mean nothing
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.layout import METHODS, StagePartition
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config import flops
from megatron_terapipe.config.flops import attended_positions
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.options import flag, one_of
from megatron_terapipe.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed_ext.plan.solve.cuts import DocumentCuts


def uniform_stages(
    num_layers: int, num_ranks: int, model_chunks: int, *, first: int | None, last: int | None
) -> StagePartition:
    """Return the transformer layers of each stage, as even as possible except for the ends that flags give.

    Args:
        first: layers of the first pipeline rank; None = a share like the others.
        last: layers of the last pipeline rank; None = a share like the others.
    """
    ends = {0: first, num_ranks - 1: last}
    given = {rank: number for rank, number in ends.items() if number is not None}
    num_stages = num_ranks * model_chunks
    num_between = num_stages - len(given) * model_chunks
    rest = num_layers - sum(given.values())
    if rest < num_between:
        raise ConfigError(
            f"the first and last stage leave {max(rest, 0)} of {num_layers} layers for {num_between} stages: give "
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers fewer"
        )
    between = StagePartition.uniform(rest, num_between)
    others = iter([len(between.layers(stage)) for stage in range(num_between)])
    # Round and round: stage i is one of rank i mod P.
    sizes = [
        given[stage % num_ranks] // model_chunks if stage % num_ranks in given else next(others)
        for stage in range(num_stages)
    ]
    return StagePartition(tuple(accumulate(sizes, initial=0)))


def weighed_stages(num_layers: int, num_stages: int, *, embedding: bool, output: bool) -> StagePartition:
    """Return equally many layers for each stage, where the embedding or the output layer counts as one."""
    counted = num_layers + embedding + output
    each, rest = divmod(counted, num_stages)
    if rest or each <= (embedding + output if num_stages == 1 else 1):
        raise ConfigError(
            f"--num-layers {num_layers} with {embedding + output} more for --account-for-embedding-in-pipeline-split "
            f"and --account-for-loss-in-pipeline-split is {counted}, which {num_stages} stages cannot share equally: "
            "change it, or use --stage-partition with a list"
        )
    inner = [each * stage - embedding for stage in range(1, num_stages)]
    return StagePartition((0, *inner, num_layers))


def listed_stages(stage_partition: str, num_ranks: int, model_chunks: int) -> StagePartition | None:
    """Return the transformer layers of each stage that `--stage-partition` lists; None if it names a rule."""
    if stage_partition in METHODS:
        return None
    if stage_partition.startswith("type:"):
        raise ConfigError(
            f"--stage-partition {stage_partition}: only transformer layers are dealt out, as by "
            "type:transformer: use uniform, beside it --decoder-first-pipeline-num-layers or "
            "--decoder-last-pipeline-num-layers where embedding and output layer weigh much"
        )
    try:
        bounds = StagePartition.parse(stage_partition)
    except PlanError as error:
        raise ConfigError(f"--stage-partition: {error}") from None
    if bounds.num_stages != num_ranks * model_chunks:
        times = f" x --num-model-chunks {model_chunks}" if model_chunks > 1 else ""
        raise ConfigError(
            f"--stage-partition {bounds} has {bounds.num_stages} stages, but --pipeline-model-parallel-size is "
            f"{num_ranks}{times}: give {num_ranks * model_chunks + 1} bounds, the first layer "
            "of each stage and the end"
        )
    return bounds


def check_layers_per_stage(each: int | None, num_model_chunks: int | None, stage_partition: str) -> None:
    """Hold Megatron's number of layers for each stage against the flags that deal layers, too."""
    if each is None:
        return
    if num_model_chunks is not None:
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {each} and --num-model-chunks {num_model_chunks} both "
            "say how many stages a rank owns: drop one of them"
        )
    if stage_partition != "uniform":
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {each} and --stage-partition {stage_partition} both "
            "deal layers to stages: drop the former, and give --num-model-chunks"
        )


def check_ends(
    stage_partition: str,
    num_ranks: int,
    model_chunks: int,
    *,
    placement: str,
    layers: Mapping[str, int],
    counted: Sequence[str],
) -> None:
    """Hold what flags say of the first and the last pipeline rank against each other, and against the stages."""
    words = [f"{flag(name)} {number}" for name, number in layers.items()]
    uniform = stage_partition == "uniform"
    if counted and (words or not uniform):
        other = words[0] if words else f"--stage-partition {stage_partition}"
        raise ConfigError(f"{flag(counted[0])} and {other} both deal layers to stages: drop one of them")
    if words and not uniform:
        raise ConfigError(
            f"{words[0]} and --stage-partition {stage_partition} both deal layers to stages: drop one of them"
        )
    if len(words) > num_ranks - 1:
        raise ConfigError(
            f"{' and '.join(words)} leave no other stage for the rest of the layers: raise "
            "--pipeline-model-parallel-size, or drop it"
        )
    if words and model_chunks > 1 and placement != "looped":
        raise ConfigError(
            f"{words[0]} with --model-chunk-placement {placement}, where one rank has the first and the last stage, "
            "does not say which of them it means: use --stage-partition with a list"
        )
    for name, number in layers.items():
        if number % model_chunks:
            raise ConfigError(
                f"{flag(name)} {number} cannot be dealt to {model_chunks} model chunks: give a multiple of "
                f"{model_chunks}, or use --stage-partition with a list"
            )


LAYOUT = "pipeline_model_parallel_layout"
"""Field of the configuration."""

FLAG = flag(LAYOUT)

MOST_LAYERS = 10_000
"""Symbols of a text once repetitions are written out."""

_REPEATED_LAYERS = re.compile(r"(?:\(([^()*]*)\)|([^()*|]))\*([0-9]{1,5})")


def layout_stages(text: str, num_ranks: int) -> tuple[StagePartition, int]:
    """Return the transformer layers of each stage, and the number of model chunks.

    Args:
        num_ranks: pipeline ranks. Stage i belongs to rank i mod `num_ranks`, as in Megatron.
    """
    stages = _expanded_layout(text).split("|")
    if unknown := sorted({*"".join(stages)} - {*"EtL"}):
        about = (
            "for multi-token prediction, which models here do not have" if "m" in unknown else "not among E, t and L"
        )
        raise ConfigError(f"{FLAG} {text}: {unknown[0]} is {about}: write another layout")
    first, last = stages[0], stages[-1]
    whole = "".join(stages)
    if not (first.startswith("E") and last.endswith("L") and whole.count("E") == whole.count("L") == 1):
        raise ConfigError(f"{FLAG} {text} does not begin with its one E and end with its one L: write Et|t|tL")
    numbers = [stage.count("t") for stage in stages]
    if 0 in numbers:
        raise ConfigError(
            f"{FLAG} {text}: stage {numbers.index(0)} has no transformer layer, and here each stage has one; the "
            "embedding belongs to the first, the output layer to the last: give that stage a t"
        )
    if len(stages) % num_ranks:
        raise ConfigError(
            f"{FLAG} {text} has {len(stages)} stages, not a multiple of --pipeline-model-parallel-size {num_ranks}: "
            "change one of them"
        )
    return StagePartition(tuple(accumulate(numbers, initial=0))), len(stages) // num_ranks


def _expanded_layout(text: str) -> str:
    """Return the text without commas and repetitions."""
    written = "".join(text.replace(",", "").split())
    while match := _REPEATED_LAYERS.search(written):
        grouped, single, number = match.groups()
        repeated = grouped if grouped is not None else single
        if len(written) + len(repeated) * int(number) > MOST_LAYERS:
            raise ConfigError(f"{FLAG} {text[:80]} has more than {MOST_LAYERS:,} symbols: write fewer")
        written = f"{written[: match.start()]}{repeated * int(number)}{written[match.end() :]}"
    if re.search(r"[()*]", written):
        raise ConfigError(f"{FLAG} {text}: a repetition is written x*3 or (xy)*3: change it")
    return written


def check_schedule(name: str, shape: PipelineShape, memory_limit: float | None) -> None:
    """See that a name is that of a schedule, or of a file, and that the schedule is for a pipeline."""
    if memory_limit is not None and memory_limit < 1:
        raise ConfigError(
            f"--schedule-memory-limit {memory_limit} is less than one micro-batch, which has to go forward before it "
            "can go backward: give 1 or more"
        )
    if memory_limit is not None and name != OPTIMISED:
        raise ConfigError(
            f"--schedule-memory-limit {memory_limit} goes with --pipeline-schedule {OPTIMISED}, not with {name}: "
            "drop it"
        )
    if name in SCHEDULES:
        try:
            # A schedule says itself which pipelines it is for.
            next(SCHEDULES[name](shape, 0), None)
        except PlanError as error:
            raise ConfigError(f"--pipeline-schedule {name}: {error}") from None
    elif name != OPTIMISED and not Path(name).is_file():
        raise ConfigError(
            f"--pipeline-schedule {name} is neither a schedule nor a file of one: choose "
            f"{one_of([*SCHEDULES, OPTIMISED])}, or name a file"
        )


TILE = 16
"""Tokens that lengths are rounded to: kernels work in tiles, and an odd length costs a whole one."""


def balanced_token_slices(model: ModelConfig, num_token_slices: int, *, granularity: int = 1) -> TokenSlices:
    """Cut a sequence so that forward plus backward of every token slice cost the same.

    Later token slices attend to more, and a flash kernel's backward costs more of its forward than a matrix product's
    does; so the first token slices are longer than a balance of forward FLOPs alone would make them. Once a sliding
    window is full, every token attends to as much, and token slices are equally long.

    Args:
        granularity: every length is a multiple of this, whatever kernels like.
    """
    granularity = granularity_of(model.seq_length, num_token_slices, granularity)
    linear, attention = _flops_of_layers(model)

    def cost(tokens: float) -> float:
        attended = sum(each * float(attended_positions(0, tokens, window)) for window, each in attention.items())
        return linear * tokens + attended

    return TokenSlices.of_equal_cost(model.seq_length, num_token_slices, cost, granularity=granularity)


def document_cuts(model: ModelConfig, num_token_slices: int, *, granularity: int = 1) -> "DocumentCuts":
    """Return what cuts each micro-batch so that its token slices cost the same, with the documents that it has.

    Args:
        granularity: every length is a multiple of this, whatever kernels like.
    """
    # Its package has solvers that are compiled, which takes a second to load.
    from deepspeed_ext.plan.solve.cuts import DocumentCuts

    linear, attention = _flops_of_layers(model)
    return DocumentCuts(
        seq_length=model.seq_length,
        num_token_slices=num_token_slices,
        linear_cost=linear,
        attention_costs=attention,
        granularity=granularity_of(model.seq_length, num_token_slices, granularity),
    )


def _flops_of_layers(model: ModelConfig) -> tuple[float, dict[int | None, float]]:
    """FLOPs of all layers, forward and backward: of a token, and of a token and attended position by window."""
    linear = sum(flops.linear_flops_per_token(model, block) for block in model.blocks)
    linear *= 1 + flops.BACKWARD_PER_FORWARD
    attention: dict[int | None, float] = defaultdict(float)
    for block in model.blocks:
        per_position = flops.attention_flops_per_position(model, block)
        attention[block.window] += per_position * (1 + flops.FLASH_BACKWARD_PER_FORWARD)
    return linear, dict(attention)


def granularity_of(seq_length: int, num_token_slices: int, needed: int) -> int:
    """Tokens that token-slice lengths are multiples of: whole tiles, where token slices are long enough for that."""
    whole_tiles = lcm(TILE, needed)
    return whole_tiles if seq_length >= 4 * whole_tiles * num_token_slices else needed
