"""Whether pipeline, tensor and data parallelism change the numbers on CUDA, beside plain autograd on one process."""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.measuring.report import Section, Sharing, join, progress
from benchmarks.measuring.worlds import World
from tests.gpu.pipelines import EXACT
from tests.training.equivalence.test_gpt_equivalence import (
    BF16,
    EVEN,
    LLAMA,
    LOSS_TOLERANCE,
    PP2,
    SP,
    TOLERANCE,
    TP2,
    UNIFORM,
    ZERO,
    ZERO_BUBBLE,
    expected_gradients,
)
from tests.training.gpt_runs import Setup, Step, gradients

_TIMEOUT_S = 300.0

SETUPS = tuple(
    Setup(world_size, f"{flags} {precision}".strip())
    for precision in ("", BF16)
    for world_size, flags in (
        (1, UNIFORM),
        (1, f"{UNIFORM} {LLAMA}"),
        (2, f"{PP2} {UNIFORM}"),
        (2, f"{PP2} {UNIFORM} {LLAMA} {ZERO_BUBBLE}"),
        (2, f"{TP2} {UNIFORM}"),
        (2, f"{TP2} {EVEN} {SP} {LLAMA}"),
        (2, UNIFORM),
        (2, f"{UNIFORM} {ZERO}"),
        (4, f"{TP2} {PP2} {EVEN} {SP} {LLAMA}"),
    )
)
"""One rank alone, then each axis of two ranks, in fp32 and bf16."""


def section() -> Section:
    """The empty table."""
    return Section(
        "Numbers beside plain autograd in fp64 on one process",
        ("setup", "loss, relative error", "worst gradient, relative error", "allowed", "result"),
    )


def add_rows(table: Section, setups: tuple[Setup, ...], sharing: Sharing, *, start_method: str = "spawn") -> None:
    """Train a step of each setup, and append a row for each."""
    for setup in setups:
        progress(f"numbers of {setup}")
        table.guarded(str(setup), lambda setup=setup: _row(setup, sharing, start_method))


def _row(setup: Setup, sharing: Sharing, start_method: str) -> tuple[str, ...]:
    variables = [sharing.of_rank(rank, EXACT) for rank in range(setup.world_size)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.txt")
        with World(
            setup.world_size,
            join,
            _TIMEOUT_S,
            variables=variables,
            timeout_s=_TIMEOUT_S,
            log=log,
            start_method=start_method,
        ) as world:
            steps = world.run(_step, setup)
    loss_error, gradient_error = errors(setup, steps)
    allowed = LOSS_TOLERANCE[setup.dtype], TOLERANCE[setup.dtype]
    good = loss_error <= allowed[0] and gradient_error <= allowed[1]
    verdict = "ok" if good else "failed: WRONG"
    return f"{loss_error:.1e}", f"{gradient_error:.1e}", f"{allowed[0]:g}, {allowed[1]:g}", verdict


def errors(setup: Setup, steps: list[Step]) -> tuple[float, float]:
    """The relative error of the loss, and the largest relative error of a gradient by its norm, over all ranks."""
    expected_loss, expected = expected_gradients(setup)
    loss_error = max(abs(loss - expected_loss) / abs(expected_loss) for loss, _, _ in steps)
    size = max(key[1] for _, _, found in steps for key in found) + 1
    worst, seen = 0.0, set()
    for _, _, found in steps:
        for (name, share, cut), gradient in found.items():
            seen.add(name)
            wanted = expected[name] if cut is None else np.split(expected[name], size, axis=cut)[share]
            norm = float(np.linalg.norm(wanted))
            difference = float(np.linalg.norm(gradient.astype(np.float64) - wanted))
            # A part of the padded vocabulary may hold padding alone, and then no gradient at all.
            worst = max(worst, difference / norm if norm else (0.0 if difference == 0 else float("inf")))
    assert seen == expected.keys(), "every parameter is on some rank"
    return loss_error, worst


def _step(_: None, setup: Setup) -> Step:
    return gradients(setup)
