"""Times of the layers of a user's own model, by a clock that layers advance; the plan of a run by them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_terapipe.config import Config
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning import with_found_token_slices, with_measured_layers
from megatron_terapipe.search.__main__ import main
from megatron_terapipe.search.measure import layers as measuring
from megatron_terapipe.search.measure.own_model import measure_here
from megatron_terapipe.search.measure.program import model_of_program
from megatron_terapipe.search.price.profile import parse_profile, profile_to_json, read_profile, write_profile
from megatron_terapipe.training.trained_model import TrainedModel
from tests.search.price.profiles import profile as profile_of_a_gpt

PROGRAM = """
import sys
from megatron_terapipe.training.pretrain import pretrain
from tests.search.measure.test_own_model import layers_of, loss


def flags(parser):
    parser.add_argument("--attention-s", type=float, default=0.0)


def layers(config, ranks):
    assert ranks.tensor.size == 1
    return layers_of(config)


if __name__ == "__main__":
    sys.argv.insert(1, "--seed=7")
    sys.exit(pretrain(layers, loss=loss, flags=flags))
"""
FLAGS = (
    "--num-layers 3 --hidden-size 8 --num-attention-heads 2 --seq-length 256 --vocab-size 300 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type byte "
    "--pipeline-model-parallel-size 2 --num-token-slices 4 --token-slices auto"
)
ROW_S, LOSS_S = 1e-4, 3e-4
"""Seconds of a token in a layer, and in the loss."""


class Clock:
    """A clock that layers advance, in place of the stopwatch of ops."""

    now = 0.0

    def __enter__(self) -> "Clock":
        self._begun = Clock.now
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = Clock.now - self._begun


class Takes(torch.autograd.Function):
    """The input itself, after some seconds, and after twice as many in the backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        Clock.now += seconds
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        Clock.now += 2 * ctx.seconds
        return gradient, None


class Attends(nn.Module):
    """A layer that returns two tensors, and takes longer for tokens with more before them."""

    def __init__(self, attention_s: float) -> None:
        super().__init__()
        self.attention_s, self.scale = attention_s, nn.Parameter(torch.ones(8))

    def forward(self, pair: tuple[Tensor, Tensor], past: Any) -> tuple[Tensor, Tensor]:
        hidden, unchanged = pair
        length = hidden.shape[1]
        positions = length * past.prefix_len + length * (length + 1) / 2
        return Takes.apply(hidden * self.scale, length * ROW_S + positions * self.attention_s), unchanged


class Convolves(nn.Module):
    """A layer that takes the same time for every token."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return Takes.apply(pair[0], pair[0].shape[1] * ROW_S), pair[1]


class Words(nn.Embedding):
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = super().forward(tokens)
        return hidden, torch.ones_like(hidden)


class Logits(nn.Linear):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(pair[0])


def layers_of(config: Config) -> list[nn.Module]:
    """Three blocks of two classes, the second of which attends."""
    blocks = (Attends(config.own.attention_s), Convolves(), Attends(config.own.attention_s))
    return [Words(300, 8), *blocks, Logits(8, 300)]


def loss(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    targets, mask = labels
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return Takes.apply((losses * mask).sum() / mask.sum(), targets.shape[1] * LOSS_S)


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[TrainedModel, Config]]]:
    """Reads the program with more flags; its layers are timed once, by the clock."""
    monkeypatch.setattr(measuring, "Stopwatch", Clock)
    monkeypatch.setattr(measuring, "MOST_VISITS", 1)
    monkeypatch.setattr(measuring, "VISIT_S", 0.0)
    monkeypatch.setattr("megatron_terapipe.search.measure.own_model.BUDGET_S", 1e9)
    file = tmp_path / "own_layers.py"
    file.write_text(PROGRAM)
    yield lambda *more: model_of_program((str(file), *FLAGS.split(), *more))


def test_later_token_slices_are_shorter_where_attention_takes_long(
    read: Callable[..., tuple[TrainedModel, Config]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for attention_s, *more in (("0", "--num-experts", "4"), ("1e-5",)):
        model, config = read("--attention-s", attention_s, *more)
        assert (config.own.attention_s, config.training.seed) == (float(attention_s), 7)
        measured = measure_here(model, config)
        found[attention_s] = with_found_token_slices(replace(config, measured=measured), 1).token_slices().lengths
    assert sum(found["0"][:2]) == sum(found["0"][2:]) == 128
    assert list(found["1e-5"]) == sorted(found["1e-5"], reverse=True)
    assert found["1e-5"][-1] < 0.8 * found["1e-5"][0]
    # The times of a block are the mean over three, of which two attend.
    profile = parse_profile(measured, "measured")
    block, head = (next(each for each in profile.layers if each.shape.kind == kind) for kind in ("block", "head"))
    assert profile.own_model == "own_layers.py"
    for point in block.points:
        length = point.end - point.start
        positions = length * point.start + length * (length + 1) / 2
        assert point.forward_s == pytest.approx(length * ROW_S + 2 / 3 * positions * 1e-5)
        assert point.input_gradient_s + point.weight_gradient_s == pytest.approx(2 * point.forward_s)
    assert all(point.forward_s == pytest.approx(LOSS_S * point.end) for point in head.points)
    # A file of it is read back, and `rank` takes it.
    write_profile(profile, str(tmp_path / "profile.json"))
    assert profile_to_json(read_profile(str(tmp_path / "profile.json"))) == measured
    (tmp_path / "cluster.json").write_text('{"nodes": [{"device": "cpu-core", "devices": 2}]}')
    capsys.readouterr()
    words = "- --num-layers 3 --hidden-size 8 --num-attention-heads 2 --seq-length 256 --vocab-size 300".split()
    files = [str(tmp_path / "cluster.json"), "--profile", str(tmp_path / "profile.json")]
    assert main(["rank", *words, *files, "--global-batch-size", "4", "--schedule", "1f1b"]) == 0
    assert "was measured on the layers of own_layers.py: sizes of memory" in " ".join(capsys.readouterr().out.split())


def test_all_ranks_have_the_times_of_the_first_one(read: Callable[..., tuple[TrainedModel, Config]]) -> None:
    _, config = read()
    answers: dict[str, Any] = {}

    def measure_on(rank: int) -> Config:
        def ask(question: str, find: Callable[[], Any]) -> Any:
            return answers.setdefault(question, find())

        return with_measured_layers(config, "own_layers.py", lambda _: {"rank": rank}, ask)

    assert [measure_on(rank).measured for rank in range(2)] == [{"rank": 0}] * 2


@pytest.mark.parametrize(
    ("more", "program", "line"),
    [
        (
            "",
            "own_layers.py",
            "a dry run does not measure, and this plan needs the times of the layers of own_layers.py",
        ),
        (
            "--op-profile {gpt}",
            "own_layers.py",
            "--op-profile {gpt} has times of the layers of a GPT, and this run",
        ),
        ("--op-profile {own}", None, "--op-profile {own} has times of the layers of other.py, and this run"),
    ],
)
def test_times_of_other_layers_are_refused(
    more: str, program: str | None, line: str, tmp_path: Path, read: Callable[..., tuple[TrainedModel, Config]]
) -> None:
    paths = {name: str(tmp_path / f"{name}.json") for name in ("gpt", "own")}
    write_profile(profile_of_a_gpt(), paths["gpt"])
    write_profile(profile_of_a_gpt().model_copy(update={"own_model": "other.py"}), paths["own"])
    _, config = read(*more.format(**paths).split())
    measure = None if not more else dict
    with pytest.raises(ConfigError) as caught:
        with_measured_layers(config, program, measure, None)
    assert str(caught.value).startswith(line.format(**paths))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import sys\nsys.exit(1)", "does not call pretrain with layers of its own: give one that does"),
        (
            PROGRAM.replace(
                "def layers", "from megatron_terapipe.training.pretrain import gpt_layers as layers\ndef other"
            ),
            "does not",
        ),
        (None, "cannot be read (No such file or directory): give a Python file"),
    ],
)
def test_programs_without_layers_of_their_own_are_refused(text: str | None, line: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        model_of_program((str(file), *FLAGS.split()))
    assert str(caught.value).startswith(f"--program {file} {line}")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "nothing is named to be measured: give MODEL, or --program FILE with the flags of a training"),
        (
            "model.json --program x.py",
            "MODEL and the flags that change it describe a GPT, and --program x.py has layers",
        ),
        ("--num-layers 3 --program x.py", "MODEL and the flags that change it describe a GPT, and --program x.py has"),
    ],
)
def test_a_model_or_a_program_is_measured(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")
