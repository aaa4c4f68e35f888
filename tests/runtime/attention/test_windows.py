"""Sliding windows and soft caps across token slices equal attention written out over the whole sequence."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.attention.kernels import PiecewiseAttention, PlainAttention
from deepspeed_ext.runtime.attention.positional_dropout import DropoutPlace
from deepspeed_ext.runtime.state.sequence_state import Past, SequenceState
from deepspeed_ext.runtime.topology import SequenceParallelRanks
from tests.runtime.attention.masks import attention_keep_mask
from tests.strategies import cuts

HEADS, SIZE, WIDTH, ROWS = 4, 4, 12, 2
SEQUENCES = (3, 8)
CUTS = {"whole": (24,), "uniform": (8, 8, 8), "uneven": (11, 2, 7, 4), "one token each": (1,) * 24}
WINDOWS = {"only itself": 1, "below a token slice": 3, "a token slice": 8, "above one": 13, "all": 24, "none": None}


Starts = tuple[tuple[int, ...], ...]
"""Starts of the documents of each row."""


class Layer(nn.Module):
    """Attention with residual; token slice by token slice, or written out with autograd over the whole sequence."""

    def __init__(
        self,
        number: int,
        groups: int,
        window: int | None,
        softcap: float | None = None,
        dropout: float = 0.0,
        starts: Starts | None = None,
        *,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.number, self.groups, self.window, self.softcap = number, groups, window, softcap
        self.dropout, self.starts = dropout, starts
        self.product = nn.Linear(WIDTH, (HEADS + 2 * groups) * SIZE)
        self.out = nn.Linear(HEADS * SIZE, WIDTH)
        self.sinks = nn.Parameter(torch.randn(HEADS)) if sinks else None

    def forward(self, hidden: Tensor, past: Past | None) -> Tensor:
        heads = self.product(hidden).unflatten(-1, (-1, SIZE)).split([HEADS, self.groups, self.groups], dim=2)
        if past is None:
            attended = self.written_out(*heads)
        else:
            more = {"window": self.window, "softcap": self.softcap, "dropout": self.dropout}
            attended = past.attend(*heads, sinks=self.sinks, **more)
        return hidden + self.out(attended.flatten(2))

    def written_out(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (each.repeat_interleave(HEADS // self.groups, dim=2) for each in (key, value))
        scores = torch.einsum("bnhd,behd->bhne", query, key) * SIZE**-0.5
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        length = query.shape[1]
        seen = torch.ones(ROWS, 1, length, length, dtype=torch.bool).tril()
        if self.window is not None:
            seen = seen.triu(1 - self.window)
        for row, starts in enumerate(self.starts or ()):
            document = torch.bucketize(torch.arange(length), torch.tensor(starts), right=True)
            seen[row] &= document[:, None] == document
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks[:, None, None].expand(ROWS, -1, length, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        if self.dropout:
            rows = DropoutPlace.at(5, self.number, 0, SEQUENCES, 0).rows(length, query.device)
            kept = attention_keep_mask(rows, 0, HEADS, 0, length, self.dropout)
            weights = weights * kept / (1 - self.dropout)
        return torch.einsum("bhne,behd->bnhd", weights, value)


def worst_error(
    layers: list[Layer],
    cut: TokenSlices,
    starts: Starts | None = None,
    *,
    recompute: bool = False,
    ranks: SequenceParallelRanks | None = None,
    dtype: torch.dtype = torch.float64,
) -> float:
    """Largest relative error of outputs and gradients in token slices, compared with the whole sequence in fp64."""
    stack = nn.ModuleList(layers).double()
    hidden = torch.randn(ROWS, cut.seq_length, WIDTH, dtype=torch.double).requires_grad_()
    documents = None if starts is None else Documents(starts)
    state = SequenceState(cut, ranks=ranks, seed=5, sequences=SEQUENCES, documents=documents)

    def through(given: Tensor, token_slice: int | None) -> Tensor:
        for number, layer in enumerate(stack):
            past = None if token_slice is None else state.past(number, token_slice)
            given = checkpoint(layer, given, past, use_reentrant=False) if recompute else layer(given, past)
        return given

    leaves = [hidden, *stack.parameters()]
    expected = through(hidden, None)
    exact = [expected.detach(), *torch.autograd.grad(expected.sin().sum(), leaves)]
    stack.to(dtype)
    hidden = hidden.detach().to(dtype).requires_grad_()
    leaves = [hidden, *stack.parameters()]
    outputs = [through(hidden[:, start:end], number) for number, (start, end) in enumerate(state.parts.bounds())]
    for output in reversed(outputs):
        output.sin().sum().backward()
    whole = torch.zeros_like(exact[0])
    for output, (start, end) in zip(outputs, state.parts.bounds(), strict=True):
        whole[:, start:end] = output.detach()
    found = [whole, *(each.grad.double() for each in leaves)]
    for each in found if ranks is not None else ():
        dist.all_reduce(each, group=ranks.group)
    errors = [(one - other).norm() / other.norm().clamp_min(1e-300) for one, other in zip(found, exact, strict=True)]
    return float(torch.stack(errors).max())  # NaN if any is


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("lengths", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
def test_windows_sinks_and_soft_caps_at_every_cut(
    lengths: tuple[int, ...], window: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    for groups, softcap in ((1, None), (2, 0.5), (4, None)):
        # The gradient of a sink is a sum of both signs, which fp32 may round by more than its tolerance.
        layer = Layer(0, groups, window, softcap, sinks=groups != 1 and dtype is torch.float64)
        assert worst_error([layer], TokenSlices(lengths), dtype=dtype) <= tolerance


@st.composite
def setups(
    draw: st.DrawFn, *, fused: bool = False
) -> tuple[list[Layer], TokenSlices, tuple[tuple[int, ...], ...] | None]:
    """Two layers, a cut, and starts of documents; with `fused` kernels always documents, no soft cap and no dropout."""
    cut = draw(cuts(max_token_slices=5, max_length=6))
    starts = None
    if fused or draw(st.booleans()):
        begins = st.sets(st.integers(1, cut.seq_length - 1)) if cut.seq_length > 1 else st.just(set())
        starts = tuple((0, *sorted(draw(begins))) for _ in range(ROWS))
    kinds = st.tuples(
        st.sampled_from([1, 2, 4]),
        st.one_of(st.none(), st.integers(1, 14)),
        st.sampled_from([None] if fused else [None, 0.5]),
        st.sampled_from([0.0] if fused else [0.0, 0.3]),
    )
    layers = [Layer(number, *draw(kinds), starts, sinks=draw(st.booleans())) for number in range(2)]
    return layers, cut, starts


@settings(deadline=None, max_examples=60)
@given(setup=setups(), recompute=st.booleans(), seed=st.integers(0, 2**16))
def test_any_window_cut_document_dropout_sink_and_soft_cap(setup, recompute: bool, seed: int) -> None:
    torch.manual_seed(seed)
    assert worst_error(*setup, recompute=recompute) <= 1e-12


def test_soft_caps_are_written_out_and_windows_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[type] = []
    for kernel in (PiecewiseAttention, PlainAttention):
        original = kernel.forward
        monkeypatch.setattr(
            kernel, "forward", lambda self, *given, original=original: ran.append(type(self)) or original(self, *given)
        )
    heads = torch.randn(1, 6, 2, SIZE)
    state = SequenceState(TokenSlices((6,)))
    state.past(0, 0).attend(heads, heads, heads, window=2)
    state.past(1, 0).attend(heads, heads, heads, softcap=3.0)
    assert ran == [PiecewiseAttention, PlainAttention]


def tokens_kept(held: object) -> int:
    """Tokens whose keys a state keeps, or their gradients, by the bytes of all storages under it."""

    def tensors(value: object) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list | dict):
            for each in value.values() if isinstance(value, dict) else value:
                yield from tensors(each)
        elif hasattr(value, "__dict__"):
            yield from tensors(vars(value))

    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors(held)}
    each_token = 2 * 2 * SIZE * 4  # Keys and values of two heads, in fp32.
    assert sum(storages.values()) % each_token == 0
    return sum(storages.values()) // each_token


LENGTHS = (6, 10, 3, 5)


def attended(state: SequenceState, window: int | None) -> Iterator[Tensor]:
    """Outputs of the token slices of one layer."""
    for number, length in enumerate(state.token_slices.lengths):
        query, key, value = (torch.randn(1, length, heads, SIZE, requires_grad=True) for heads in (HEADS, 2, 2))
        yield state.past(0, number).attend(query, key, value, window=window)


def test_training_frees_keys_with_their_backward_and_keeps_only_gradients_in_reach() -> None:
    window = 4
    state = SequenceState(TokenSlices(LENGTHS))
    outputs = list(attended(state, window))
    keys = state.keys_and_values(0, window)
    kept = [(tokens_kept(keys.kept), tokens_kept(keys._pending))]
    for output in reversed(outputs):
        output.sum().backward()
        kept.append((tokens_kept(keys.kept), tokens_kept(keys._pending)))
    # Of the prefixes of 19, 16 and 6 tokens only the last three have pending gradients.
    assert kept == [(24, 0), (19, 3), (16, 3), (6, 3), (0, 0)]


def test_without_a_backward_keys_out_of_reach_are_freed() -> None:
    window = 4
    state = SequenceState(TokenSlices(LENGTHS), forward_only=True)
    kept = []
    with torch.no_grad():
        for _ in attended(state, window):
            kept.append(tokens_kept(state.keys_and_values(0, window)))
    assert kept == [6, 3 + 10, 3 + 3, 3 + 5]


def test_without_a_window_there_is_one_buffer_either_way() -> None:
    for forward_only in (False, True):
        state = SequenceState(TokenSlices(LENGTHS), forward_only=forward_only)
        with torch.no_grad():
            assert [tokens_kept(state.keys_and_values(0, None)) for _ in attended(state, None)] == [24] * 4


def test_forward_only_gives_the_outputs_of_training() -> None:
    query, key, value = (torch.randn(1, 24, heads, SIZE, dtype=torch.double) for heads in (HEADS, 2, 2))
    outputs = []
    for forward_only in (False, True):
        state = SequenceState(TokenSlices(LENGTHS), forward_only=forward_only)
        parts = [
            state.past(0, number).attend(*(each[:, start:end] for each in (query, key, value)), window=7)
            for number, (start, end) in enumerate(state.token_slices.bounds())
        ]
        outputs.append(torch.cat(parts, dim=1))
    assert torch.equal(*outputs)


def test_a_backward_of_a_sequence_that_runs_forward_only_is_refused() -> None:
    state = SequenceState(TokenSlices(LENGTHS), forward_only=True)
    with pytest.raises(AssertionError, match="forward only"):
        next(attended(state, 24 - 1)).sum().backward()


def test_a_layer_has_one_window() -> None:
    state = SequenceState(TokenSlices(LENGTHS))
    next(attended(state, 4))
    with pytest.raises(UserError, match="layer 0 attends with window=5, and before with window=4: give it one window"):
        next(attended(state, 5))
