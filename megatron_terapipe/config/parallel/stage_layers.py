"""Transformer layers of each stage, as flags say it."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.partition import METHODS, StagePartition
from megatron_terapipe.config.fields.options import flag
from megatron_terapipe.errors import ConfigError


def uniform_stages(
    num_layers: int, num_ranks: int, model_chunks: int, *, first: int | None, last: int | None
) -> StagePartition:
    """Return the transformer layers of each stage, as even as possible except for the ends that flags give.

    Args:
        model_chunks: stages of each pipeline rank.
        first: layers of the first pipeline rank; None = a share like the others.
        last: layers of the last pipeline rank; None = a share like the others.

    Raises:
        ConfigError: if the ends leave too few layers for the stages between.
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
    """Return equally many layers for each stage, where the embedding or the output layer counts as one.

    Args:
        embedding: whether the embedding counts as a layer of the first stage.
        output: whether the output layer counts as one of the last.

    Raises:
        ConfigError: if the stages cannot have equally many, or one would have no transformer layer.
    """
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
    """Return the transformer layers of each stage that `--stage-partition` lists; None if it names a rule.

    Args:
        model_chunks: stages of each pipeline rank.

    Raises:
        ConfigError: if the list does not give every stage a layer.
    """
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
    """Hold Megatron's number of layers for each stage against the flags that deal layers, too.

    Args:
        each: layers of a stage; None = not given.
        num_model_chunks: stages of each pipeline rank; None = not given.

    Raises:
        ConfigError: if two of them are given.
    """
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
    """Hold what flags say of the first and the last pipeline rank against each other, and against the stages.

    Args:
        model_chunks: stages of each pipeline rank.
        placement: which stages a rank owns, `looped` or `v`.
        layers: transformer layers of an end, by the field that gives them.
        counted: fields that count the embedding or the output layer as a transformer layer.

    Raises:
        ConfigError: if two of them deal the same layers, or an end cannot have as many.
    """
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
