"""Attention across token slices equals causal attention over the whole sequence, gradients included."""

import itertools
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.measuring.counters import LiveBytes
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention import token_slice_attention
from deepspeed_ext.runtime.attention.flash_kernels import kernel_for
from deepspeed_ext.runtime.state.sequence_state import Past, SequenceState

HIDDEN, HEAD_DIM = 24, 4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


class Layer(nn.Module):
    """Attention with residual, its heads in groups: H = 4 queries share G keys and values."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.qkv = nn.Linear(HIDDEN, (4 + 2 * groups) * HEAD_DIM)
        self.out = nn.Linear(4 * HEAD_DIM, HIDDEN)

    def forward(self, hidden: Tensor, past: Past | None) -> Tensor:
        heads = self.qkv(hidden).unflatten(-1, (-1, HEAD_DIM))
        query, key, value = heads.split([4, self.groups, self.groups], dim=2)
        if past is not None:
            return hidden + self.out(past.attend(query, key, value).flatten(2))
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        whole = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return hidden + self.out(whole.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """Three layers, token slice by token slice."""

    def __init__(self, groups: int = 2, *, dtype: torch.dtype = torch.float64, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(groups) for _ in range(3)).to(dtype)
        self.recompute = recompute

    def forward(self, hidden: Tensor, state: SequenceState | None = None, token_slice: int = 0) -> Tensor:
        for index, layer in enumerate(self.layers):
            past = state.past(index, token_slice) if state is not None else None
            if self.recompute:
                hidden = checkpoint(layer, hidden, past, use_reentrant=False)
            else:
                hidden = layer(hidden, past)
        return hidden


def sequence(length: int, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, HIDDEN, generator=generator).to(dtype).requires_grad_()


def forwards(stack: Stack, hidden: Tensor, cut: TokenSlices) -> Iterator[Tensor]:
    """Outputs of the token slices, first to last."""
    state = SequenceState(cut)
    for token_slice, (start, end) in enumerate(cut.bounds()):
        yield stack(hidden[:, start:end], state, token_slice)


def loss_of(output: Tensor) -> Tensor:
    """Not linear, so that every gradient depends on the outputs."""
    return output.sin().sum()


def sliced_gradients(stack: Stack, hidden: Tensor, cut: TokenSlices) -> tuple[Tensor, ...]:
    """Gradients of the input and of all weights, by one backward a token slice, last to first."""
    stack.zero_grad()
    hidden.grad = None
    for output in reversed(list(forwards(stack, hidden, cut))):
        loss_of(output).backward()
    return hidden.grad, *(parameter.grad.clone() for parameter in stack.parameters())


def whole_gradients(stack: Stack, hidden: Tensor) -> tuple[Tensor, ...]:
    """The same by torch's attention on the whole sequence, in fp64."""
    exact = Stack(stack.layers[0].groups)
    exact.load_state_dict(stack.state_dict())
    hidden = hidden.detach().double().requires_grad_()
    loss_of(exact(hidden)).backward()
    return hidden.grad, *(parameter.grad for parameter in exact.parameters())


def assert_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) <= tolerance


CUTS = {"whole": (24,), "uniform": (8, 8, 8), "uneven": (11, 2, 7, 4), "one token each": (1,) * 24}


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("lengths", CUTS.values(), ids=CUTS)
def test_gradients_equal_those_of_the_whole_sequence(
    lengths: tuple[int, ...], dtype: torch.dtype, groups: int, recompute: bool
) -> None:
    stack, hidden = Stack(groups, dtype=dtype, recompute=recompute), sequence(24, dtype=dtype)
    found = sliced_gradients(stack, hidden, TokenSlices(lengths))
    assert_equal(found, whole_gradients(stack, hidden), TOLERANCE[dtype])


def test_scale_of_the_scores_can_be_given() -> None:
    query, key, value = torch.randn(3, 1, 6, 2, 4, dtype=torch.float64)
    past = SequenceState(TokenSlices((6,))).past(0, 0)
    expected = F.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)), is_causal=True, scale=0.1
    ).transpose(1, 2)
    assert_equal((past.attend(query, key, value, scale=0.1),), (expected,), 1e-12)


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_two_micro_batches_interleave(recompute: bool) -> None:
    cut = TokenSlices((5, 1, 6))
    stack = Stack(recompute=recompute)
    sequences = [sequence(12, seed=seed) for seed in (0, 1)]
    expected = [whole_gradients(stack, hidden) for hidden in sequences]
    # As a stage in 1F1B: the forwards of one micro-batch run between the backwards of the other.
    first = list(forwards(stack, sequences[0], cut))
    second = forwards(stack, sequences[1], cut)
    live = []
    for output in reversed(first):
        live.append(next(second))
        loss_of(output).backward()
    for output in reversed(live):
        loss_of(output).backward()
    for hidden, gradients in zip(sequences, expected, strict=True):
        assert_equal((hidden.grad,), gradients[:1], 1e-12)
    both = tuple(sum(pair) for pair in zip(*(gradients[1:] for gradients in expected), strict=True))
    assert_equal(tuple(parameter.grad for parameter in stack.parameters()), both, 1e-12)


WRONG_ORDERS = [order for order in itertools.permutations(range(3)) if order != (2, 1, 0)]


@pytest.mark.parametrize("order", WRONG_ORDERS, ids=str)
def test_backward_in_another_order_is_refused(order: tuple[int, ...]) -> None:
    outputs = list(forwards(Stack(), sequence(12), TokenSlices((5, 1, 6))))
    with pytest.raises(AssertionError, match="last to first"):
        for token_slice in order:
            loss_of(outputs[token_slice]).backward()


def test_graph_keeps_no_keys_and_values() -> None:
    cut = TokenSlices((5, 1, 6))
    query, key, value = (torch.randn(2, 12, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    state = SequenceState(cut)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for token_slice, (start, end) in enumerate(cut.bounds()):
            past = state.past(0, token_slice)
            past.attend(*(tensor[:, start:end] for tensor in (query, key, value)))
    # Query, output and log-sum-exp of each token slice, and no more bytes than these have.
    assert len(saved) == 3 * len(cut)
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    element = query.element_size()
    assert sum(held.values()) == element * (2 * query.numel() + 2 * 4 * 12)
    buffers = {tensor.untyped_storage().data_ptr() for tensor in state.keys_and_values(0, None).read(5, 12)}
    assert not buffers & held.keys()
    assert not {tensor.untyped_storage().data_ptr() for tensor in (key, value)} & held.keys()


def kept_by(cut: TokenSlices, *heads: Tensor) -> list[Tensor]:
    """Tensors that the graph keeps of the attention of the first token slice."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        SequenceState(cut).past(0, 0).attend(*(each[:, : cut.lengths[0]] for each in heads))
    return saved


def storages(*tensors: Tensor) -> dict[int, int]:
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


def test_a_query_cut_from_a_fused_projection_does_not_keep_the_rest_alive() -> None:
    fused = torch.randn(1, 6, 8, 4, requires_grad=True)
    kept = kept_by(TokenSlices((4, 2)), *fused.split([4, 2, 2], dim=2))
    assert not storages(fused).keys() & storages(*kept).keys()


def test_a_sequence_in_one_piece_copies_nothing_of_a_fused_projection() -> None:
    fused = torch.randn(1, 6, 8, 4, requires_grad=True)
    output, log_sum_exp, *heads = kept_by(TokenSlices((6,)), *fused.split([4, 2, 2], dim=2))
    assert storages(*heads) == storages(fused)
    assert (output.shape, log_sum_exp.shape) == ((1, 6, 4, 4), (1, 4, 6))


def test_a_sequence_in_one_piece_keeps_only_tensors_that_attention_reads() -> None:
    # As after a norm of queries and keys: of the product only the values are read.
    product, query, key = (torch.randn(1, 6, heads, 4, requires_grad=True) for heads in (8, 4, 2))
    kept = kept_by(TokenSlices((6,)), query, key, product[:, :, 6:])
    assert not storages(product).keys() & storages(*kept).keys()
    assert sum(storages(*kept).values()) == 4 * (2 * query.numel() + 2 * key.numel() + 4 * 6)


def test_a_sequence_in_one_piece_is_not_kept_before_its_recomputation() -> None:
    state, alive = SequenceState(TokenSlices((6,))), list[weakref.ref[Tensor]]()

    def layer(hidden: Tensor) -> Tensor:
        heads = hidden * 2
        alive.append(weakref.ref(heads))
        return state.past(0, 0).attend(*heads.split([4, 2, 2], dim=2))

    output = checkpoint(layer, torch.randn(1, 6, 8, 4, requires_grad=True), use_reentrant=False)
    assert alive[0]() is None
    output.sum().backward()
    assert len(alive) == 2


def test_bf16_gradients_of_earlier_tokens_add_up_in_fp32() -> None:
    cut = TokenSlices((2,) * 12)
    past_gradients = []

    class Watched(token_slice_attention.KeysOfSequence):
        def accumulate(self, gradients, start):
            accumulated = super().accumulate(gradients, start)
            past_gradients.append([each for each in self._pending if each is not None])
            return accumulated

    state = Watched(24)
    hidden = torch.randn(3, 1, 24, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    outputs = []
    for start, end in cut.bounds():
        query, key, value = hidden[:, :, start:end]
        outputs.append(
            token_slice_attention.TokenSliceAttention.apply(query, key, value, state, start, 0.35, kernel_for(query))
        )
    for output in reversed(outputs):
        output.float().sum().backward()
    # Of the tokens before it, and no others: each backward frees those of its own token slice.
    sizes = [{each.untyped_storage().nbytes() for each in held} for held in past_gradients]
    assert sizes == [{tokens * 2 * 8 * 4} for tokens in range(22, 0, -2)] + [set()]
    assert {gradient.dtype for held in past_gradients for gradient in held} == {torch.float32}


@pytest.mark.parametrize(("dtype", "more"), [(torch.float32, 0), (torch.bfloat16, 2 * 2 * 8 * 4)])
def test_sums_take_memory_only_where_the_kernel_gives_another_type(dtype: torch.dtype, more: int) -> None:
    """More than before a backward: in bf16 the new sum of the keys, until the old one is freed."""
    state, heads = token_slice_attention.KeysOfSequence(6), torch.zeros(1, 6, 2, 8, dtype=dtype)
    for start in range(0, 6, 2):
        state.write(heads[:, :2], heads[:, :2], start)
    found = {start: [torch.ones(1, start, 2, 8, dtype=dtype) for _ in range(2)] for start in (4, 2, 0)}
    with LiveBytes() as live:
        for start, prefix in found.items():
            own = torch.ones(1, 2, 2, 8, dtype=dtype), torch.ones(1, 2, 2, 8, dtype=dtype)
            before, live.peak = live.now, live.now
            state.accumulate(token_slice_attention.Gradients(heads, own, tuple(prefix)), start)
            if start == 2:
                peak = live.peak - before
    assert peak == more
