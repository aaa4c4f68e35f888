"""Attention across token slices: the order of its backwards, and the tensors that it keeps."""

import itertools
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.measuring.counters import LiveBytes
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention import token_slice_attention
from deepspeed_ext.runtime.attention.flash_kernels import kernel_for
from deepspeed_ext.runtime.state.sequence_state import SequenceState

WRONG_ORDERS = [order for order in itertools.permutations(range(3)) if order != (2, 1, 0)]


@pytest.mark.parametrize("order", WRONG_ORDERS, ids=str)
def test_backward_in_another_order_is_refused(order: tuple[int, ...]) -> None:
    state, heads = SequenceState(TokenSlices((5, 1, 6))), torch.randn(2, 12, 4, 4, requires_grad=True)
    parts = enumerate(heads.split([5, 1, 6], dim=1))
    outputs = [state.past(0, token_slice).attend(part, part, part) for token_slice, part in parts]
    with pytest.raises(AssertionError, match="last to first"):
        for token_slice in order:
            outputs[token_slice].sum().backward()


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
        state.write((heads[:, :2], heads[:, :2]), start)
    found = {start: [torch.ones(1, start, 2, 8, dtype=dtype) for _ in range(2)] for start in (4, 2, 0)}
    with LiveBytes() as live:
        for start, prefix in found.items():
            own = torch.ones(1, 2, 2, 8, dtype=dtype), torch.ones(1, 2, 2, 8, dtype=dtype)
            before, live.peak = live.now, live.now
            state.accumulate(token_slice_attention.Gradients(heads, own, tuple(prefix)), start)
            if start == 2:
                peak = live.peak - before
    assert peak == more
