"""Equal weights, data and flags: training is that of megatron-core, update by update.

megatron-core writes data and checkpoint, trains on one process, and draws its samples by its own `GPTDataset`. This
trainer loads both and trains on two stages with four token slices: its own layers, and megatron-core's.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.megatron_files import MICRO, MODELS, ROWS, SEQ, VOCAB, Case, Training, on_ranks, parallel
from tests.distributed import run_distributed
from tests.end_to_end.launching import read_metrics, train_on_this_rank

pytest.importorskip("megatron")

UPDATES = 5
CASES = {
    "A": Case(MODELS["A-rope"], "torch", without_optimizer=True, adam_eps=1e-8),
    "B": Case(MODELS["B"], "torch_dist", without_optimizer=True, adam_eps=1e-8),
}
OURS = (
    f"--use-checkpoint-args --finetune --seq-length {SEQ} --max-position-embeddings {SEQ} --split 90,10,0 --seed 7"
    f" --tokenizer-type NullTokenizer --vocab-size {VOCAB} --eval-iters 0"
    f" --micro-batch-size {MICRO} --global-batch-size {ROWS} --train-iters {UPDATES} --lr 1e-2 --min-lr 1e-3"
    " --lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 10 --weight-decay 0.1 --adam-beta2 0.95"
    " --clip-grad 1 --num-token-slices 4"
)
STAGES, TENSOR = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"


def test_five_updates_are_those_of_megatron_core(tmp_path: Path) -> None:
    theirs = on_ranks(by_megatron_core, {tmp_path / name: case for name, case in CASES.items()})
    for folder, expected in theirs.items():
        words = (
            f"{OURS} {STAGES} --data-path {folder / 'corpus'} --load {folder} --metrics-file {folder / 'metrics.jsonl'}"
        )
        assert run_distributed(train_on_this_rank, 2, words.split(), folder) == [0, 0]
        ours, _ = read_metrics(folder / "metrics.jsonl")
        found = [each["lm_loss"] for each in ours], [each["grad_norm"] for each in ours]
        for name, (losses, norms) in (("here", found), ("megatron-core", expected)):
            print(f"| {folder.name}, {name} |", *(f"{each:.6f} |" for each in [*losses, norms[-1]]))
        assert found[0] == pytest.approx(expected[0], rel=1e-6), folder.name
        assert found[1] == pytest.approx(expected[1], rel=1e-6), folder.name

    # The layers of megatron-core load its checkpoint by name, and continue from their own on other ranks.
    folder, saved = tmp_path / "B", tmp_path / "saved"
    common = f"--data-path {folder / 'corpus'} --metrics-file {folder / 'example.jsonl'} --save {saved}"
    continued = OURS.replace("--finetune", "")
    for words in (f"{OURS} {STAGES} --load {folder} --exit-interval 3", f"{continued} {TENSOR} --load {saved}"):
        assert run_distributed(train_the_example, 2, f"{words} {common}".split(), folder) == [0, 0]
    ours, _ = read_metrics(folder / "example.jsonl")
    assert [each["lm_loss"] for each in ours] == pytest.approx(theirs[folder][0], rel=1e-6)
    assert [each["grad_norm"] for each in ours] == pytest.approx(theirs[folder][1], rel=1e-6)


def train_the_example(words: Sequence[str], folder: Path) -> int:
    """Train megatron-core's layers by the program of the examples, without the rows that pad the vocabulary."""
    warnings.simplefilter("ignore")
    # Its fused functions are compiled at their first call, for longer than these tests run.
    torch._dynamo.config.disable = True
    from examples import pretrain_megatron_core as example
    from megatron_terapipe.megatron_core import vocabulary_loss
    from megatron_terapipe.training.pretrain import pretrain

    first = []

    def layers(config: Any, ranks: Any) -> Any:
        first.append(ranks.tensor.rank)
        return example.layers(config, ranks)

    def loss(logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids = first[0] * logits.shape[-1] + torch.arange(logits.shape[-1])
        return vocabulary_loss(logits.masked_fill(ids >= VOCAB, -torch.inf), labels)

    with Path(folder / "example.txt").open("a") as log, redirect_stdout(log):
        return pretrain(layers, loss=loss, flags=example.flags, argv=words)


def by_megatron_core(folder: Path, case: Case) -> tuple[list[float], list[float]]:
    """Losses and norms of the gradients of all updates; the data and the weights before are written into the folder."""
    with parallel(case):
        training = Training(case)
        training.save(folder)
        batches = drawn_batches(folder / "corpus")
        found = [training.update(next(batches)) for _ in range(UPDATES)]
    return [loss for loss, _ in found], [norm for _, norm in found]


def drawn_batches(prefix: Path) -> Iterator[torch.Tensor]:
    """Write documents of many lengths, and draw global batches of one epoch: `(ROWS, SEQ + 1)`."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = np.random.default_rng(0)
    writer = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in random.integers(3, 40, size=40):
        document = [*random.integers(0, VOCAB - 1, size=length), VOCAB - 1]
        writer.add_document(torch.tensor(document), [len(document)])
    writer.finalize(f"{prefix}.idx")
    config = GPTDatasetConfig(
        **{"random_seed": 7, "sequence_length": SEQ, "blend": ([str(prefix)], None), "split": "90,10,0"},
        **{"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False},
        tokenizer=SimpleNamespace(vocab_size=VOCAB, eod=VOCAB - 1, pad=-1, unique_identifiers={"class": "none"}),
    )
    train = BlendedMegatronDatasetBuilder(GPTDataset, [UPDATES * ROWS, 0, 0], lambda: True, config).build()[0]
    samples = (torch.cat([train[number]["tokens"], train[number]["labels"][-1:]]) for number in range(UPDATES * ROWS))
    for _ in range(UPDATES):
        yield torch.stack([next(samples) for _ in range(ROWS)])
