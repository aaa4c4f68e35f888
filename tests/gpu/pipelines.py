"""What the ranks of a case run: the small transformer of the runtime's tests, with a drain at one op."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from benchmarks.measuring.report import join
from deepspeed_ext.plan.ops import Op
from deepspeed_ext.plan.schedules import fixed
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.clocks import Observer
from tests.gpu.cases import Case, Drain, DrainKind, Trial
from tests.runtime import models
from tests.runtime.training import Setup, batches_of, build

NUM_BLOCKS = 8
"""Of every case, so that its stages have a block each and its loss is that of the others."""

EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Variables under which fp32 is fp32, also in containers that ask for TF32."""

_MEETING_S = 120.0
"""How long ranks may wait for each other when they start."""

_UNUSED_BYTES = 1 << 26
"""What is given back where memory is drained: a block that the allocator holds, and nothing else."""


@dataclass(frozen=True)
class Outcome:
    """What a step gave on one rank."""

    loss: float
    norm: float


def setup_of(case: Case, orders: Sequence[Sequence[Op]] = ()) -> Setup:
    """The case, as the runtime's tests know it."""
    return Setup(
        pp=case.num_ranks,
        cut=TokenSlices.uniform(models.SEQ, case.num_token_slices).lengths,
        micro_batches=case.num_micro_batches,
        schedule=fixed(orders),
        model_chunks=case.num_model_chunks,
        num_blocks=NUM_BLOCKS,
    )


def exchange(timeout_s: float) -> None:
    """Join, add a number up over all ranks, and pass it round: the least that a world must be able to do."""
    join(timeout_s)
    rank, size = dist.get_rank(), dist.get_world_size()
    number = torch.full((1,), float(rank), device=get_accelerator().current_device_name())
    passed = torch.empty_like(number)
    ring = [
        dist.P2POp(dist.isend, number, (rank + 1) % size),
        dist.P2POp(dist.irecv, passed, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    dist.all_reduce(number)
    if (passed.item(), number.item()) != ((rank - 1) % size, size * (size - 1) / 2):
        raise RuntimeError(f"rank {rank} received {passed.item()} and a sum of {number.item()}")


class Pipeline:
    """One rank of a case."""

    def __init__(self, case: Case, orders: Sequence[Sequence[Op]], timeout_s: float, folder: Path) -> None:
        join(max(timeout_s, _MEETING_S))
        self._setup = setup_of(case, orders)
        self._keywords = {"timeout": timedelta(seconds=timeout_s), "ledger_directory": folder}
        self._engine: Any = None

    def play(self, trial: Trial) -> Outcome:
        """Take the step of a trial."""
        if trial.cold or self._engine is None:
            self._engine = None
            gc.collect()  # The threads of one engine end before those of the next start.
            # The learning rate is 0: every step of a case has the loss and the gradients of the first.
            engine = build(
                self._setup,
                engine_keywords=self._keywords,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            )
            self._engine = engine
            if not trial.cold:
                self._step()
        mine = trial.drain is not None and trial.drain.rank == self._engine.stage_id
        with self._engine.observers.joined_by(Drained(trial.drain)) if mine else nullcontext():
            return self._step()

    def _step(self) -> Outcome:
        loss = self._engine.train_batch(iter(batches_of(self._setup, 0))).item()
        return Outcome(loss, float(self._engine.get_global_grad_norm()))


class Drained(Observer):
    """A drain before one of the ops of a step."""

    def __init__(self, drain: Drain) -> None:
        self._drain, self._seen = drain, 0

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        if self._seen == self._drain.op:
            wait_for_device(self._drain.kind)
        self._seen += 1
        yield


def wait_for_device(kind: DrainKind) -> None:
    """Wait as a drain of a kind does; on a CPU there is nothing to wait for."""
    if kind is DrainKind.NEVER:
        time.sleep(3600)
    accelerator = get_accelerator()
    if kind is DrainKind.FREE:
        unused = torch.empty(_UNUSED_BYTES, dtype=torch.uint8, device=accelerator.current_device_name())
        del unused
        accelerator.empty_cache()
    elif kind is DrainKind.SYNCHRONIZE:
        accelerator.synchronize()


def play(pipeline: Pipeline, trial: Trial) -> Outcome:
    """`Pipeline.play`, for a world to call."""
    return pipeline.play(trial)


def step_of_one_rank(_: None, case: Case) -> Outcome:
    """The step of a case on this rank, for a world to call."""
    setup = setup_of(case, case.orders())
    engine = build(setup, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    loss = engine.train_batch(iter(batches_of(setup, 0))).item()
    return Outcome(loss, float(engine.get_global_grad_norm()))
