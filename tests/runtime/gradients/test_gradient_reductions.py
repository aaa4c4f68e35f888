"""A gradient that changes after its reduction has started is an error; weights of several layers wait for the last."""

from unittest.mock import patch

import torch
from torch.nn import functional as F

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.gradients import reductions
from deepspeed_ext.runtime.gradients.reductions import GradientPart
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.training import ROWS, Setup, build


def steps_with_a_borrowed_weight() -> list[str]:
    """Errors of a step with a weight that belongs to one of the layers that use it, and to both."""
    return [_step_with_a_borrowed_weight(registered) for registered in (False, True)]


def _step_with_a_borrowed_weight(registered: bool) -> str:
    """Train a model whose second layer multiplies with a weight of its fourth."""

    def borrow(model: TokenSlicePipelineModule) -> None:
        borrower, owner = model.forward_funcs[1], model.forward_funcs[3]
        own = borrower.mlp.forward
        borrower.mlp.forward = lambda hidden: own(hidden) + F.linear(hidden, owner.out.weight)
        if registered:
            borrower.register_parameter("borrowed", owner.out.weight)

    with patch.object(reductions, "REDUCTION_BUCKET_BYTES", 1):
        engine = build(Setup(dp=2, tied=False), prepare=borrow)
        try:
            engine.train_batch(iter(models.batches(2, ROWS)))
        except UserError as error:
            return str(error)
    return ""


def test_a_weight_that_an_earlier_layer_uses_must_be_its_own_too() -> None:
    for of_one, of_both in run_distributed(steps_with_a_borrowed_weight, 2):
        assert "pass --no-overlap-grad-reduce" in of_one
        assert of_both == ""


def test_adjacent_parts_are_joined() -> None:
    buffer, other = torch.arange(10.0), torch.zeros(3)
    parts = [
        GradientPart(buffer[4:6]),
        GradientPart(other, 1),
        GradientPart(buffer[0:3]),
        GradientPart(buffer[6:10]),
        GradientPart(buffer[3:4], 1),
    ]
    joined = [(part.values.tolist(), part.owner) for part in reductions.adjacent(parts)]
    assert joined == [([0, 1, 2], None), ([3], 1), ([4, 5, 6, 7, 8, 9], None), ([0, 0, 0], 1)]
