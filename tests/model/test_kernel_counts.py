"""Kernels of a layer and token slice stay as few as they are."""

import pytest

from benchmarks.kernel_counts import LOSS_TOKENS, LOSS_WORDS, MODELS, SIZES, kernels, key_value_sums, loss_bytes
from benchmarks.measuring.counters import compiled_kernels
from megatron_terapipe.config import ModelConfig

MOST = {"Llama": (10, 19), "GPT, dropout of attention, too": (21, 40)}
"""Forward, and backward where gradients add up in fp32."""


@pytest.mark.parametrize("name", MOST)
def test_kernels_of_a_layer(name: str) -> None:
    forward, backward = kernels(ModelConfig(**SIZES, **MODELS[name]), compiled=True, apart=True)
    assert (forward.total() <= MOST[name][0], backward.total() <= MOST[name][1]) == (True, True), (forward, backward)


def test_gradients_of_keys_add_up_in_four_kernels_a_backward_however_many_token_slices_are_before_it() -> None:
    # Its own keys and values, and those before it; the last token slice has none to add, the first none before it.
    assert [key_value_sums(token_slices) for token_slices in (1, 2, 16)] == [0, 4, 60]


def test_the_loss_reads_logits_twice_and_writes_their_gradients_once() -> None:
    """And a soft cap is another read and write. It was 13 passes over logits in bf16."""
    assert sum(loss_bytes(logit_softcap=30.0)) == pytest.approx(5 * 2 * LOSS_TOKENS * LOSS_WORDS, rel=1e-3)


def test_the_counter_tells_one_kernel_from_two() -> None:
    import torch

    ones = torch.ones(8, 16)
    assert compiled_kernels(lambda each: (each * 2).exp() + 1, ones).count == 1
    assert compiled_kernels(lambda each: ((each * 2).sum(0), each.sum(1)), ones).count == 2
