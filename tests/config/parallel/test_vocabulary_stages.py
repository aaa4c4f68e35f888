"""The flag --vocabulary-stages: one more stage on each pipeline rank, and what it does not go with."""

import pytest

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.strategy import Strategy

UNTIED = "--untie-embeddings-and-output-weights --vocabulary-stages --pipeline-model-parallel-size 2"


def parsed(flags: str) -> object:
    model = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 300"
    return parse_arguments(f"{model} --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data {flags}".split())


def test_each_rank_has_one_more_stage() -> None:
    parallel = parsed(f"{UNTIED} --num-model-chunks 2 --num-token-slices 2").parallel
    assert parallel.num_stages == 4
    pipeline = parallel.pipeline(3)
    assert (pipeline.num_stages, pipeline.num_model_chunks, pipeline.num_ranks) == (6, 3, 2)
    assert parallel.pipeline_schedule == "optimised"
    assert Strategy.of_config(parsed(UNTIED), 1).stages_of_a_rank == 2


def test_one_rank_keeps_its_output_layer_whole() -> None:
    parallel = parsed("--vocabulary-stages").parallel
    assert (parallel.vocabulary_stages, parallel.vocabulary_parts) == (False, 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--vocabulary-stages --pipeline-model-parallel-size 2",
            "--vocabulary-stages cuts the weight of the output layer, which is that of the embedding here: add "
            "--untie-embeddings-and-output-weights, or drop it",
        ),
        (
            f"{UNTIED} --stage-partition parameters",
            "--vocabulary-stages deals out the output layer itself, and --stage-partition parameters weighs it: use "
            "uniform, or a list of transformer layers",
        ),
        (
            f"{UNTIED} --token-slices balanced-by-documents --num-token-slices 2 --reset-attention-mask",
            "--vocabulary-stages passes messages whose shapes stay the same, and --token-slices balanced-by-documents "
            "changes them from one micro-batch to the next: drop one of them",
        ),
        (
            f"{UNTIED} --make-vocab-size-divisible-by 25",
            "--vocabulary-stages deals the rows of the output layer to 2 pipeline x 1 tensor-parallel ranks, and "
            "--make-vocab-size-divisible-by 25 is not a multiple of 2: change it",
        ),
        (
            f"{UNTIED} --pipeline-schedule 1f1b",
            "--pipeline-schedule 1f1b: schedule '1f1b' has one stage on each pipeline rank, and there are 2 model "
            "chunks: choose 'interleaved' or 'optimised', or one model chunk",
        ),
    ],
)
def test_what_it_does_not_go_with_is_said(flags: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(flags)
    assert str(error.value) == said
