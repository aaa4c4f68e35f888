"""The engine on layers of a user: token slices, stages and replicas change neither the loss nor any gradient.

Each setup trains one step and is compared with plain autograd in fp64, on one process, without token slices. Setups of
one world size share a launch. An error is the norm of a tensor's difference over the norm of the tensor. The ladder of
the GPT (`tests/training/equivalence/test_gpt_equivalence.py`) has every other pair of values.
"""

import pytest

from deepspeed_ext.plan.ops import Placement
from deepspeed_ext.plan.schedules import SCHEDULES, gpipe
from tests.distributed import results_by_setup
from tests.runtime.models import SEQ
from tests.runtime.reference import reference_gradients, relative_error
from tests.runtime.training import Setup, gradients

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 3e-2}
"""Of every gradient. bf16 has 8 bits, so each product is off by up to 2^-9 = 2e-3, and some ten of them add up."""
LOSS_TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 1e-2}

UNIFORM, UNEVEN, SINGLES = (8, 8, 8), (11, 1, 7, 5), (1,) * 6 + (SEQ - 6,)
SHARED = (12, 2, 4, 6)
"""Lengths that two ranks can share."""


SETUPS = [
    # Several stages on a rank, which pass their outputs.
    Setup(cut=UNEVEN, dtype="fp64", schedule="interleaved", model_chunks=2),
    Setup(pp=2, cut=UNEVEN, schedule="interleaved", model_chunks=3, tied=False, recompute=1),
    Setup(pp=2, cut=UNEVEN, dtype="bf16", zero=1, schedule="interleaved", model_chunks=2),
    Setup(cut=UNIFORM, schedule="breadth-first", model_chunks=2),
    Setup(pp=2, cut=UNEVEN, dtype="fp64", schedule="breadth-first", model_chunks=2, micro_batches=3),
    Setup(pp=2, cut=UNEVEN, dtype="fp64", schedule=gpipe, model_chunks=3, placement=Placement.V),
    # DeepSpeed's optimizers, which add up in bf16 or fp32.
    Setup(pp=2, cut=UNIFORM, dtype="bf16", zero=1, accumulate="fp32", schedule="gpipe"),
    Setup(pp=2, cut=UNEVEN, dtype="bf16", zero=1, accumulate="fp32", schedule="zero-bubble", recompute_stages=True),
    # Ranks that share the tokens of each token slice; four outnumber the two key heads.
    Setup(sp=2, cut=SHARED, dtype="bf16", zero=1, accumulate="fp32", schedule="zero-bubble"),
    Setup(sp=4, dtype="fp64", cut=UNIFORM, tied=False),
    Setup(sp=4, cut=(8, 16), zero=1, micro_batches=3),
    Setup(dp=2, sp=2, cut=SHARED, dtype="fp64", schedule="gpipe"),
    # States that layers carry from token slice to token slice.
    Setup(cut=SINGLES, dtype="fp64", stateful=True, tied=False),
    Setup(cut=UNIFORM, dtype="bf16", zero=1, accumulate="fp32", stateful=True),
    Setup(pp=2, cut=UNEVEN, dtype="fp64", schedule="interleaved", model_chunks=2, recompute_stages=True, stateful=True),
    Setup(pp=2, cut=UNIFORM, recompute_stages=True, recompute=1, stateful=True),
]


trained = results_by_setup(gradients, SETUPS)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_loss_and_every_gradient_equal_plain_autograd(setup: Setup) -> None:
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


def test_every_schedule_is_there() -> None:
    assert {getattr(setup.schedule, "__name__", setup.schedule) for setup in SETUPS} >= set(SCHEDULES)
