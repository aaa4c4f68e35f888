"""The equivalence ladder: token slices, stages and replicas change neither the loss nor any gradient.

Each setup trains one step and is compared with plain autograd in fp64, on one process, without token slices. Setups of
one world size share a launch. An error is the norm of a tensor's difference over the norm of the tensor.
"""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest

from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, Placement
from deepspeed_ext.plan.schedules import SCHEDULES, gpipe
from tests.distributed import results_by_setup
from tests.pairs import covering_pairs
from tests.runtime.models import SEQ
from tests.runtime.reference import reference_gradients, relative_error
from tests.runtime.training import Setup, gradients

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 3e-2}
"""Of every gradient. bf16 has 8 bits, so each product is off by up to 2^-9 = 2e-3, and some ten of them add up."""
LOSS_TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 1e-2}


def random_cut(seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    ends = [0, *sorted(draw.sample(range(1, SEQ), draw.randint(1, 7))), SEQ]
    return tuple(end - start for start, end in pairwise(ends))


UNIFORM, UNEVEN, SINGLES = (8, 8, 8), (11, 1, 7, 5), (1,) * 6 + (SEQ - 6,)
SHARED = (12, 2, 4, 6)
"""Lengths that two ranks can share."""


def there_and_back(shape: PipelineShape, rank: int) -> Iterator[Op]:
    """A schedule of the stages that V placement gives: one micro-batch at a time, whole backwards and parts mixed."""
    for micro_batch in range(shape.num_micro_batches):
        for stage in shape.stages_of(rank):
            for token_slice in range(shape.num_token_slices):
                yield Op(OpKind.FORWARD, stage, micro_batch, token_slice)
        for stage in reversed(list(shape.stages_of(rank))):
            parts = [OpKind.BACKWARD] if stage % 2 else [OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT]
            for kind in parts:
                for token_slice in reversed(range(shape.num_token_slices)):
                    yield Op(kind, stage, micro_batch, token_slice)


SETUPS = [
    Setup(),
    Setup(cut=UNEVEN),
    Setup(cut=UNEVEN, tied=False, dtype="fp64"),
    Setup(cut=UNIFORM, dtype="fp64", recompute=1),
    Setup(cut=random_cut(0), zero=1, schedule="gpipe"),
    Setup(cut=UNEVEN, dtype="bf16"),
    Setup(cut=UNEVEN, dtype="bf16", zero=1, accumulate="fp32"),
    # Two stages.
    Setup(pp=2),
    Setup(pp=2, dtype="fp64", cut=UNEVEN, micro_batches=3),
    Setup(pp=2, dtype="fp64", cut=UNIFORM, schedule="gpipe", tied=False),
    Setup(pp=2, dtype="fp64", cut=SINGLES, micro_batches=1),  # fewer micro-batches than stages, more token slices
    Setup(pp=2, cut=random_cut(1), recompute=1, schedule="gpipe"),
    Setup(pp=2, cut=UNEVEN, recompute=2, tied=False),
    Setup(pp=2, cut=UNEVEN, zero=1),
    Setup(pp=2, cut=random_cut(2), zero=1, recompute=1, micro_batches=3),
    Setup(pp=2, cut=UNEVEN, dtype="bf16"),
    Setup(pp=2, cut=UNIFORM, dtype="bf16", zero=1, accumulate="fp32", schedule="gpipe"),
    Setup(pp=2, cut=UNIFORM, dtype="bf16", zero=1, tied=False),
    # Weight gradients apart.
    Setup(cut=UNEVEN, dtype="fp64", schedule="zero-bubble"),
    Setup(pp=2, cut=UNEVEN, dtype="fp64", schedule="zero-bubble", tied=False, micro_batches=3),
    Setup(pp=2, cut=UNIFORM, schedule="zero-bubble", recompute=1),
    Setup(pp=2, cut=UNEVEN, dtype="bf16", zero=1, accumulate="fp32", schedule="zero-bubble"),
    # Several stages on a rank, which pass their outputs.
    Setup(cut=UNEVEN, dtype="fp64", schedule="interleaved", model_chunks=2),
    Setup(pp=2, cut=UNEVEN, dtype="fp64", schedule="interleaved", model_chunks=2, micro_batches=3),
    Setup(pp=2, cut=random_cut(5), schedule="interleaved", model_chunks=3, tied=False, recompute=1),
    Setup(pp=2, cut=UNEVEN, dtype="bf16", zero=1, schedule="interleaved", model_chunks=2),
    Setup(cut=UNIFORM, schedule="breadth-first", model_chunks=2),
    Setup(pp=2, cut=UNEVEN, dtype="fp64", schedule="breadth-first", model_chunks=2, micro_batches=3),
    Setup(pp=2, cut=UNEVEN, dtype="fp64", schedule=gpipe, model_chunks=3, placement=Placement.V),
    Setup(
        pp=2, cut=UNIFORM, dtype="fp64", schedule=there_and_back, model_chunks=2, placement=Placement.V, micro_batches=3
    ),
    # Whole stages computed again.
    Setup(cut=UNEVEN, dtype="fp64", recompute_stages=True),
    Setup(pp=2, cut=UNEVEN, dtype="fp64", micro_batches=3, recompute_stages=True),
    Setup(pp=2, cut=UNIFORM, schedule="zero-bubble", tied=False, recompute_stages=True),
    Setup(pp=2, cut=UNEVEN, dtype="fp64", schedule="interleaved", model_chunks=2, recompute_stages=True, recompute=1),
    Setup(pp=2, cut=UNEVEN, dtype="bf16", zero=1, accumulate="fp32", schedule="zero-bubble", recompute_stages=True),
    Setup(pp=2, dp=2, cut=UNEVEN, dtype="fp64", schedule="zero-bubble", recompute_stages=True),
    Setup(pp=2, sp=2, cut=UNIFORM, dtype="fp64", recompute_stages=True),
    # Two replicas.
    Setup(dp=2, dtype="fp64", cut=UNEVEN),
    Setup(dp=2, cut=UNIFORM, zero=1, schedule="gpipe"),
    Setup(dp=2, cut=UNIFORM, dtype="bf16", zero=1, accumulate="fp32"),
    # Four stages, and two stages of two replicas.
    Setup(pp=4, dtype="fp64", cut=UNEVEN, micro_batches=2),
    Setup(pp=4, dtype="fp64", cut=random_cut(3), schedule="gpipe", tied=False, recompute=1),
    Setup(pp=4, dtype="fp64", cut=SINGLES, micro_batches=1, tied=False),
    Setup(pp=4, dtype="fp64", cut=(13, 11), micro_batches=5),
    Setup(pp=4, cut=UNIFORM, zero=1, micro_batches=3),
    Setup(pp=4, cut=UNEVEN, dtype="fp64", schedule="zero-bubble", micro_batches=5),
    Setup(pp=2, dp=2, cut=UNEVEN, schedule="interleaved", model_chunks=2, zero=1),
    Setup(pp=2, dp=2, cut=UNEVEN, dtype="bf16", schedule="zero-bubble", zero=1, accumulate="fp32"),
    Setup(pp=4, cut=UNEVEN, recompute=1, micro_batches=6),
    Setup(pp=2, dp=2, dtype="fp64", cut=UNEVEN),
    Setup(pp=2, dp=2, dtype="fp64", cut=random_cut(4), schedule="gpipe", tied=False),
    Setup(pp=2, dp=2, cut=UNIFORM, zero=1, recompute=1),
    Setup(pp=2, dp=2, cut=UNEVEN, dtype="bf16", zero=1, accumulate="fp32"),
    Setup(pp=2, dp=2, cut=UNEVEN, dtype="bf16"),
    # Ranks that share the tokens of each token slice; four outnumber the two key heads.
    Setup(sp=2, dtype="fp64", cut=SHARED),
    Setup(sp=2, cut=UNIFORM, zero=1, recompute=1),
    Setup(sp=2, cut=SHARED, dtype="bf16", zero=1, accumulate="fp32", schedule="zero-bubble"),
    Setup(sp=4, dtype="fp64", cut=UNIFORM, tied=False),
    Setup(sp=4, cut=(8, 16), zero=1, micro_batches=3),
    Setup(pp=2, sp=2, dtype="fp64", cut=SHARED, micro_batches=3),
    Setup(pp=2, sp=2, dtype="fp64", cut=SHARED, schedule="zero-bubble", recompute=1, tied=False),
    Setup(pp=2, sp=2, dtype="fp64", cut=UNIFORM, schedule="interleaved", model_chunks=2),
    Setup(dp=2, sp=2, dtype="fp64", cut=SHARED, schedule="gpipe"),
    Setup(dp=2, sp=2, cut=UNIFORM, dtype="bf16", zero=1),
    # States that layers carry from token slice to token slice.
    Setup(cut=SINGLES, dtype="fp64", stateful=True, tied=False),
    Setup(cut=UNIFORM, dtype="bf16", zero=1, accumulate="fp32", stateful=True),
    Setup(pp=2, cut=UNEVEN, dtype="fp64", micro_batches=3, stateful=True),
    Setup(pp=2, cut=UNEVEN, dtype="fp64", schedule="zero-bubble", recompute=1, stateful=True),
    Setup(pp=2, cut=UNEVEN, dtype="fp64", schedule="interleaved", model_chunks=2, recompute_stages=True, stateful=True),
    Setup(pp=2, cut=UNIFORM, recompute_stages=True, recompute=1, stateful=True),
    Setup(pp=2, sp=2, cut=SHARED, dtype="fp64", schedule="zero-bubble", recompute_stages=True, stateful=True),
]


Trained = Callable[[Setup], tuple[tuple[float, dict[str, np.ndarray]], ...]]


def axes(setup: Setup) -> dict[str, object]:
    """The value of a setup on each axis."""
    return {
        **{
            name: getattr(setup, name)
            for name in ("pp", "dp", "sp", "model_chunks", "placement", "tied", "zero", "dtype")
        },
        "cut": "whole" if len(setup.cut) == 1 else "even" if len(set(setup.cut)) == 1 else "uneven",
        "more token slices than stages": len(setup.cut) > setup.pp,
        "fewer micro-batches than stages": setup.micro_batches < setup.pp,
        "schedule": getattr(setup.schedule, "__name__", setup.schedule),
        "recompute": bool(setup.recompute),
        "recompute stages": setup.recompute_stages,
        "stateful": setup.stateful,
        "accumulate": setup.accumulate,
    }


@pytest.fixture(scope="module")
def trained(setups: list[Setup]) -> Trained:
    """Results of each rank with a setup."""
    return results_by_setup(gradients, setups)


@pytest.mark.setups(SETUPS, axes)
def test_loss_and_every_gradient_equal_plain_autograd(setup: Setup, trained: Trained) -> None:
    expected_loss, expected = reference_gradients(setup)
    seen = set()
    for rank, (loss, found) in enumerate(trained(setup)):
        assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE[setup.dtype])
        for name, gradient in found.items():
            if _is_unused_copy(name, rank, setup):
                assert not gradient.any()
                continue
            seen.add(name)
            error = relative_error(gradient, expected[name])
            assert error <= TOLERANCE[setup.dtype], f"{name} on rank {rank} is off by {error:.1e}"
    assert seen == expected.keys()


def _is_unused_copy(name: str, rank: int, setup: Setup) -> bool:
    """The head's copy of the embedding has positions of its own, which are not read."""
    has_embedding = rank < setup.dp * setup.sp
    return name == "tied_modules.embedding.position" and not has_embedding


@pytest.mark.parametrize("few", [False, True])
def test_setups_cover_every_value_of_every_axis(few: bool) -> None:
    setups = [SETUPS[index] for index in covering_pairs([axes(setup) for setup in SETUPS])] if few else SETUPS
    for axis, values in {
        "pp": {1, 2, 4}, "dp": {1, 2}, "sp": {1, 2, 4}, "schedule": set(SCHEDULES), "model_chunks": {1, 2},
        "tied": {True, False}, "zero": {0, 1}, "recompute": {0, 1}, "recompute_stages": {True, False},
        "stateful": {True, False},
        "dtype": {"fp64", "fp32", "bf16"},
    }.items():  # fmt: skip
        for dtype in ("fp64", "fp32"):
            reached = {getattr(setup, axis) for setup in setups if setup.dtype == dtype or axis == "dtype"}
            if (axis, dtype) != ("zero", "fp64"):  # ZeRO keeps its masters in fp32
                assert values <= reached, f"{axis} in {dtype}"
    assert any(setup.micro_batches < setup.pp for setup in setups)
    assert any(len(setup.cut) > setup.pp > 1 for setup in setups)
