"""Flags that change no bit of the loss, a gradient or a weight: schedules, overlap, and deterministic algorithms.

Gradients add up in one order whatever the schedule: micro-batches first to last, token slices last to first, and a
product that is deferred adds to its weight as it would have at once. A sum over two replicas does not depend on its
order: gradients may be reduced layer by layer while the last backwards run, and weights gathered in the next forward.
The work of a step is as its flags say: products deferred, waits, and (last) the layers that run again.
"""

from collections import Counter
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from deepspeed_ext.runtime.gradients import reductions
from deepspeed_ext.runtime.gradients.parameter_gathers import ParameterGathers
from deepspeed_ext.runtime.gradients.reductions import GradientReductions
from deepspeed_ext.runtime.gradients.weight_gradients import Product, WeightGradients
from megatron_terapipe.model.block import TransformerBlock
from megatron_terapipe.training.build_engine import build_engine
from tests.distributed import results_by_setup, run_each
from tests.training.equivalence import test_gpt_equivalence as ladder
from tests.training.equivalence.test_gpt_equivalence import (
    BF16,
    DROPOUT,
    FULL,
    LLAMA,
    MODEL_CHUNKS,
    PP2,
    SELECTIVE,
    SP,
    THERE_AND_BACK,
    TP2,
    UNEVEN,
    ZERO,
    ZERO_BUBBLE,
)
from tests.training.gpt_runs import Setup, batches, gradients, run_of

BREADTH_FIRST = f"{MODEL_CHUNKS} --pipeline-schedule breadth-first"
LATE, GATHERED = "--no-overlap-grad-reduce", "--overlap-param-gather --zero-allgather-bucket-size 5000"
"""The second has pieces that end inside of weights."""
DETERMINISTIC = "--deterministic-mode"
STEPS, IN_PLACE = "--train-iters 4", "--clip-grad 0.1"
"""Flags of setups that train several steps; and whose gradients are reduced in place, those of others as copies."""

# The flags, the number of micro-batches, and more flags, of which each must give the same bits.
CASES = [
    (2, f"{PP2} {UNEVEN} {LLAMA} {DROPOUT} {SELECTIVE}", 3, (ZERO_BUBBLE, ladder.GPIPE, MODEL_CHUNKS)),
    (2, f"{PP2} {UNEVEN} {FULL}", 3, (ZERO_BUBBLE, MODEL_CHUNKS)),
    (2, f"{PP2} {UNEVEN} {BF16} {ZERO}", 3, (ZERO_BUBBLE, ladder.GPIPE, MODEL_CHUNKS)),
    (2, f"{PP2} {ladder.UNIFORM} {ladder.UNTIED}", 2, (THERE_AND_BACK, ZERO_BUBBLE, BREADTH_FIRST)),
    (2, f"{PP2} {ladder.UNIFORM} {ZERO} {DROPOUT} {ladder.PACKED} {STEPS}", 2, (DETERMINISTIC,)),
    (4, f"{TP2} {PP2} {ladder.EVEN} {SP} {SELECTIVE} {ZERO}", 2, (ZERO_BUBBLE, MODEL_CHUNKS)),
    (4, f"{PP2} {UNEVEN} {SELECTIVE} {IN_PLACE}", 2, (LATE,)),
    (2, f"{UNEVEN} {LLAMA} {DROPOUT} {FULL} {ZERO}", 2, (LATE,)),
    (2, f"{UNEVEN} {BF16} {IN_PLACE}", 2, (LATE,)),
    (4, f"{PP2} {UNEVEN} {ZERO_BUBBLE} {BF16} {ZERO}", 3, (LATE,)),
    (4, f"{PP2} {THERE_AND_BACK}", 2, (LATE,)),
    (4, f"{TP2} {ladder.EVEN} {SP} {ZERO} {IN_PLACE}", 2, (LATE,)),
    (4, f"{PP2} {UNEVEN} {BF16} {ZERO} {FULL} {STEPS}", 2, (GATHERED,)),
    (2, f"{UNEVEN} {ZERO} {STEPS}", 2, (GATHERED,)),
]
PAIRS = [
    (Setup(world_size, words, micro_batches), Setup(world_size, f"{words} {other}", micro_batches))
    for world_size, words, micro_batches, others in CASES
    for other in others
]

Found = tuple[Any, float | None, dict[Any, np.ndarray]]
"""Losses; norm of the gradient, if it is of one step; gradients or weights."""


def steps(setup: Setup) -> Found:
    """Losses of steps, of an evaluation and of another step, and the weights after them."""
    run = run_of(setup)
    engine = build_engine(run)
    data = batches(setup, run.layout.coordinate(run.launch.rank).data)
    losses = [engine.train_batch(iter(data)).item() for _ in range(3)]
    losses += [engine.eval_batch(iter(data)).item(), engine.train_batch(iter(data)).item()]
    return losses, None, {name: each.double().numpy() for name, each in engine.module.state_dict().items()}


def counted(setup: Setup) -> tuple[Found, Counter[str]]:
    """The results of a setup; how many products were deferred, weights reduced inside ops, and weights waited for."""
    work: Counter[str] = Counter()
    add, reduce, wait = WeightGradients.add, GradientReductions._reduce, ParameterGathers._wait

    def counting_add(self: WeightGradients, product: Product) -> None:
        work["deferred"] += 1
        add(self, product)

    def counting_reduce(self: GradientReductions, stage: int, layer: int, *, inside: bool) -> None:
        before = len(self._reduced)
        reduce(self, stage, layer, inside=inside)
        work["early"] += inside * (len(self._reduced) - before)

    def counting_wait(self: ParameterGathers, parameters: Any) -> None:
        before = len(self._pieces)
        wait(self, parameters)
        work["waits"] += len(self._pieces) < before

    with (
        patch.object(WeightGradients, "add", counting_add),
        patch.object(GradientReductions, "_reduce", counting_reduce),
        patch.object(ParameterGathers, "_wait", counting_wait),
        patch.multiple(reductions, REDUCTION_BUCKET_BYTES=1, IN_PLACE_BYTES=1 if IN_PLACE in setup.flags else 1 << 20),
    ):
        found = (steps if STEPS in setup.flags else gradients)(setup)
    products = torch.backends.cuda.matmul
    assert not products.allow_bf16_reduced_precision_reduction and not products.allow_fp16_reduced_precision_reduction
    return found, work | Counter(deterministic=torch.are_deterministic_algorithms_enabled())


TRAINED = list(dict.fromkeys(setup for pair in PAIRS for setup in pair))
trained = results_by_setup(counted, TRAINED)


@pytest.mark.parametrize(("plain", "other"), PAIRS, ids=str)
def test_no_bit_is_another(plain: Setup, other: Setup) -> None:
    # Layers of a rank's model chunks are spread otherwise, so ranks are then taken together.
    spread = other.flags.endswith((MODEL_CHUNKS, BREADTH_FIRST, THERE_AND_BACK))
    wanted, found = (
        {
            (0 if spread else rank, name): values
            for rank, ((_, _, by_name), _) in enumerate(trained(setup))
            for name, values in by_name.items()
        }
        for setup in (plain, other)
    )
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if wanted[name].tobytes() != found[name].tobytes()] == []
    losses, other_losses = ([loss for (loss, _, _), _ in trained(setup)] for setup in (plain, other))
    assert losses == other_losses == losses[:1] * len(losses)
    if LATE in other.flags:
        assert [norm for (_, norm, _), _ in trained(plain)] == [norm for (_, norm, _), _ in trained(other)]


@pytest.mark.parametrize("setup", TRAINED, ids=str)
def test_the_work_is_as_the_flags_say(setup: Setup) -> None:
    works = [work for _, work in trained(setup)]
    products = [work["deferred"] for work in works]
    if setup.world_size == 2 and ZERO_BUBBLE in setup.flags:
        # Four matrices of two layers, and the embedding, for every token slice; the output layer defers none.
        assert products == [9 * setup.micro_batches * 4, 8 * setup.micro_batches * 4]
    elif setup.world_size == 2 and THERE_AND_BACK in setup.flags:
        # Rank 0 has the first and the last layer and both ends, and half of the token slices in two parts.
        assert products == [(4 + 4 + 1) * 4, (4 + 4) * 4]
    else:
        assert any(products) == (ZERO_BUBBLE in setup.flags or THERE_AND_BACK in setup.flags)
    # A layer whose input comes of another rank, or is a number, is complete at the end of the op; others are inside it.
    replicas = setup.data_parallel_size > 1 and STEPS not in setup.flags
    assert not replicas or (sum(work["early"] for work in works) > 0) == (LATE not in setup.flags)
    # Some pieces are waited for by the layers that need them, not all by the first.
    assert all((work["waits"] > 4) == (GATHERED in setup.flags) for work in works)
    assert all(work["deterministic"] == (DETERMINISTIC in setup.flags) for work in works)


PIPELINE = "--pipeline-model-parallel-size 2 --num-token-slices 2"
WHOLE = f"{PIPELINE} --recompute-granularity full"
BLOCK = f"{WHOLE} --recompute-method block"
EXPECTED = {
    PIPELINE: [1, 1, 1, 1],
    f"{WHOLE} --recompute-num-layers 2": [2, 2, 2, 2],
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
