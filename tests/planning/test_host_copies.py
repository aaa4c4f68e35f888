"""Bytes that wait on the host, by the flags of a run."""

import pytest

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import Config
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning import host_copies

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --num-key-value-heads 2 --seq-length 32 --vocab-size 64"
    " --micro-batch-size 3 --global-batch-size 6 --train-iters 1 --lr 1 --mock-data --bf16"
    " --recompute-granularity stage --token-slices 20,12"
)
PP2, OFFLOAD = "--pipeline-model-parallel-size 2", "--offload-token-slices"


def config_of(flags: str) -> Config:
    return parse_arguments(f"{MODEL} {flags}".split())


@pytest.mark.parametrize(
    ("flags", "inputs", "keys", "windows"),
    [
        (PP2, (0, 64), (2 * 32, 2 * 32), (None, None)),
        (f"{PP2} --stage-partition 0,1,4", (0, 64), (32, 3 * 32), (None, None)),
        # Four ranks for two key heads: two have each.
        (f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel", (0, 32), (32, 32), (None, None)),
        (f"{PP2} --context-parallel-size 4", (0, 16), (32, 32), (None, None)),
        (
            f"{PP2} --vocabulary-stages --untie-embeddings-and-output-weights",
            (0, 64, 64, 64 + 8),
            (2 * 32, 2 * 32, 0, 0),
            (None,) * 4,
        ),
        (f"{PP2} --sliding-window 9", (0, 64), (2 * 32, 2 * 32), (9, 9)),
        (f"{PP2} --num-model-chunks 2 --sliding-window 9 --window-attn-skip-freq 4", (0, 64, 64, 64), (32,) * 4, None),
    ],
)
def test_bytes_of_a_token(
    flags: str, inputs: tuple[int, ...], keys: tuple[int, ...], windows: tuple[int | None, ...] | None
) -> None:
    found = host_copies(config_of(f"{flags} {OFFLOAD}"), 1)
    assert found is not None and found.lengths == (20, 12)
    of_a_row = 3 * 2  # rows, and bytes of an element
    assert found.input_bytes == tuple(of_a_row * each for each in inputs)
    assert found.key_value_bytes == tuple(of_a_row * each for each in keys)
    assert found.windows == (windows or (9, 9, 9, None))


def test_nothing_waits_unless_asked_for() -> None:
    assert host_copies(config_of(PP2), 1) is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--recompute-granularity full", "--offload-token-slices does not go with --recompute-granularity full"),
        (f"{PP2} --stage-partition parameters", "--stage-partition parameters deals them when the model is built"),
    ],
)
def test_what_cannot_be_planned_is_refused(flags: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        host_copies(config_of(f"{flags} {OFFLOAD}"), 1)
