"""Whether pipeline, tensor and data parallelism change the numbers on CUDA.

Loss and gradients of a step are compared twice: with plain autograd in fp64 on this process, as closely as the kernels
compute, and with one rank of the same device and the same token slices, as closely as an order of sums allows.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.measuring.report import Section, Sharing, has_gpu, join
from benchmarks.measuring.worlds import RankFailed, World
from megatron_terapipe.training import build_engine as trainer_engine
from tests.gpu.pipelines import EXACT
from tests.training.equivalence.test_gpt_equivalence import (
    BF16,
    BY_DOCUMENTS,
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
from tests.training.gpt_runs import Setup, Step, batches, gradients, run_of

_TIMEOUT_S = 120.0

ONE_RANK = tuple(Setup(1, f"{UNIFORM} {flags}".strip()) for flags in ("", LLAMA, BF16, f"{LLAMA} {BF16}"))
TWO_RANKS = tuple(
    Setup(2, flags)
    for flags in (
        f"{PP2} {UNIFORM} {LLAMA} {ZERO_BUBBLE}",
        f"{PP2} {UNIFORM} {BF16}",
        f"{TP2} {EVEN} {SP} {LLAMA}",
        f"{UNIFORM} {ZERO}",
    )
)
ALL = ONE_RANK + tuple(
    Setup(world_size, f"{flags} {precision}".strip())
    for precision in ("", BF16)
    for world_size, flags in (
        (2, f"{PP2} {UNIFORM}"),
        (2, f"{PP2} {UNIFORM} {LLAMA} {ZERO_BUBBLE}"),
        (2, f"{TP2} {UNIFORM}"),
        (2, f"{TP2} {EVEN} {SP} {LLAMA}"),
        (2, UNIFORM),
        (2, f"{UNIFORM} {ZERO}"),
        (4, f"{TP2} {PP2} {EVEN} {SP} {LLAMA}"),
    )
)
"""One rank, then each axis of two ranks, in fp32 and bf16."""


def allowed(setup: Setup) -> tuple[float, float]:
    """Relative errors of loss and gradients beside fp64.

    On CUDA attention in fp32 multiplies by three products of tensor cores (`OpMultiplyAddFastF32`).
    """
    if setup.dtype == "fp32" and has_gpu():
        return 1e-5, 5e-5
    return LOSS_TOLERANCE[setup.dtype], TOLERANCE[setup.dtype]


def on_one_rank(setup: Setup) -> Setup | None:
    """The same token slices, micro-batches and dtype without parallelism; None with data parallelism."""
    if setup.data_parallel_size > 1:
        return None
    flags = setup.flags
    for parallel in (PP2, TP2, SP, ZERO_BUBBLE):
        flags = flags.replace(parallel, "")
    return replace(setup, world_size=1, flags=" ".join(flags.split()))


class Ranks:
    """Worlds by their size, which live from setup to setup; one that fails makes place for another."""

    def __init__(self, sharing: Sharing, start_method: str = "spawn") -> None:
        self._sharing, self._start_method = sharing, start_method
        self._worlds: dict[int, World] = {}
        self._folder = tempfile.TemporaryDirectory()

    def run(self, size: int, function: object, *arguments: object) -> list[object]:
        """Run a function on all ranks of a world."""
        try:
            if size not in self._worlds:
                self._worlds[size] = World(
                    size,
                    join,
                    _TIMEOUT_S,
                    variables=[self._sharing.of_rank(rank, EXACT) for rank in range(size)],
                    timeout_s=_TIMEOUT_S,
                    log=Path(self._folder.name, f"{size}.txt"),
                    start_method=self._start_method,
                )
            return self._worlds[size].run(function, *arguments)
        except RankFailed as failed:
            print(failed)
            self.end(size)
            raise

    def end(self, size: int | None = None) -> None:
        """End the worlds of a size, or all."""
        for each in [size] if size is not None else list(self._worlds):
            if each in self._worlds:
                self._worlds.pop(each).end()


def rows(setups: Sequence[Setup], ranks: Ranks) -> Iterator[Section]:
    """Train a step of each setup; yield the table after each."""
    table = Section(
        "Numbers of one step: relative errors of the loss and of the worst gradient",
        ("setup", "beside fp64", "allowed", "beside one rank of this device", "allowed", "s", "result"),
        notes=["One rank has the same token slices."],
    )
    of_one: dict[Setup, Step] = {}
    for setup in setups:
        name = str(replace(setup, flags=setup.flags.replace(LLAMA, "--llama")))
        table.guarded(name, lambda setup=setup: _row(setup, ranks, of_one))
        yield table


def _row(setup: Setup, ranks: Ranks, of_one: dict[Setup, Step]) -> tuple[str, ...]:
    start = time.monotonic()
    steps = ranks.run(setup.world_size, _step, setup)
    errors = errors_beside(steps, *expected_gradients(setup))
    limits, same, of_same = allowed(setup), "", ""
    good = errors[0] <= limits[0] and errors[1] <= limits[1]
    reference = on_one_rank(setup)
    if setup == reference:
        of_one[setup] = steps[0]
    elif reference is not None:
        if reference not in of_one:
            (of_one[reference],) = ranks.run(1, _step, reference)
        loss, _, found = of_one[reference]
        beside = errors_beside(steps, loss, {name: gradient for (name, _, _), gradient in found.items()})
        of_dtype = LOSS_TOLERANCE[setup.dtype], TOLERANCE[setup.dtype]
        same, of_same = _pair(beside), _pair(of_dtype)
        good = good and beside[0] <= of_dtype[0] and beside[1] <= of_dtype[1]
    verdict = "ok" if good else "failed: WRONG"
    return _pair(errors), _pair(limits), same, of_same, f"{time.monotonic() - start:.0f}", verdict


def _pair(numbers: tuple[float, float]) -> str:
    return f"{numbers[0]:.1e}, {numbers[1]:.1e}"


def errors_beside(steps: Sequence[Step], expected_loss: float, expected: dict[str, np.ndarray]) -> tuple[float, float]:
    """The relative error of the loss, and the largest relative error of a gradient by its norm, over all ranks."""
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


CHANGED = Setup(2, f"{PP2} {BY_DOCUMENTS} {LLAMA}")
STARTS = ((0, 8, 16, 24), (0, 8, 16, 24), (0, 22, 25, 27, 30), (0, 2, 3, 6, 8), (0, 8, 16, 24))
"""Starts of the documents in each step: cuts by documents are even, even again, then of other lengths."""


def changed_lengths(ranks: Ranks) -> Iterator[Section]:
    """Train steps whose token slices get other lengths in the third, on two ranks and on one; yield a table."""
    table = Section(
        "A new length of token slices after steps with even ones (balanced-by-documents)",
        ("step", "documents begin at", "loss", "of one rank", "s", "evaluation, s", "result"),
    )
    try:
        (alone,) = ranks.run(1, losses, replace(CHANGED, world_size=1, flags=CHANGED.flags.replace(PP2, "")))
        found = ranks.run(2, losses, CHANGED)[-1]
    except RankFailed as failed:
        table.fail("all", failed)
        yield table
        return
    for number, (starts, one, two) in enumerate(zip(STARTS, alone, found, strict=True), 1):
        good = abs(one[0] - two[0]) <= 1e-5 * abs(one[0])
        seconds = (f"{each:.2f}" for each in two[1:])
        table.add(number, starts, f"{two[0]:.7f}", f"{one[0]:.7f}", *seconds, "ok" if good else "failed: WRONG")
    yield table


def losses(_: None, setup: Setup) -> list[tuple[float, float, float]]:
    """Loss, seconds, and seconds of an evaluation after it, of steps whose documents begin elsewhere."""
    run = run_of(setup)
    sgd = lambda _, parameters: torch.optim.SGD([each for _, each in parameters], lr=0.1)  # noqa: E731
    with patch.object(trainer_engine, "build_optimizer", sgd):
        engine = trainer_engine.build_engine(run)
    found = []
    for starts in STARTS:
        given = [replace(batch, document_starts=(starts,) * 2) for batch in batches(setup, 0)]
        begin = time.perf_counter()
        loss = engine.train_batch(iter(given)).item()
        trained = time.perf_counter()
        engine.eval_batch(iter(given)).item()
        found.append((loss, trained - begin, time.perf_counter() - trained))
    return found
