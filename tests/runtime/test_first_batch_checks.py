"""Layers with other results in token slices are refused, others are not, and the check has no effects."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime import first_batch_checks
from deepspeed_ext.runtime.first_batch_checks import StageLayer, check_layers
from deepspeed_ext.runtime.state.sequence_state import Past
from deepspeed_ext.runtime.topology import SequenceParallelRanks
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.training import Setup, build, losses

CUT = (9, 1, 14)
OF_RUN = TokenSlices((100, 60, 40, 56))


class OwnAttention(models.Block):
    """Attends to its own tokens only."""

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(self.norm(hidden)).unflatten(-1, (-1, models.HIDDEN // models.HEADS)).transpose(1, 2)
        query, key, value = heads.split([models.HEADS, models.GROUPS, models.GROUPS], dim=1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(hidden)


class Twice(models.Block):
    """Attends twice, so that the keys of the second call replace those of the first."""

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        return super().forward(super().forward(hidden, past), past)


class PositionsFromZero(models.Embedding):
    """Counts positions from the start of the token slice."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight) + self.position[: tokens.shape[1]]


class ZeroPositions(PositionsFromZero):
    """Positions that are 0 until they are trained."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.position)


class Dropping(nn.Module):
    """Mixes no tokens, draws random numbers, and counts its tokens in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(models.HIDDEN, models.HIDDEN), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen += hidden.shape[1]
        return self.dropout(self.linear(hidden))


def _of(layer: nn.Module) -> StageLayer:
    takes_past = "past" in inspect.signature(layer.forward).parameters

    def run(hidden: Any, state: Any, token_slice: int, entries: Any) -> Any:
        return layer(hidden, **({"past": state.past(0, token_slice)} if takes_past else {}))

    return StageLayer(f"layer 0 ({type(layer).__name__})", run, tuple(layer.modules()))


def check(
    layer: nn.Module,
    inputs: Tensor,
    dtype: torch.dtype = torch.float32,
) -> bool:
    layer = layer.to(dtype)
    if inputs.is_floating_point():
        inputs = inputs.to(dtype)
    sizes = {"seq_length": inputs.shape[1], "token_slices": OF_RUN, "ranks": SequenceParallelRanks()}
    return check_layers([_of(layer)], inputs, {}, modules=layer, **sizes)


HIDDEN, TOKENS = torch.randn(2, 24, models.HIDDEN), torch.randint(models.VOCAB, (2, 24))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_with_past_or_without_mixing_pass(dtype: torch.dtype) -> None:
    for seed in range(8):
        torch.manual_seed(seed)
        assert check(models.Block(), torch.randn(2, 64, models.HIDDEN), dtype)
        assert check(models.Embedding(), TOKENS, dtype)
        assert check(Dropping(), torch.randn(2, 200, models.HIDDEN), dtype)


class Wrapping(nn.Linear):
    """Returns an object, from which the loss computes logits."""

    def forward(self, hidden: Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(hidden))


def test_a_layer_whose_output_is_no_tensor_passes_without_a_warning_and_own_dropout_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[Any] = []
    monkeypatch.setattr(first_batch_checks.logger, "log", lambda *line: lines.append(line))
    assert check(Wrapping(models.HIDDEN, 5), HIDDEN)
    assert not lines
    assert check(Dropping(), HIDDEN)
    assert lines[0][1].startswith("layer 0 (Dropping) draws random numbers that depend on ranks and token slices")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("make", "inputs", "name"),
    [
        (OwnAttention, HIDDEN, "OwnAttention"),
        (PositionsFromZero, TOKENS, "PositionsFromZero"),
        (ZeroPositions, TOKENS, "ZeroPositions"),
    ],
)
def test_others_are_named_in_one_line(
    make: Callable[[], nn.Module], inputs: Tensor, name: str, dtype: torch.dtype
) -> None:
    for seed in range(8):
        torch.manual_seed(seed)
        with pytest.raises(UserError) as refused:
            check(make(), inputs, dtype)
        assert str(refused.value).startswith(f"layer 0 ({name}) gives other results in token slices")
        assert "\n" not in str(refused.value)


def before(hidden: Tensor, distance: int) -> Tensor:
    """The token `distance` before each one; 0 where there is none."""
    return F.pad(hidden, (0, 0, distance, 0))[:, : hidden.shape[1]]


def attended(hidden: Tensor, *, block: int | None = None, slope: float = 0.0) -> Tensor:
    position = torch.arange(hidden.shape[1])
    distance = position[:, None] - position
    mask = distance >= 0 if block is None else (distance >= 0) & (position[:, None] // block == position // block)
    scores = torch.where(mask, -slope * distance.to(hidden.dtype), float("-inf"))
    return F.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=scores)


class Mixing(nn.Module):
    """Adds a mixture of tokens, in a branch with the same weight for all channels."""

    def __init__(self, mix: Callable[[Tensor], Tensor], weight: float) -> None:
        super().__init__()
        self.mix, self.weight = mix, nn.Parameter(torch.full((models.HIDDEN,), weight))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mix(hidden) * self.weight


class MixingBlock(models.Block):
    """Adds it beside attention that reads `past`."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.mixing = Mixing(MIXTURES["convolution"], weight)

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        return self.mixing(super().forward(hidden, past))


MIXTURES: dict[str, Callable[[Tensor], Tensor]] = {
    "convolution": lambda hidden: before(hidden, 1) - before(hidden, 2),
    "token shift": lambda hidden: before(hidden, 1),
    "far tap": lambda hidden: before(hidden, 70),
    "recurrence": lambda hidden: torch.tanh(hidden).cumsum(dim=1),
    "attention": attended,
    "attention with ALiBi": partial(attended, slope=0.1),
    "attention in blocks": partial(attended, block=64),
    "mean": lambda hidden: hidden.mean(dim=1, keepdim=True).expand_as(hidden),
}


@pytest.mark.parametrize("weight", [0.0, 1e-5, 1.0])
@pytest.mark.parametrize("mixture", [*MIXTURES, "beside attention"])
def test_mixtures_are_found_whatever_their_weights(mixture: str, weight: float) -> None:
    layer = MixingBlock(weight) if mixture == "beside attention" else Mixing(MIXTURES[mixture], weight)
    with pytest.raises(UserError, match=r"gives other results in token slices .* past.carried and past.carry for a"):
        check(layer, torch.randn(2, 256, models.HIDDEN))


class KeepsState(nn.Module):
    """A token shift that keeps the last token on itself, without its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.share = None, nn.Parameter(torch.zeros(models.HIDDEN))

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        last = torch.zeros_like(hidden[:, :1]) if past.prefix_len == 0 else self.last
        self.last = hidden[:, -1:].detach()
        return hidden + self.share * torch.cat((last, hidden[:, :-1]), dim=1)


class KeepsGraph(KeepsState):
    """The same with its gradient, so that a second backward would go through the graph of the first."""

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        output = super().forward(hidden, past)
        self.last = hidden[:, -1:]
        return output


class KeepsInList(KeepsState):
    """Keeps it without its gradient in a list."""

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        last = torch.zeros_like(hidden[:, :1]) if past.prefix_len == 0 else self.kept[0]
        self.kept = [hidden[:, -1:].detach()]
        return hidden + self.share * torch.cat((last, hidden[:, :-1]), dim=1)


class CarriesWithoutGradient(KeepsState):
    """Leaves the last token to the next token slice without its gradient."""

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        last = past.carried("last", torch.zeros_like(hidden[:, :1]))
        past.carry("last", hidden[:, -1:].detach())
        return hidden + self.share * torch.cat((last, hidden[:, :-1]), dim=1)


class OfTraining(nn.Module):
    """Subtracts the mean of the tokens in training."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(dim=1, keepdim=True) if self.training else hidden


class KeepsTable(nn.Module):
    """Keeps positions of the token slice on itself, and makes them again each time."""

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        self.table = past.positions(hidden.shape[1]).to(hidden.dtype).unsqueeze(-1)
        return hidden + self.table


class Normed(nn.Module):
    """Normalises over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(models.HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (OfTraining, "gives other results in token slices than on the whole sequence"),
        (CarriesWithoutGradient, "gives other gradients in token slices than on the whole sequence"),
        (KeepsInList, "gives other gradients in token slices than on the whole sequence"),
        (KeepsState, "keeps a state in its attribute last from token slice to token slice"),
        (KeepsGraph, "keeps a state in its attribute last from token slice to token slice"),
        (Normed, "has a BatchNorm, whose mean is over a token slice"),
    ],
)
def test_layers_that_a_first_glance_would_pass(kind: type[nn.Module], line: str) -> None:
    layer, hidden = kind(), torch.randn(2, 200, models.HIDDEN)
    before = {name: weight.clone() for name, weight in layer.state_dict().items()}
    versions = [weight._version for weight in layer.parameters()]
    with pytest.raises(UserError) as refused:
        check(layer, hidden)
    assert line in str(refused.value) and str(refused.value).startswith(f"layer 0 ({kind.__name__}) ")
    assert all(torch.equal(weight, before[name]) for name, weight in layer.state_dict().items())
    assert [weight._version for weight in layer.parameters()] == versions


@pytest.mark.parametrize("kind", [KeepsTable, models.StatefulBlock])
def test_tables_and_carried_states_pass(kind: type[nn.Module]) -> None:
    assert check(kind(), torch.randn(2, 200, models.HIDDEN))


def test_the_check_has_no_effects() -> None:
    layer = Dropping()
    layer.linear.eval()
    torch.manual_seed(5)
    assert check(layer, HIDDEN)
    drawn = torch.rand(4)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4), drawn)
    assert (layer.training, layer.linear.training, layer.dropout.training) == (True, False, True)
    assert layer.seen == 0


def test_too_few_tokens_and_layers_of_fixed_length_are_not_checked() -> None:
    class Fixed(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.view(2, 200, models.HIDDEN)

    assert not check(OwnAttention(), HIDDEN[:, :1])
    assert check(Fixed(), torch.randn(2, 200, models.HIDDEN))


class HeadsFirst(models.Block):
    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        heads = hidden.unflatten(-1, (4, -1)).transpose(1, 2)
        return past.attend(heads, heads, heads).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        (Twice, r"^layer 0 \(Twice\) calls past.attend more than once"),
        (HeadsFirst, "^layer 0 attends with 4 tokens, and its token slice has 24: "),
    ],
)
def test_wrong_calls_of_attend_are_refused(layer: type[nn.Module], line: str) -> None:
    with pytest.raises(UserError, match=line):
        check(layer(), HIDDEN)


# ---------------------------------------------------------------------- in the engine


class EntryBlock(models.Block):
    """Takes an entry of the data."""

    def forward(self, hidden: Tensor, past: Past, scale: Tensor) -> Tensor:
        return super().forward(hidden * scale.unsqueeze(-1), past)


def _losses(checks: bool) -> list[float]:
    setup = Setup(pp=2, cut=CUT, recompute=1)
    layers = models.layers(2)
    layers.insert(1, LayerSpec(Dropping))
    layers[2] = LayerSpec(EntryBlock)
    engine = build(setup, layers=layers, engine_keywords={"check_token_slices": checks})
    found = []
    for step in range(2):
        torch.manual_seed(step)
        batches = models.batches(setup.micro_batches, 2, step)
        dicts = ({"tokens": tokens, "scale": 1.0 + torch.rand(tokens.shape)} for tokens, _ in batches)
        data = zip(dicts, (labels for _, labels in batches), strict=True)
        found.append(engine.train_batch(data).item())
    return found


class CarriesItsPart(models.Block):
    """Reads all tokens for its norm, and carries the last token of its part."""

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        past.all_tokens(hidden.unflatten(2, (models.HEADS, -1)))
        last = past.carried("last", torch.zeros_like(hidden[:, :1]))
        past.carry("last", hidden[:, -1:])
        return super().forward(hidden + torch.cat((last, hidden[:, :-1]), dim=1), past)


class WeightOfAnother(nn.Module):
    """Multiplies the heads of this rank by those of the first rank's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(models.HEADS, 1))

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        (heads,) = past.all_tokens(hidden.unflatten(2, (models.HEADS, -1)))
        return past.own_tokens(heads * self.weight[: heads.shape[2]]).flatten(2)


class RaisesAtFirst(models.Block):
    """Raises an error on one of the ranks, in its first forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.raises = dist.get_rank() == 1

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        if self.raises:
            self.raises = False
            raise ValueError("a bug")
        return super().forward(hidden, past)


class RaisesWithOthers(models.Block):
    """Raises an error on one of the ranks that share its tokens, of which the other goes on to `attend`."""

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        (heads,) = past.all_tokens(hidden.unflatten(2, (models.HEADS, -1)))
        if heads.shape[1] > hidden.shape[1] and dist.get_rank() == 1:
            raise ValueError("a bug")
        return super().forward(hidden, past)


def _first_batch(setup: Setup, kind: type[nn.Module] = OwnAttention) -> str:
    """The error of this rank; a fixed text if only its neighbour has ended."""
    layers = models.layers(tied=False)
    layers[4] = LayerSpec(kind)
    engine = build(setup, layers=layers)
    try:
        losses(engine, setup, 1)
    except UserError as error:
        return str(error)
    except RuntimeError:
        return "its neighbour has ended"
    return ""


def _on_two() -> tuple[Any, ...]:
    shared, stages = Setup(sp=2, tied=False), Setup(pp=2, cut=CUT, tied=False)
    kinds = OwnAttention, CarriesItsPart, WeightOfAnother, models.StatefulBlock, RaisesAtFirst
    same = _losses(True) == _losses(False)
    return (
        same,
        _first_batch(Setup(dp=2, tied=False)),
        [_first_batch(shared, kind) for kind in kinds],
        _first_batch(stages),
    )


def test_the_stage_with_such_a_layer_names_it_in_the_first_batch_and_other_runs_do_not_change() -> None:
    (same, alone, first, neighbour), (same_too, alone_too, last, named) = run_distributed(_on_two, 2)
    assert same and same_too
    # Without token slices a layer may attend by itself. Ranks that share a token slice have parts of it.
    assert alone == alone_too == ""
    assert neighbour == "its neighbour has ended"
    for line in (first[0], last[0], named):
        assert line.startswith("layer 4 (OwnAttention) gives other results in token slices")
    for kind, *lines in zip(("CarriesItsPart", "WeightOfAnother"), first[1:3], last[1:3], strict=True):
        assert all(line.startswith(f"layer 4 ({kind}) gives other results on 2 sequence-parallel") for line in lines)
    assert first[3] == last[3] == ""
    assert first[4] == last[4]
    assert first[4].startswith("layer 4 (RaisesAtFirst) raises ValueError (a bug) on one of the ranks that share")


def test_a_layer_that_fails_on_one_of_the_ranks_that_share_its_tokens_is_named_there() -> None:
    waits, named = run_distributed(partial(_first_batch, Setup(sp=2, tied=False), RaisesWithOthers), 2)
    assert waits == "its neighbour has ended"
    assert re.match(
        r"layer 4 \(RaisesWithOthers\) raises ValueError \(a bug\) on \d+ tokens of rank 1, one of 2 seq", named
    )
