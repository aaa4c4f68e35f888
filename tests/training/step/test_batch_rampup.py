"""The number of micro-batches changes between steps: each step has the gradient of the batch it was given."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.distributed import run_distributed
from tests.runtime.reference import reference_gradients, relative_error
from tests.runtime.training import ROWS, Setup, as_numpy, batches_of, build

CUT = (9, 1, 8, 6)
RATE = 2.0**20
"""A learning rate beside which a weight is nothing: (before - after) / RATE is the gradient to the last digits."""

STAGES = [
    Setup(pp=2, cut=CUT),
    Setup(pp=2, cut=CUT, zero=1),
    Setup(pp=2, cut=CUT, dtype="bf16"),
    Setup(pp=2, cut=CUT, dtype="bf16", zero=1, accumulate="fp32"),
]
MODES = [*STAGES, *(replace(mode, pp=1, dp=2) for mode in STAGES)]
SIZES = (1, 4, 2)
"""Micro-batches of consecutive steps: up as on a ramp, and down again."""
TOLERANCE = {"fp32": 1e-6, "bf16": 2e-2}
"""That of the other tests of gradients in fp32; in bf16 what 8 binary digits leave."""


def _steps(setup: Setup) -> list[tuple[float, float, dict[str, np.ndarray]]]:
    """Loss, norm and gradient of a step of each size, every one from the same weights."""
    engine = build(
        replace(setup, micro_batches=SIZES[0]), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE)
    )
    kept = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    found = []
    for count in SIZES:
        engine.set_train_batch_size(count * ROWS * setup.dp)
        assert (engine.micro_batches, engine.gradient_accumulation_steps()) == (count, count)
        batches = batches_of(replace(setup, micro_batches=count), engine.grid.get_data_parallel_rank())
        loss = engine.train_batch(iter(batches)).item()
        gradient = {}
        for name, parameter in engine.module.named_parameters():
            gradient[name] = (as_numpy(kept[name]).astype(np.float64) - as_numpy(parameter)) / RATE
        found.append((loss, float(engine.get_global_grad_norm()), gradient))
        _put_back(engine, kept)
    return found


def _put_back(engine, kept: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            parameter.copy_(kept[name])
    # ZeRO and bf16 step on copies in fp32, and would bring the step back with the next one.
    optimizer = engine.optimizer
    for refresh in ("refresh_fp32_params", "_restore_from_bit16_weights"):
        if hasattr(optimizer, refresh):
            getattr(optimizer, refresh)()
            return


def _steps_of_all(setups: list[Setup]) -> list[list[tuple[float, float, dict[str, np.ndarray]]]]:
    return [_steps(setup) for setup in setups]


def test_every_step_has_the_gradient_of_its_own_batch() -> None:
    by_rank = run_distributed(_steps_of_all, 2, MODES)
    for index, setup in enumerate(MODES):
        tolerance = TOLERANCE[setup.dtype]
        for number, count in enumerate(SIZES):
            loss, gradients = reference_gradients(replace(setup, micro_batches=count))
            norm = float(np.sqrt(sum(np.square(each).sum() for each in gradients.values())))
            for rank, found in enumerate(by_rank):
                mine = found[index][number]
                case = f"{setup}, step {number} of {count} micro-batches, rank {rank}"
                assert mine[0] == pytest.approx(loss, rel=tolerance), case
                assert mine[1] == pytest.approx(norm, rel=tolerance), case
                for name, value in mine[2].items():
                    # The head's copy of the embedding shares its weight alone; it has no use for positions.
                    if setup.pp == 2 and rank == 1 and name.endswith("position"):
                        continue
                    assert relative_error(value, gradients[name]) < tolerance, f"{case}: {name}"
