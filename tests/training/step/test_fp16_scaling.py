"""fp16 from end to end: an overflow skips the update and halves the scale, and the run counts on as Megatron does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator

from megatron_terapipe.data.indexed_dataset import IndexedDatasetWriter
from tests.distributed import run_distributed
from tests.end_to_end.launching import flags, read_metrics, train_on_this_rank

HUGE = "--fp16 --initial-loss-scale 4294967296 --hysteresis 1 --loss-scale-window 1000 --lr-decay-style linear"
"""With 2**32 the first gradients overflow: the largest fp16 number is below 2**16."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("fp16") / "corpus"
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, vocab_size=257) as writer:
        for _ in range(60):
            writer.add_document(random.integers(97, 105, 80).tolist())
    return prefix


def _train_in_fp16(words: list[str]) -> int:
    # DeepSpeed asks for a CPU with fast fp16; slow will do.
    get_accelerator().is_fp16_supported = lambda: True
    torch.set_num_threads(1)
    return train_on_this_rank(words)


def trained(data: Path, folder: Path, *words: str, metrics: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = folder / metrics
    given = flags(data, *HUGE.split(), "--metrics-file", path, *words)
    if "--train-samples" in words:
        position = given.index("--train-iters")
        del given[position : position + 2]
    assert run_distributed(_train_in_fp16, 2, given) == [0, 0]
    return read_metrics(path)[0]


def test_overflows_skip_updates_until_the_scale_fits(data: Path, tmp_path: Path) -> None:
    found = trained(data, tmp_path, "--train-iters", "30", "--eval-iters", "0")
    skipped = [each["grad_norm"] is None for each in found]
    count = sum(skipped)
    assert 4 < count < 30
    assert skipped == [True] * count + [False] * (30 - count), "the scale only falls, so updates do not stop again"
    assert [each["loss_scale"] for each in found] == [2.0 ** (32 - min(done, count)) for done in range(1, 31)]
    assert [each["skipped_iterations"] for each in found] == [min(done, count) for done in range(1, 31)]
    # A skipped iteration is an iteration, and its samples are read; only the schedule waits for an update.
    assert [each["iteration"] for each in found] == list(range(1, 31))
    assert [each["consumed_samples"] for each in found] == [8 * done for done in range(1, 31)]
    updates = [max(0, done - count) for done in range(30)]
    assert [each["learning_rate"] for each in found] == pytest.approx([1e-2 * (30 - done) / 30 for done in updates])
    losses = [each["lm_loss"] for each in found]
    assert losses[-1] < losses[count] - 0.5, "it learns once it may"


def test_a_resumed_run_knows_what_was_skipped(data: Path, tmp_path: Path) -> None:
    """In samples, on a ramp: the schedule goes on after the updates there were, with the scale there was."""
    length = "--train-samples 160 --rampup-batch-size 4 4 16 --eval-iters 0 --save-interval 8".split()
    checkpoints = str(tmp_path / "checkpoints")
    whole = trained(data, tmp_path, *length, "--save", checkpoints, metrics="whole.jsonl")
    (tmp_path / "checkpoints" / "latest").write_text("global_step8")
    rest = trained(data, tmp_path, *length, "--save", checkpoints, "--load", checkpoints, metrics="rest.jsonl")
    assert whole[7]["skipped_iterations"] > 2
    assert [each["iteration"] for each in rest] == [each["iteration"] for each in whole[8:]]
    for name in ("consumed_samples", "skipped_iterations", "loss_scale", "learning_rate", "global_batch_size"):
        assert [each[name] for each in rest] == [each[name] for each in whole[8:]], name
    assert [each["lm_loss"] for each in rest] == [each["lm_loss"] for each in whole[8:]]


def test_weight_gradients_apart_overflow_and_learn_as_whole_backwards_do(data: Path, tmp_path: Path) -> None:
    words = "--initial-loss-scale 1048576 --train-iters 10 --eval-iters 0".split()
    whole = trained(data, tmp_path, *words)
    apart = trained(data, tmp_path, *words, "--pipeline-schedule", "zero-bubble", metrics="apart.jsonl")
    assert 0 < sum(each["grad_norm"] is None for each in whole) < 10
    for name in ("lm_loss", "grad_norm", "loss_scale", "skipped_iterations"):
        assert [each[name] for each in apart] == [each[name] for each in whole], name
