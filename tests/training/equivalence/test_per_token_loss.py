"""The loss as a mean over the tokens of evaluations, which are several global batches; training is in the ladder."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.data.datasets import DatasetSplits
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.data.tokenizer import ByteTokenizer
from megatron_terapipe.inference import WholeModel
from megatron_terapipe.records import Progress
from megatron_terapipe.training import build_engine as trainer_engine
from megatron_terapipe.training.reporters import Reporters
from megatron_terapipe.training.trainer import evaluate
from tests.distributed import run_each
from tests.training.equivalence.test_gpt_equivalence import WholePast
from tests.training.gpt_runs import SEQ, VOCAB, Setup, run_of

EVAL_ITERS, MICRO_BATCHES, ROWS = 2, 2, 2
# Weights large enough that samples differ in their loss.
FLAGS = f"--init-method-std 0.2 --num-token-slices 4 --eod-mask-loss --eval-iters {EVAL_ITERS}"


class Documents:
    """Samples of which each has more ends of documents than the one before, so that fewer tokens count in the loss."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, sample: int, /) -> np.ndarray:
        draw = np.random.default_rng(sample)
        ids = draw.integers(VOCAB - 1, size=SEQ + 1)
        return np.where(draw.random(SEQ + 1) < sample / 20, ByteTokenizer.eod, ids)


def evaluated(setup: Setup) -> float:
    run = run_of(setup)
    vars(run)["datasets"] = DatasetSplits(train=None, valid=Documents(), test=None)  # Cached, in place of the flags'.
    engine, reporters, lines = trainer_engine.build_engine(run), Reporters(), []
    reporters.add("", lines.append)
    evaluate(run, engine, reporters, Progress())
    return lines[0].lm_loss


def expected(setup: Setup, *, per_token: bool) -> float:
    model, data = WholeModel(parse_arguments(setup.argv()).model), Documents()
    sums, counts = [], []
    for first in range(0, EVAL_ITERS * MICRO_BATCHES * setup.data_parallel_size * ROWS, ROWS):
        samples = torch.from_numpy(np.stack([data[first + row] for row in range(ROWS)]))
        batch = MicroBatch.from_samples(samples, masked_eod=ByteTokenizer.eod)
        with torch.no_grad():
            logits = model(batch.tokens, WholePast(1234, (0, 1), ((0,),) * ROWS))
        each = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        sums.append(float((each * batch.loss_mask.flatten()).double().sum()))
        counts.append(float(batch.loss_mask.sum()))
    if per_token:
        return sum(sums) / sum(counts)
    return float(np.mean([total / count for total, count in zip(sums, counts, strict=True)]))


WINDOWS = "--sliding-window 9 --window-attn-skip-freq 2"
LAYOUTS = ("", "--pipeline-model-parallel-size 2", f"--context-parallel-size 2 {WINDOWS}")
SETUPS = [
    Setup(2, f"{FLAGS} {layout} {per_token}", MICRO_BATCHES)
    for layout in LAYOUTS
    for per_token in ("", "--calculate-per-token-loss")
]


def test_an_evaluation_is_the_mean_over_all_its_tokens() -> None:
    means = [expected(setup, per_token="per-token" in setup.flags) for setup in SETUPS]
    assert means[0] != pytest.approx(means[1], rel=1e-4), "the data distinguishes the two means"
    for mean, found in zip(means, run_each(evaluated, 2, SETUPS), strict=True):
        assert found == (pytest.approx(mean, rel=1e-6),) * 2
