"""`--recompute-method`: which layers run forward again in the backward."""

from collections import Counter

import pytest

from megatron_terapipe.model.block import TransformerBlock
from megatron_terapipe.training.build_engine import build_engine
from tests.distributed import run_each
from tests.training.gpt_runs import Setup, batches, run_of

PIPELINE = "--pipeline-model-parallel-size 2 --num-token-slices 2"
FULL = f"{PIPELINE} --recompute-granularity full"
BLOCK = f"{FULL} --recompute-method block"
EXPECTED = {
    PIPELINE: [1, 1, 1, 1],
    f"{FULL} --recompute-num-layers 2": [2, 2, 2, 2],
    BLOCK: [2, 1, 2, 1],
    f"{BLOCK} --recompute-num-layers 5": [2, 2, 2, 2],
    f"{BLOCK} --stage-partition 0,1,4 --recompute-num-layers 2": [2, 2, 2, 1],
    f"{BLOCK} --num-layers 8 --num-model-chunks 2": [2, 1, 2, 1, 2, 1, 2, 1],
}
"""How often each transformer layer runs for a token slice, by flags."""


def forwards(flags: str) -> Counter[int]:
    """How often each layer of this rank ran in one step, by its number among all layers."""
    setup = Setup(2, flags, micro_batches=2)
    engine = build_engine(run_of(setup))
    ran: Counter[int] = Counter()
    for number in range(2, 10):
        layer = engine.module.layer(number)
        if isinstance(layer, TransformerBlock):
            layer.register_forward_pre_hook(lambda *_, number=number: ran.update([number - 2]))
    engine.train_batch(iter(batches(setup, 0)))
    return ran


@pytest.fixture(scope="module")
def by_flags() -> dict[str, Counter[int]]:
    found = run_each(forwards, 2, list(EXPECTED))
    return {flags: ran + other for flags, (ran, other) in zip(EXPECTED, found, strict=True)}


@pytest.mark.parametrize("flags", EXPECTED)
def test_layers_run_again_as_asked(flags: str, by_flags: dict[str, Counter[int]]) -> None:
    num_ops = 2 * 2
    assert by_flags[flags] == Counter({layer: times * num_ops for layer, times in enumerate(EXPECTED[flags])})
