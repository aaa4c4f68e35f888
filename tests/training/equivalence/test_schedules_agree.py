"""With the same cut, no schedule of the trainer changes a single bit of the loss or of any gradient.

Gradients add up in one order whatever the schedule: micro-batches first to last, token slices last to first, and a
product that is deferred adds to its weight as it would have at once.
"""

from unittest.mock import patch

import pytest

from deepspeed_ext.runtime.gradients.weight_gradients import Product, WeightGradients
from tests.distributed import results_by_setup
from tests.training.equivalence.test_gpt_equivalence import (
    BF16,
    DROPOUT,
    EVEN,
    FULL,
    LLAMA,
    MODEL_CHUNKS,
    PP2,
    SELECTIVE,
    SP,
    THERE_AND_BACK,
    TP2,
    UNEVEN,
    UNIFORM,
    ZERO,
    ZERO_BUBBLE,
)
from tests.training.gpt_runs import Setup, Step, gradients

BREADTH_FIRST = f"{MODEL_CHUNKS} --pipeline-schedule breadth-first"
# The setting, and the words for schedules of which each must give the bits of 1f1b.
CASES = [
    (2, f"{PP2} {UNEVEN} {LLAMA} {DROPOUT} {SELECTIVE}", 3, (ZERO_BUBBLE, "--pipeline-schedule gpipe", MODEL_CHUNKS)),
    (2, f"{PP2} {UNEVEN} {FULL}", 3, (ZERO_BUBBLE, MODEL_CHUNKS)),
    (2, f"{PP2} {UNEVEN} {BF16} {ZERO}", 3, (ZERO_BUBBLE, "--pipeline-schedule gpipe", MODEL_CHUNKS)),
    (2, f"{PP2} {UNIFORM} --untie-embeddings-and-output-weights", 2, (THERE_AND_BACK, ZERO_BUBBLE, BREADTH_FIRST)),
    (4, f"{TP2} {PP2} {EVEN} {SP} {SELECTIVE} {ZERO}", 2, (ZERO_BUBBLE, MODEL_CHUNKS)),
]
PAIRS = [
    (Setup(world_size, words, micro_batches), Setup(world_size, f"{words} {other}", micro_batches))
    for world_size, words, micro_batches, others in CASES
    for other in others
]


def _counted(setup: Setup) -> tuple[Step, int]:
    """The step of a setup, and the number of deferred products."""
    num_deferred = 0
    add = WeightGradients.add

    def counting(self: WeightGradients, product: Product) -> None:
        nonlocal num_deferred
        num_deferred += 1
        add(self, product)

    with patch.object(WeightGradients, "add", counting):
        return gradients(setup), num_deferred


TRAINED = list(dict.fromkeys(setup for pair in PAIRS for setup in pair))
trained = results_by_setup(_counted, TRAINED)


@pytest.mark.parametrize(("plain", "other"), PAIRS, ids=str)
def test_every_bit_is_that_of_1f1b(plain: Setup, other: Setup) -> None:
    expected, found = (trained(setup) for setup in (plain, other))
    losses = {loss for (loss, _, _), _ in (*expected, *found)}
    assert len(losses) == 1
    # Layers of a rank's model chunks are spread otherwise, so ranks are taken together.
    wanted, gotten = (
        {name: gradient for (_, _, by_name), _ in ranks for name, gradient in by_name.items()}
        for ranks in (expected, found)
    )
    assert wanted.keys() == gotten.keys()
    assert [name for name in wanted if wanted[name].tobytes() != gotten[name].tobytes()] == []


def test_only_schedules_with_weight_gradients_defer_them() -> None:
    for setup in (each for each in TRAINED if each.world_size == 2):
        products = [num_deferred for _, num_deferred in trained(setup)]
        if ZERO_BUBBLE in setup.flags:
            # Four matrices of two layers, and the embedding, for every token slice; the output layer defers none.
            assert products == [9 * setup.micro_batches * 4, 8 * setup.micro_batches * 4]
        elif THERE_AND_BACK in setup.flags:
            # Rank 0 has the first and the last layer and both ends, and half of the token slices in two parts.
            assert products == [(4 + 4 + 1) * 4, (4 + 4) * 4]
        else:
            assert products == [0, 0]
