"""Functions that ranks run: one training step from a folder of Hugging Face, and its gradients."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.checkpoint.save import begin_save
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.records import Progress
from megatron_terapipe.training import build_engine as trainer_engine
from megatron_terapipe.training.run import Run
from tests.huggingface.tiny import VOCAB
from tests.training.gpt_runs import RecordingSGD
from tests.training.prepared import prepared_run

SEQ = 32
FLAGS = (
    f"--seq-length {SEQ} --zero-stage 0 --micro-batch-size 2 --global-batch-size 4 --train-iters 10 --lr 1e-2"
    " --clip-grad 0 --mock-data"
)
PP2 = "--pipeline-model-parallel-size 2 --token-slices 13,1,7,11"
TP2 = "--tensor-model-parallel-size 2 --token-slices 14,2,6,10 --sequence-parallel"


@dataclass(frozen=True)
class Step:
    """One step of a rank.

    Attributes:
        loss: mean over the tokens of the batch.
        gradients: by layer of the pipeline and name in it.
        cuts: the dimension that tensor-parallel ranks share, if any, of each.
    """

    loss: float
    gradients: dict[tuple[int, str], np.ndarray]
    cuts: dict[tuple[int, str], int | None]


def batches() -> list[MicroBatch]:
    """The micro-batches of the step."""
    generator = torch.Generator().manual_seed(2)
    samples = [torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator) for _ in range(2)]
    return [MicroBatch(tokens=each[:, :-1], labels=each[:, 1:], loss_mask=torch.ones(2, SEQ)) for each in samples]


def resume(folder: Path, save: Path) -> tuple[int, str | None, float, float]:
    """On every rank: train from a folder, save, train on; then the same command again.

    Returns:
        Iteration at which the second run begins, family that its checkpoint names, and loss of the iteration
        after the checkpoint in each run.
    """
    flags = f"{PP2} --save {save}"
    run = run_of(folder, flags)
    engine = trainer_engine.build_engine(run)
    engine.train_batch(iter(batches()))
    info = run.checkpoint_info(Progress(iteration=1, consumed_samples=4))
    begin_save(engine, save, info, model_files=run.model_files[0]).finish()
    loss = engine.train_batch(iter(batches())).item()
    again = run_of(folder, flags)
    assert again.checkpoint is not None
    engine = trainer_engine.build_engine(again)
    return again.start.iteration, again.checkpoint[1].family, loss, engine.train_batch(iter(batches())).item()


def first_step(flags: str, folder: Path) -> Step:
    """On every rank: the first step from a folder."""

    def optimizer(_: object, parameters: Any) -> RecordingSGD:
        return RecordingSGD([parameter for _, parameter in parameters], lr=1.0)

    with patch.object(trainer_engine, "build_optimizer", optimizer):
        engine = trainer_engine.build_engine(run_of(folder, flags))
    loss = engine.train_batch(iter(batches()[engine.replica :: engine.dp_world_size])).item()
    seen, gradients, cuts = engine.optimizer.seen, {}, {}
    for name, parameter in engine.module.named_parameters():
        layer, _, rest = name.replace("tied_modules.embedding", "0").partition(".")
        gradients[int(layer), rest] = seen[parameter].numpy()
        cuts[int(layer), rest] = getattr(parameter, "partition_dim", None)
    return Step(loss, gradients, cuts)


def run_of(folder: Path, flags: str) -> Run:
    """A run from a folder, prepared but for its data."""
    return prepared_run(parse_arguments(f"{FLAGS} {flags} --load {folder}".split()))
