"""Functions of ranks in tests of checkpoints: train a small GPT one way, save it, continue from a checkpoint."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.save import begin_save
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.training.build_engine import build_engine
from megatron_terapipe.training.run import Run
from tests.training.prepared import prepared_run

SEQ, VOCAB, ROWS = 16, 257, 4
BEFORE, AFTER = 2, 2
FLAGS = (
    f"--num-layers 3 --hidden-size 16 --num-attention-heads 4 --num-key-value-heads 2 --seq-length {SEQ}"
    f" --vocab-size {VOCAB} --init-method-std 0.2 --micro-batch-size 2 --global-batch-size {ROWS} --train-iters 10"
    # A plain division by the root would make much of a gradient's last digits where it is nearly 0.
    " --lr 1e-2 --adam-eps 1e-3 --data-path unread"
)


@dataclass(frozen=True)
class Way:
    """One way to train the small GPT. All see the same samples in the same global batches."""

    world_size: int
    flags: str


@dataclass(frozen=True)
class Outcome:
    """Results of some iterations: losses, the same on every rank, and this rank's weights and buffers."""

    losses: list[float]
    weights: dict[str, np.ndarray]
    loss_scale: float | None
    """The adaptive one of fp16 at the end."""


@dataclass(frozen=True)
class Task:
    """Build a run's engine, from a checkpoint if one is named; save it; train on; perhaps save between."""

    way: Way
    load: Path | None
    save: Path | None
    before: int = 0
    """Iterations before saving."""


def perform(task: Task) -> Outcome:
    """On every rank: a task, with an engine of its own."""
    # DeepSpeed requires a CPU with fast fp16; a slow one is enough here.
    get_accelerator().is_fp16_supported = lambda: True
    run = run_of(task.way, task.load)
    engine = build_engine(run)
    data_rank = run.layout.coordinate(run.launch.rank).data
    first = BEFORE if task.load else 0
    for step in range(task.before):
        engine.train_batch(iter(batches(first + step, data_rank, run.layout.data_parallel_size)))
    if task.save is not None:
        save_checkpoint(engine, str(task.save), info_of(run))
    steps = range(first + task.before, BEFORE + AFTER)
    losses = [
        engine.train_batch(iter(batches(step, data_rank, run.layout.data_parallel_size))).item() for step in steps
    ]
    weights = {name: each.double().numpy() for name, each in engine.module.state_dict().items()}
    return Outcome(losses, weights, engine.optimizer.cur_scale if engine.fp16_enabled() else None)


def save_checkpoint(engine: Any, save: str | Path, info: CheckpointInfo, *, keep_last: int | None = None) -> Path:
    """Save a checkpoint, on every rank, and return its directory."""
    unfinished = begin_save(engine, save, info, keep_last=keep_last)
    unfinished.finish()
    return unfinished.directory


def run_of(way: Way, load: Path | None = None) -> Run:
    """A way, prepared but for its data: micro-batches come from `batches`."""
    words = f"{FLAGS} {way.flags}".split()
    return prepared_run(parse_arguments(words if load is None else [*words, "--load", str(load)]))


def info_of(run: Run) -> CheckpointInfo:
    config = run.config
    return CheckpointInfo(
        iteration=BEFORE,
        consumed_samples=BEFORE * ROWS,
        model=asdict(config.model),
        layout=run.layout,
        optimizer=config.optimizer.optimizer,
        partitioned=config.optimizer.zero_stage > 0 or config.precision.bf16,
        tokenizer={},
        vocabulary_parts=config.parallel.vocabulary_parts,
    )


def batches(step: int, data_rank: int, data_parallel_size: int) -> list[MicroBatch]:
    """This replica's micro-batches of the global batch of one iteration."""
    generator = torch.Generator().manual_seed(step)
    samples = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator)
    return [
        MicroBatch(tokens=rows[:, :-1], labels=rows[:, 1:], loss_mask=torch.ones(2, SEQ))
        for rows in samples.split(2)[data_rank::data_parallel_size]
    ]
