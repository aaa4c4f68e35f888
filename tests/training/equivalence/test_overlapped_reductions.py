"""Gradients reduced layer by layer, while the last backwards run, have the bits of those reduced together at the end.

A sum over two replicas does not depend on its order.
"""

from functools import cache
from unittest.mock import patch

import pytest

from deepspeed_ext.runtime.gradients import reductions
from deepspeed_ext.runtime.gradients.reductions import GradientReductions
from tests.distributed import run_each
from tests.training.equivalence.test_gpt_equivalence import (
    BF16,
    DROPOUT,
    EVEN,
    FULL,
    LLAMA,
    PP2,
    SELECTIVE,
    SP,
    THERE_AND_BACK,
    TP2,
    UNEVEN,
    ZERO,
    ZERO_BUBBLE,
)
from tests.training.gpt_runs import Setup, Step, gradients

IN_PLACE, COPIED = 1, 1 << 20
"""Least bytes of a gradient that is reduced in place: all of these gradients, or none."""

SETUPS = [
    (Setup(4, f"{PP2} {UNEVEN} {SELECTIVE} --clip-grad 0.1"), IN_PLACE),
    (Setup(4, f"{PP2} {UNEVEN} {LLAMA} {DROPOUT} {FULL} {ZERO} --clip-grad 0.1"), COPIED),
    (Setup(4, f"{PP2} {UNEVEN} {BF16} --clip-grad 0.1"), IN_PLACE),
    (Setup(4, f"{PP2} {UNEVEN} {ZERO_BUBBLE} {BF16} {ZERO}", micro_batches=3), COPIED),
    (Setup(4, f"{PP2} {THERE_AND_BACK}"), COPIED),
    (Setup(4, f"{TP2} {EVEN} {SP} {ZERO}"), IN_PLACE),
]


def steps(given: tuple[Setup, int]) -> tuple[Step, Step, int]:
    """The step of a setup without overlap and with it, and how many parameters were reduced from inside an op."""
    setup, alone_bytes = given
    early: list[int] = []
    reduce = GradientReductions._reduce

    def counting(self: GradientReductions, stage: int, layer: int, *, inside: bool) -> None:
        before = len(self._reduced)
        reduce(self, stage, layer, inside=inside)
        if inside:
            early.append(len(self._reduced) - before)

    with (
        patch.object(reductions, "REDUCTION_BUCKET_BYTES", 1),
        patch.object(reductions, "IN_PLACE_BYTES", alone_bytes),
        patch.object(GradientReductions, "_reduce", counting),
    ):
        with_overlap = gradients(setup)
    without = gradients(Setup(setup.world_size, f"{setup.flags} --no-overlap-grad-reduce", setup.micro_batches))
    return without, with_overlap, sum(early)


@cache
def _trained() -> list[tuple[tuple[Step, Step, int], ...]]:
    return run_each(steps, 4, SETUPS)


@pytest.mark.parametrize("number", range(len(SETUPS)), ids=[str(setup) for setup, _ in SETUPS])
def test_no_bit_is_another_with_overlap(number: int) -> None:
    by_rank = _trained()[number]
    for (loss, norm, wanted), (found_loss, found_norm, found), _ in by_rank:
        assert (found_loss, found_norm) == (loss, norm)
        assert [name for name in wanted if wanted[name].tobytes() != found[name].tobytes()] == []
    # A layer whose input comes of another rank, or is a number, is complete at the end of the op; others are inside it.
    assert sum(early for *_, early in by_rank) > 0
