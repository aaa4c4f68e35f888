"""Which transformer layers stand on which stage, as flags say it."""

from itertools import accumulate
from typing import TYPE_CHECKING

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.partition import METHODS, StagePartition
from megatron_terapipe.errors import ConfigError

if TYPE_CHECKING:  # The section calls these functions, so at run time the arrow must not go back.
    from megatron_terapipe.config.parallel import ParallelConfig


def check_ends(parallel: "ParallelConfig") -> None:
    """Check the layers that flags give the first and the last pipeline rank.

    Raises:
        ConfigError: if they contradict another flag, or leave no rank for the rest.
    """
    ends = {
        "--decoder-first-pipeline-num-layers": parallel.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": parallel.decoder_last_pipeline_num_layers,
    }
    given = {name: number for name, number in ends.items() if number is not None}
    words = [f"{name} {number}" for name, number in given.items()]
    if words and parallel.stage_partition != "uniform":
        raise ConfigError(
            f"{words[0]} and --stage-partition {parallel.stage_partition} both deal layers to stages: drop one of them"
        )
    if len(words) > parallel.pipeline_model_parallel_size - 1:
        raise ConfigError(
            f"{' and '.join(words)} leave no other stage for the rest of the layers: raise "
            "--pipeline-model-parallel-size, or drop it"
        )
    model_chunks = parallel.num_model_chunks
    if words and model_chunks > 1 and parallel.model_chunk_placement != "looped":
        raise ConfigError(
            f"{words[0]} with --model-chunk-placement {parallel.model_chunk_placement}, where one rank has the first "
            "and the last stage, does not say which of them it means: use --stage-partition with a list"
        )
    for name, number in given.items():
        if number % model_chunks:
            raise ConfigError(
                f"{name} {number} cannot be dealt to {model_chunks} model chunks: give a multiple of {model_chunks}, "
                "or use --stage-partition with a list"
            )


def uniform_stages(parallel: "ParallelConfig", num_layers: int) -> StagePartition:
    """Return the transformer layers of each stage, as even as possible except at the ends that flags set.

    Args:
        parallel: the parallel section.
        num_layers: transformer layers of the model.

    Raises:
        ConfigError: if the ends leave too few layers for the stages between.
    """
    ranks, model_chunks = parallel.pipeline_model_parallel_size, parallel.num_model_chunks
    ends = {0: parallel.decoder_first_pipeline_num_layers, ranks - 1: parallel.decoder_last_pipeline_num_layers}
    given = {rank: number for rank, number in ends.items() if number is not None}
    num_between = parallel.num_stages - len(given) * model_chunks
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
        given[stage % ranks] // model_chunks if stage % ranks in given else next(others)
        for stage in range(parallel.num_stages)
    ]
    return StagePartition(tuple(accumulate(sizes, initial=0)))


def stage_bounds(parallel: "ParallelConfig") -> StagePartition | None:
    """The transformer layers of each stage where a list says them; None if a rule deals them.

    Raises:
        ConfigError: if the list does not give every stage a layer.
    """
    if parallel.stage_partition in METHODS:
        return None
    if parallel.stage_partition.startswith("type:"):
        raise ConfigError(
            f"--stage-partition {parallel.stage_partition}: only transformer layers are dealt out, as by "
            "type:transformer: use uniform, beside it --decoder-first-pipeline-num-layers or "
            "--decoder-last-pipeline-num-layers where embedding and output layer weigh much"
        )
    try:
        bounds = StagePartition.parse(parallel.stage_partition)
    except PlanError as error:
        raise ConfigError(f"--stage-partition: {error}") from None
    if bounds.num_stages != parallel.num_stages:
        times = f" x --num-model-chunks {parallel.num_model_chunks}" if parallel.num_model_chunks > 1 else ""
        raise ConfigError(
            f"--stage-partition {bounds} has {bounds.num_stages} stages, but --pipeline-model-parallel-size is "
            f"{parallel.pipeline_model_parallel_size}{times}: give {parallel.num_stages + 1} bounds, the first layer "
            "of each stage and the end"
        )
    return bounds
