"""Weights that are gathered while the next forward runs are those that the step gathers, bit for bit."""

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch

from deepspeed_ext.runtime.gradients.parameter_gathers import ParameterGathers
from megatron_terapipe.training import build_engine as trainer_engine
from tests.distributed import run_each
from tests.training.equivalence.test_gpt_equivalence import BF16, FULL, PP2, UNEVEN, ZERO
from tests.training.gpt_runs import Setup, batches, run_of

SETUPS = [
    Setup(4, f"{PP2} {UNEVEN} {BF16} {ZERO} {FULL}"),
    Setup(4, f"{PP2} {UNEVEN} {ZERO}"),
]


def trained(setup: Setup) -> tuple[Any, Any, list[int]]:
    """Losses and weights of a setup without overlap and with, and the numbers of pieces that were waited for."""
    waits: list[int] = []
    wait = ParameterGathers._wait

    def counting(self: ParameterGathers, parameters: Any) -> None:
        before = len(self._pieces)
        wait(self, parameters)
        waits.append(before - len(self._pieces))

    # Pieces that end inside of weights.
    with patch.object(ParameterGathers, "_wait", counting):
        flags = f"{setup.flags} --overlap-param-gather --zero-allgather-bucket-size 5000"
        with_overlap = _steps(Setup(setup.world_size, flags))
    return _steps(setup), with_overlap, waits


def _steps(setup: Setup) -> tuple[list[float], dict[str, list[float]]]:
    torch.manual_seed(0)
    run = run_of(setup)
    engine = trainer_engine.build_engine(run)
    data = batches(setup, run.layout.coordinate(run.launch.rank).data)
    losses = [engine.train_batch(iter(data)).item() for _ in range(3)]
    losses.append(engine.eval_batch(iter(data)).item())
    losses.append(engine.train_batch(iter(data)).item())
    state = engine.module.state_dict()
    return losses, {name: weight.double().flatten().tolist() for name, weight in state.items()}


@cache
def _found() -> Any:
    return run_each(trained, 4, SETUPS)


@pytest.mark.parametrize("number", range(len(SETUPS)), ids=[str(setup) for setup in SETUPS])
def test_no_bit_is_another_with_overlap(number: int) -> None:
    for without, with_overlap, waits in _found()[number]:
        assert with_overlap == without
        # Some pieces are waited for by the layers that need them, not all by the first.
        assert sum(count > 0 for count in waits) > 4
