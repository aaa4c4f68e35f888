"""A model of a program's own: its layers on stages and on tensor-parallel ranks, its loss, data and flags."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.runtime.executor import Executor
from megatron_terapipe.arguments.build import parse_arguments, read_arguments
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.data.datasets import own_datasets
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.errors import CheckpointError, DataError
from megatron_terapipe.model.gpt import gpt_loss
from megatron_terapipe.training.own_layers import CheckedLoss, _fault, _Part, blocks_of, check_layers_of, partition_of
from megatron_terapipe.training.pretrain import gpt_layers, pretrain
from megatron_terapipe.training.trained_model import TrainedModel
from tests.distributed import run_distributed
from tests.end_to_end.launching import read_metrics

SEQ, VOCAB, WIDTH = 16, 11, 8
REQUIRED = (
    f"--num-layers 2 --hidden-size {WIDTH} --num-attention-heads 2 --seq-length {SEQ} --max-position-embeddings {SEQ}"
    f" --vocab-size {VOCAB} --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-2"
)


class _Copied(torch.autograd.Function):
    """The input of all tensor-parallel ranks; its gradient is summed over them."""

    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.ranks.group)
        return gradient, None


class _Summed(torch.autograd.Function):
    """The sum of the parts of all tensor-parallel ranks; its gradient goes to each of them."""

    @staticmethod
    def forward(ctx, x, ranks):
        x = x.clone()
        dist.all_reduce(x, group=ranks.group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Mlp(nn.Module):
    """Two products that tensor-parallel ranks divide as Megatron does, with a weight of which each rank has a copy."""

    def __init__(self, width: int, ranks: Any) -> None:
        super().__init__()
        self.ranks, self.norm = ranks, nn.LayerNorm(width)
        up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.up, self.down = self._part(up.weight, 0), self._part(down.weight, 1)

    def _part(self, whole: Tensor, dimension: int) -> nn.Parameter:
        part = nn.Parameter(whole.detach().chunk(self.ranks.size, dimension)[self.ranks.rank].clone())
        part.partition_dim = dimension
        return part

    def forward(self, hidden, past):
        inputs = self.norm(hidden)
        if self.ranks.size > 1:
            inputs = _Copied.apply(inputs, self.ranks)
        heads = inputs.unflatten(-1, (2, -1))
        inputs = inputs + past.attend(heads, heads, heads).flatten(2)
        outputs = F.linear(F.gelu(F.linear(inputs, self.up)), self.down)
        return hidden + (_Summed.apply(outputs, self.ranks) if self.ranks.size > 1 else outputs)


def layers(config, ranks):
    model = config.model
    blocks = [LayerSpec(Mlp, model.hidden_size, ranks.tensor)] * model.num_layers
    output = LayerSpec(nn.Linear, model.hidden_size, model.vocab_size)
    return [LayerSpec(nn.Embedding, model.vocab_size, model.hidden_size), *blocks, output]


class Samples:
    """Sample n is the same in every run; two documents in each, with positions of their own."""

    def __init__(self, config: Any) -> None:
        self.shift = config.own.shift

    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> dict[str, Any]:
        ids = (np.random.default_rng(number).integers(VOCAB, size=SEQ + 1) + self.shift) % VOCAB
        mask, positions = np.ones(SEQ), np.arange(SEQ)
        mask[:3], positions[6:] = 0, np.arange(SEQ - 6)
        return {"tokens": torch.tensor(ids[:-1]), "labels": ids[1:], "loss_mask": mask, "position_ids": positions}


def flags(parser: ArgumentParser) -> None:
    parser.add_argument("--shift", type=int, default=0)


def train_own(words: str, folder: Path, datasets: Any = lambda config: (Samples(config), Samples(config), None)) -> int:
    with (folder / "log.txt").open("a") as log, redirect_stdout(log):
        argv = f"{REQUIRED} --reset-position-ids --reset-attention-mask {words}".split()
        return pretrain(layers, datasets=datasets, flags=flags, argv=argv)


def test_a_run_on_two_stages_continues_on_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    """In other token slices and with recomputation, for weights that are divided and weights that are copied."""

    def metrics(name: str) -> Path:
        return tmp_path / f"{name}.jsonl"

    saved = f"--shift 3 --save {tmp_path / 'saved'} --metrics-file"
    stages = f"{saved} {metrics('stages')} --pipeline-model-parallel-size 2 --token-slices 6,5,3,2 --save-interval 2"
    tensor = (
        f"{saved} {metrics('tensor')} --tensor-model-parallel-size 2 --num-token-slices 2 --load {tmp_path / 'saved'}"
    )
    tensor += " --load-tag global_step2 --recompute-granularity full"
    for words in (stages, tensor):
        assert run_distributed(train_own, 2, words, tmp_path) == [0, 0]
    expected, continued = (read_metrics(metrics(name)) for name in ("stages", "tensor"))
    for key in ("lm_loss", "grad_norm"):
        assert [each[key] for each in continued[0]] == pytest.approx([each[key] for each in expected[0][2:]], rel=1e-6)
    evaluated = [found[1][-1]["validation_lm_loss"] for found in (expected, continued)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-6)
    start = json.loads(metrics("stages").read_text().splitlines()[0])
    weights = VOCAB * WIDTH + 2 * (2 * WIDTH + 8 * WIDTH * WIDTH) + VOCAB * WIDTH + VOCAB
    assert (
        start["parameters"],
        "2 x Mlp, Linear; stages of layers 0-1, 2-3" in (tmp_path / "log.txt").read_text(),
    ) == (weights, True)
    info = CheckpointInfo.read(tmp_path / "saved" / "global_step4")
    with pytest.raises(CheckpointError, match="only the GPT's are converted, exported and run"):
        info.of_gpt(tmp_path)
    with pytest.raises(CheckpointError, match="this run the layers of the GPT"):
        info.check(
            parse_arguments(f"{REQUIRED} --mock-data".split()).model, SimpleNamespace(), "adam", weights_only=True
        )


TOKENS = np.arange(SEQ + 1) % VOCAB
WHOLE = {"tokens": TOKENS[:-1], "labels": TOKENS[1:], "loss_mask": np.ones(SEQ)}
RESTARTING = np.arange(SEQ) % 5


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (TOKENS[:-1], "has token ids (seq_length + 1) of shape (16,), and --seq-length 16 needs (17,)"),
        (TOKENS / 2, "of type float64: return integers"),
        (TOKENS + 1, f"has the id {VOCAB}, and the vocabulary {VOCAB}: raise --vocab-size"),
        (TOKENS - 1, "has the id -1"),
        ({"tokens": TOKENS[:-1]}, "has no 'labels': add it"),
        (WHOLE | {"loss_mask": np.ones(SEQ + 1)}, "has loss_mask of shape (17,)"),
        (WHOLE | {"position_ids": RESTARTING}, "restart at token 5: add --reset-position-ids"),
        (WHOLE | {"position_ids": np.arange(SEQ) + 1}, "do not count from 0 in each document"),
    ],
)
def test_samples_that_a_run_cannot_train_on(sample: Any, words: str) -> None:
    with pytest.raises(DataError, match=r"sample 0 of the training data of mine\.py") as error:
        own_datasets(([sample], None, None), "mine.py", seq_length=SEQ, vocab_size=VOCAB, restarts=False)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([TOKENS], "datasets of mine.py returns a list: return three"),
        ((None, None, None), "returns no training data"),
        ((3, None, None), "the training data of mine.py is a int: give it __len__"),
        (([TOKENS], [], None), "the validation data of mine.py has no samples"),
    ],
)
def test_data_that_is_none(made: Any, words: str) -> None:
    with pytest.raises(UserError) as error:
        own_datasets(made, "mine.py", seq_length=SEQ, vocab_size=VOCAB, restarts=False)
    assert words in str(error.value)


def test_labels_below_zero_do_not_count_and_documents_begin_at_position_zero() -> None:
    sample = WHOLE | {"labels": np.where(np.arange(SEQ) < 2, -100, TOKENS[1:]), "position_ids": RESTARTING}
    train = own_datasets(([sample], None, None), "mine.py", seq_length=SEQ, vocab_size=VOCAB, restarts=True).train
    batch = MicroBatch.from_parts([train[0], train[0]])
    assert batch.document_starts == ((0, 5, 10, 15),) * 2
    assert batch.loss_mask.sum() == 2 * (SEQ - 2)
    assert batch.labels.min() >= 0


EMBEDDING, BLOCK, OTHER = LayerSpec(nn.Embedding, 2, 2), LayerSpec(Mlp, 2, None), LayerSpec(nn.GELU)
TIED = TiedLayerSpec("words", nn.Embedding, 2, 2)


@pytest.mark.parametrize(
    ("listed", "num_layers", "blocks", "bounds"),
    [
        ([EMBEDDING, *[BLOCK] * 4, OTHER], 4, range(1, 5), (0, 3, 6)),
        ([EMBEDDING, BLOCK, OTHER, BLOCK, OTHER, EMBEDDING], 4, range(6), (0, 3, 6)),
        ([TIED, BLOCK, OTHER, BLOCK, OTHER, TIED], 4, range(1, 5), (0, 3, 6)),
        ([EMBEDDING, *[BLOCK] * 6], 4, range(7), (0, 4, 7)),
        ([nn.Linear(2, 2), nn.Linear(2, 2), nn.GELU()], 2, range(2), (0, 1, 3)),
    ],
)
def test_blocks_are_dealt_and_others_go_with_the_ends(
    listed: list[Any], num_layers: int, blocks: range, bounds: tuple[int, ...]
) -> None:
    parallel = parse_arguments(f"{REQUIRED} --mock-data --pipeline-model-parallel-size 2".split()).parallel
    assert blocks_of(listed, num_layers) == blocks
    assert partition_of(listed, parallel, num_layers, "mine.py") == StagePartition(bounds)
    dealt = replace(parallel, stage_partition=f"0,1,{len(blocks)}")
    assert partition_of(listed, dealt, num_layers, "mine.py").bounds == (0, blocks.start + 1, len(listed))
    with pytest.raises(UserError, match=r"deals 9 layers, and mine\.py has"):
        partition_of(listed, replace(parallel, stage_partition="0,1,9"), num_layers, "mine.py")
    with pytest.raises(UserError, match=r"makes 2 stages, and mine\.py has 1 layers"):
        partition_of(listed[:1], parallel, num_layers, "mine.py")


@pytest.mark.parametrize(
    ("given", "words"), [((each for each in ()), "generator"), ([], "list"), ([BLOCK, 3], "layer 1")]
)
def test_layers_that_no_stage_can_run(given: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_layers_of(given, "mine.py")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([((4, 3), 0, "a"), ((4, 3), 0, "b")], None),
        ([((4,), 0, ""), ((4,), 0, "")], None),
        ([((4, 3), -1, ""), ((4, 3), -1, "")], None),
        ([((4, 3), 2, "a")], "has partition_dim 2, and its shape is (4, 3)"),
        ([((4, 3), 0, "a"), ((4, 3), 0, "a")], "begins with the same random values"),
        ([((4, 3), 0, "a"), ((5, 3), 0, "b")], "differs on the tensor-parallel ranks"),
        ([((4, 3), 0, "a"), ((4, 3), -1, "")], "divide it evenly, on all of them"),
    ],
)
def test_weights_that_ranks_cannot_have_divided(parts: list[tuple[Any, ...]], words: str | None) -> None:
    fault = _fault([_Part(*each) for each in parts])
    assert fault is None if words is None else words in fault


def _mean(outputs: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    return gpt_loss(outputs, labels)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (_mean, None),
        (lambda outputs, labels: outputs.sum(-1), "returns a tensor (2, 6): return the mean"),
        (lambda outputs, labels: 1.0, "returns a float"),
        (lambda outputs, labels: _mean(outputs, labels) * outputs.shape[0], "and not their sum"),
        (lambda outputs, labels: F.cross_entropy(outputs.flatten(0, 1), labels[0].flatten()), "loss mask is 0"),
    ],
)
def test_losses_are_means_of_labelled_tokens(loss: Callable[..., Any], words: str | None) -> None:
    outputs, labels = torch.randn(2, 6, VOCAB), (torch.randint(VOCAB, (2, 6)), torch.ones(2, 6))
    checked = CheckedLoss(loss, "mine.py")
    if words is None:
        assert checked(outputs, labels) == loss(outputs, labels)
        return
    with pytest.raises(UserError) as error:
        checked(outputs, labels)
    assert words in str(error.value)


def test_the_default_loss_takes_logits() -> None:
    logits, targets, mask = torch.randn(2, 6, VOCAB), torch.randint(VOCAB, (2, 6)), torch.ones(2, 6)
    mask[0, 1:] = 0
    counted = mask.bool()
    torch.testing.assert_close(gpt_loss(logits, (targets, mask)), F.cross_entropy(logits[counted], targets[counted]))
    with pytest.raises(UserError, match=r"returns \(2, 6\) for labels \(2, 6\), and cross-entropy takes logits"):
        gpt_loss(logits[..., 0], (targets, mask))


def _other_flags(parser: ArgumentParser) -> None:
    for name in ("--max-shift", "--kept_name"):
        parser.add_argument(name, type=int)


def test_flags_of_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    read = partial(read_arguments, program="mine.py", own_flags=flags, has_own_data=True)
    config = read(f"{REQUIRED} --shift -2".split()).config
    assert (config.own, config.data.tokenizer_type) == (Namespace(shift=-2), "NullTokenizer")
    assert parse_arguments(f"{REQUIRED} --mock-data".split()).own == Namespace()
    with_underscores = read(f"{REQUIRED} --max_shift 3 --kept_name 1".split(), own_flags=_other_flags).config.own
    assert with_underscores == Namespace(max_shift=3, kept_name=1)
    for words, named in (
        ("--shift x", "--shift invalid int value: 'x'"),
        ("--shif 2", "--shif is not a flag: did you mean --shift?"),
    ):
        with pytest.raises(UserError) as error:
            read(f"{REQUIRED} {words}".split())
        assert named in str(error.value)
    with pytest.raises(UserError, match="--lr of the program is a flag of the trainer: give it another name"):
        read(REQUIRED.split(), own_flags=lambda parser: parser.add_argument("--lr"))
    with pytest.raises(UserError, match="neither --data-path nor --train-data-path is given"):
        read(REQUIRED.split(), has_own_data=False)
    with pytest.raises(SystemExit):
        read(["--help"])
    shown = capsys.readouterr().out
    assert "deepspeed mine.py --num-layers N" in shown
    assert "--shift SHIFT" in shown


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--pipeline-model-parallel-size 2 --vocabulary-stages --untie-embeddings-and-output-weights", "output layer"),
        ("--recompute-granularity selective", "use full or stage"),
        ("--mtp-num-layers 1 --position-embedding-type rope", "adds layers and losses to the GPT's, and mine.py"),
        ("--load {folder}", "whose weights are read into the GPT's layers only: read them in mine.py"),
    ],
)
def test_flags_that_only_the_gpt_follows(words: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    config = parse_arguments(f"{REQUIRED} --mock-data".split())
    if words.startswith("--load"):
        config = replace(config, checkpoint=replace(config.checkpoint, load=str(tmp_path)))
    else:
        config = parse_arguments(f"{REQUIRED} --mock-data {words}".split())
    TrainedModel(gpt_layers).check(config)
    with pytest.raises(UserError) as error:
        TrainedModel(layers, program="mine.py").check(config)
    assert named in str(error.value)


def test_outputs_that_no_stage_can_send() -> None:
    module = SimpleNamespace(stage_layers=lambda stage: [SimpleNamespace(name="layer 2 (Mine)")])
    tensors = torch.zeros(1), torch.zeros(2)
    assert Executor._sent(SimpleNamespace(_module=module), tensors, 0) == tensors
    with pytest.raises(UserError, match=r"layer 2 \(Mine\), the last layer of stage 0, returns a dict"):
        Executor._sent(SimpleNamespace(_module=module), {"hidden": tensors[0]}, 0)
