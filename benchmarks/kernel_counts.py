"""Kernels and operators that a step launches.

Kernels of a transformer layer and token slice, forward and backward: those that a device would launch.

    python -m benchmarks.kernel_counts [--eager]

Counted is one token slice in the middle of a sequence, weights with gradients of earlier ones to add to, in bf16 with
the attention kernel for CUDA: operators that compute, without views and allocations. The layer runs on the meta device,
which needs no GPU. Where a pointwise function is compiled, its kernels are the loops that torch's compiler leaves after
fusion, which it does for CPUs and GPUs alike; with `--eager` its operators are counted.

The last column is for gradients that add up in fp32: of norms and biases they are then left as they are, and added for
all layers of a stage in one call, which no layer is charged for.

Kernels and memory traffic of each operator of a model, as `search.software.description` counts them.

    python -m benchmarks.kernel_counts operators

Kernels that a GPU would launch, in bf16 without dropout, gradients added up in fp32: the modules of the
trainer run on the meta device, and `counters` watches them. Of attention it is a token slice in the
middle of a sequence, four query heads to a key head. The cost of an operator without a module of its own (biases,
rotations, norms of queries and keys) is the cost of a module with it, less the cost without it.

Memory traffic of the loss of one token slice, in bf16 without its matrix products.

    python -m benchmarks.kernel_counts loss

Time of the host for a layer and token slice: Python, autograd, guards of compiled functions and torch's dispatcher.

    python -m benchmarks.kernel_counts host

Layers run on the CPU with two tokens to a token slice, so that kernels take next to no time, and without attention's
kernel. A launch on a device takes more than the call of a small CPU kernel: some 2 to 4 us each, to be added.
"""

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.measuring.command import run_named
from benchmarks.measuring.counters import PRODUCTS, KernelCounter, counting
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.pointwise import VARIABLE
from deepspeed_ext.runtime.attention import head_exchange
from deepspeed_ext.runtime.attention.flash_kernels import CudaFlash
from deepspeed_ext.runtime.attention.kernels import Attended, Gradients
from deepspeed_ext.runtime.attention.token_slice_attention import KeysOfSequence
from deepspeed_ext.runtime.gradients import weight_gradients
from deepspeed_ext.runtime.gradients.weight_gradients import AccumulatedGradient, set_sum
from deepspeed_ext.runtime.state import sequence_state
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from deepspeed_ext.runtime.topology import SequenceParallelRanks
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.attention import SelfAttention
from megatron_terapipe.model.block import DropoutSite, TransformerBlock, residual_dropout
from megatron_terapipe.model.embedding import WordEmbedding, tied_logits
from megatron_terapipe.model.gpt import gpt_loss
from megatron_terapipe.model.mlp import Activation
from megatron_terapipe.model.norm import NORMS, Sum
from megatron_terapipe.model.tensor_parallel import ColumnParallelLinear, TensorParallelRanks

SIZES = {"num_layers": 1, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 256}
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "disable_bias_linear": True,
    "num_key_value_heads": 2,
    "ffn_hidden_size": 192,
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "GPT": {},
    "Llama": LLAMA,
    "GPT, dropout of hidden states": {"hidden_dropout": 0.1},
    "GPT, dropout of attention, too": DROPOUT,
}


def kernels(model: ModelConfig, *, compiled: bool, apart: bool = False) -> tuple[Counter[str], Counter[str]]:
    """Kernels of one layer and token slice, forward and backward, by name."""
    length, device = model.seq_length // 4, torch.device("meta")
    with device:
        layer = TransformerBlock(model, model.blocks[0], TensorParallelRanks()).to(torch.bfloat16)
    state = SequenceState(TokenSlices((length,) * 4), sequences=range(2))
    outputs, forwards, backwards = [], [], []
    with patch.object(sequence_state, "kernel_for", lambda *_, **more: CudaFlash()):
        for token_slice in range(4):
            hidden = torch.zeros(2, length, model.hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
            with counting(compiled=compiled and token_slice == 2) as counter:
                outputs.append(layer(hidden, state.past(0, token_slice)))
            forwards.append(counter.found)
        for token_slice, output in reversed(list(enumerate(outputs))):
            gradient = torch.zeros_like(output)
            for parameter in layer.parameters():
                if apart and parameter.dim() == 1:
                    parameter.grad = None
            with counting(compiled=compiled and token_slice == 2) as counter:
                torch.autograd.backward(output, gradient)
            backwards.insert(0, counter.found)
    return forwards[2], backwards[2]


def count_kernels(argv: Sequence[str] | None = None) -> None:
    """Print the table, and the parts of each number."""
    parser = argparse.ArgumentParser(description="Kernels of a layer and token slice.")
    parser.add_argument("--eager", action="store_true", help="count pointwise functions by their operators")
    compiled = not parser.parse_args(argv).eager
    print("| layer | forward | backward | backward, sums in fp32 |\n|---|---|---|---|")
    details = []
    for name, parts in MODELS.items():
        model = ModelConfig(**SIZES, **parts)
        found = kernels(model, compiled=compiled)
        _, apart = kernels(model, compiled=compiled, apart=True)
        print(f"| {name} | {found[0].total()} | {found[1].total()} | {apart.total()} |")
        details += [f"{name}, {way}: {dict(each)}" for way, each in zip(("forward", "backward"), found, strict=True)]
    print(*("", *details), sep="\n")
    for token_slices in (16, 512):
        print(
            f"sums of keys' and values' gradients, {token_slices} token slices: {key_value_sums(token_slices)} a layer"
        )


def key_value_sums(token_slices: int) -> int:
    """Kernels that add up the gradients of keys and values of a layer and sequence."""
    state = KeysOfSequence(token_slices)
    heads = torch.empty(1, token_slices, 2, 8, device="meta", dtype=PRECISION)
    for start in range(token_slices):
        state.write((heads[:, :1], heads[:, :1]), start)
    with counting(compiled=False) as counter:
        for start in reversed(range(token_slices)):
            state.accumulate(Gradients.cut(*(heads[:, :end].clone() for end in (1, start + 1, start + 1))), start)
    return counter.found.total() - counter.found["clone"]


ROWS, TOKENS, HIDDEN, WORDS = 2, 256, 1024, 4000
OPERATOR_SIZES: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": HIDDEN,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "seq_length": 4 * TOKENS,
    "vocab_size": WORDS,
}
PRECISION = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Counted:
    """Kernels and numbers, of one direction."""

    kernels: float
    """Without products and attention."""
    numbers: float
    """Of the precision that layers compute in, read and written."""
    other_bytes: float
    """Bytes of numbers of other types."""
    products: float = 0.0
    """Kernels of products and attention."""

    @classmethod
    def of(cls, counter: KernelCounter) -> "Counted":
        """The count of a counter."""
        products = sum(counter.found[each] for each in PRODUCTS)
        others = sum(count * dtype.itemsize for dtype, count in counter.moved.items() if dtype is not PRECISION)
        return cls(sum(counter.found.values()) - products, counter.moved[PRECISION], others, products)

    def __sub__(self, other: "Counted") -> "Counted":
        """The difference from another count."""
        pairs = zip(self._values, other._values, strict=True)
        return Counted(*(mine - its for mine, its in pairs))

    def per(self, outputs: float) -> "Counted":
        """Traffic for each number that is put out."""
        return Counted(self.kernels, self.numbers / outputs, self.other_bytes / outputs, self.products)

    @property
    def _values(self) -> tuple[float, float, float, float]:
        return self.kernels, self.numbers, self.other_bytes, self.products


Both = tuple[Counted, Counted]
"""Forward and backward."""


def operators() -> dict[str, Both]:
    """Each operator by its name in `Operators`, for each number that it is counted for."""
    model, ranks = ModelConfig(**OPERATOR_SIZES), TensorParallelRanks()
    states = ROWS * TOKENS * HIDDEN
    plain, rotated, normed = (
        _attention(_model(**more)) for more in ({}, {"position_embedding_type": "rope"}, {"qk_norm": "head"})
    )
    of_queries, of_keys = _channels(model)
    rotary, norms = (_less(each[0], plain[0]) for each in (rotated, normed))
    # Two norms are counted, of queries and of keys.
    head_norm = tuple(Counted(each.kernels / 2, each.numbers, each.other_bytes) for each in norms)
    forward, backward = plain[0]
    return {
        "layernorm": _per(states, _norm_of_sum("layernorm")[0]),
        "rmsnorm": _per(states, _norm_of_sum("rmsnorm")[0]),
        "residual": _per(states, _residual(ranks)),
        "activation": _per(states, _module(Activation, _model(activation="gelu"))),
        "gated_activation": _per(states, _module(Activation, _model(activation="swiglu"), width=2 * HIDDEN)),
        "bias": _per(states, _less(_linear(ranks, bias=True), _linear(ranks, bias=False))),
        "rotary": _per(of_queries + of_keys, rotary),
        "head_norm": _per(of_queries + of_keys, head_norm),
        "heads": _per(2 * (of_queries + of_keys), (forward, backward - _of_prefix(plain))),
        "exchange": _per(2 * (of_queries + of_keys), _exchanges(model)),
        "loss": _loss(model, ranks),
        "embedding": _per(states, _embedding(model, ranks)),
    }


def prefix() -> Counted:
    """Gradients that the backward of a token slice adds up for each key or value channel before it."""
    model = _model()
    return _of_prefix(_attention(model)).per(2 * _channels(model)[1])


def product() -> Both:
    """A matrix product."""
    return _linear(TensorParallelRanks(), bias=False)


def _model(**more: Any) -> ModelConfig:
    return ModelConfig(**OPERATOR_SIZES, normalization="rmsnorm", disable_bias_linear=True, **more)


def _channels(model: ModelConfig) -> tuple[int, int]:
    """Channels of the queries, and of the keys, of a token slice."""
    tokens = ROWS * TOKENS * model.kv_channels
    return tokens * model.num_attention_heads, tokens * model.blocks[0].num_key_value_heads


def _per(outputs: int, both: Both) -> Both:
    return both[0].per(outputs), both[1].per(outputs)


def _less(more: Both, less: Both) -> Both:
    return more[0] - less[0], more[1] - less[1]


def _of_prefix(attention: tuple[Both, Both]) -> Counted:
    """Cost in the backward of tokens before the token slice."""
    (_, second), (_, first) = attention
    return second - first


def _on_meta(kind: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """A module whose matrices have sums of their gradients in fp32, as `BF16_Optimizer` keeps them."""
    with torch.device("meta"):
        module = kind(*arguments, **more).to(PRECISION)
    with patch.object(weight_gradients, "_adds_products", lambda *_: True):
        for weight in module.parameters():
            if weight.dim() > 1:
                total = torch.empty(weight.shape, dtype=torch.float32, device="meta")
                set_sum(weight, AccumulatedGradient(total, PRECISION))
    return module


def _numbers(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=PRECISION, requires_grad=True)


def _both(function: Callable[..., Any], *arguments: Any) -> Both:
    """Count a function, forward and backward."""
    with counting(compiled=True) as forward:
        output = function(*arguments)
    return Counted.of(forward), _backward(output)


def _backward(output: Tensor | tuple[Tensor, ...]) -> Counted:
    outputs = (output,) if isinstance(output, Tensor) else output
    # Of a loss the gradient is one number.
    gradients = [torch.empty_like(each) if each.dim() else torch.ones((), device="meta") for each in outputs]
    with counting(compiled=True) as counter:
        torch.autograd.backward(outputs, gradients)
    return Counted.of(counter)


def _module(kind: Callable[..., nn.Module], *arguments: Any, width: int = HIDDEN, **more: Any) -> Both:
    return _both(_on_meta(kind, *arguments, **more), _numbers(ROWS, TOKENS, width))


def _linear(ranks: TensorParallelRanks, *, bias: bool) -> Both:
    return _module(ColumnParallelLinear, HIDDEN, HIDDEN, ranks, lambda *_: None, bias=bias)


def _norm_of_sum(name: str) -> tuple[Both, Both]:
    """A norm whose input is the residual, too; and more than that, the sum that is its input."""

    def count(added: Tensor | None) -> Both:
        norm = _on_meta(NORMS[name], _model(), TensorParallelRanks())
        return _both(lambda hidden: norm(Sum(hidden, added, 1.0)), _numbers(ROWS, TOKENS, HIDDEN))

    known = count(None)
    return known, _less(count(_numbers(ROWS, TOKENS, HIDDEN).detach()), known)


def _residual(ranks: TensorParallelRanks) -> Both:
    """The mean of the sums of a layer: one in the pass of the norm after it, and one apart."""
    past = SequenceState(TokenSlices((TOKENS,))).past(0, 0)

    hidden = _numbers(ROWS, TOKENS, HIDDEN)
    with counting(compiled=True) as counter:
        residual_dropout(hidden, 0.0, DropoutSite.MLP, past, ranks, hidden)
    (within, backward), apart = _norm_of_sum("rmsnorm")[1], Counted.of(counter)
    # Its backward hands on the gradient as it is.
    forward = Counted(*((one + other) / 2 for one, other in zip(apart._values, within._values, strict=True)))
    return forward, backward


def _attention(model: ModelConfig) -> tuple[Both, Both]:
    """Attention of the second and of the first of four token slices, with its products."""
    layer = _on_meta(SelfAttention, model, model.blocks[0], TensorParallelRanks())
    state = SequenceState(TokenSlices((TOKENS,) * 4), sequences=range(ROWS))
    outputs, forwards, backwards = [], [], []
    with patch.object(sequence_state, "kernel_for", lambda *_, **more: CudaFlash()):
        for token_slice in range(4):
            with counting(compiled=token_slice in (0, 1)) as counter:
                outputs.append(layer(_numbers(ROWS, TOKENS, HIDDEN), state.past(0, token_slice)))
            forwards.append(Counted.of(counter))
        for output in reversed(outputs):
            for parameter in layer.parameters():
                parameter.grad = None
            backwards.insert(0, _backward(output))
    return (forwards[1], backwards[1]), (forwards[0], backwards[0])


def _exchanges(model: ModelConfig) -> Both:
    """The mean of the two head exchanges of one of two sequence-parallel ranks, without the messages themselves."""
    ranks, heads, of_keys = (
        SequenceParallelRanks(size=2),
        model.num_attention_heads,
        model.blocks[0].num_key_value_heads,
    )
    parts = [_numbers(ROWS, TOKENS, count, model.kv_channels) for count in (heads, of_keys, of_keys)]
    with patch.object(head_exchange.dist, "all_to_all_single"), counting(compiled=True) as forward:
        there = head_exchange.to_all_tokens(ranks, *parts)
        back = head_exchange.to_all_heads(ranks, _numbers(ROWS, 2 * TOKENS, heads // 2, model.kv_channels))
    outputs = (*there, back)
    with patch.object(head_exchange.dist, "all_to_all_single"), counting(compiled=True) as backward:
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    first, second = (
        Counted(each.kernels / 2, each.numbers, each.other_bytes)
        for each in (Counted.of(forward), Counted.of(backward))
    )
    return first, second


def _loss(model: ModelConfig, ranks: TensorParallelRanks) -> Both:
    """The loss of a vocabulary with padding."""
    embedding = _on_meta(WordEmbedding, model, ranks)
    return _per(ROWS * TOKENS * len(embedding.weight), _loss_of(embedding, ROWS, TOKENS))


def _loss_of(embedding: WordEmbedding, rows: int, tokens: int) -> Both:
    targets = torch.empty(rows, tokens, dtype=torch.int64, device="meta")
    mask = torch.empty(rows, tokens, device="meta")

    def loss(hidden: Tensor) -> Tensor:
        return gpt_loss(tied_logits(embedding, hidden), (targets, mask))

    return _both(loss, _numbers(rows, tokens, embedding.weight.shape[1]))


LOSS_TOKENS, LOSS_WORDS = 2048, 128_256
"""Of the case whose traffic is recorded: the vocabulary of Llama 3."""


def loss_bytes(**more: Any) -> tuple[float, float]:
    """Bytes that the loss of a token slice moves, forward and backward, with other settings of the model."""
    model = ModelConfig(
        num_layers=1,
        hidden_size=64,  # moved by products only
        num_attention_heads=1,
        seq_length=LOSS_TOKENS,
        vocab_size=LOSS_WORDS,
        **more,
    )
    forward, backward = (
        PRECISION.itemsize * each.numbers + each.other_bytes
        for each in _loss_of(_on_meta(WordEmbedding, model, TensorParallelRanks()), 1, LOSS_TOKENS)
    )
    return forward, backward


def _embedding(model: ModelConfig, ranks: TensorParallelRanks) -> Both:
    tokens = torch.empty(ROWS, TOKENS, dtype=torch.int64, device="meta")
    return _both(_on_meta(WordEmbedding, model, ranks), tokens)


def count_operators(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args(argv)
    print("| operator | numbers forward | bytes | kernels | backward | bytes | kernels |")
    print("|---|---|---|---|---|---|---|")
    found: dict[str, Iterable[Counted]] = {**operators(), "product": product(), "prefix": (Counted(0, 0, 0), prefix())}
    for name, both in found.items():
        cells = (f"{each.numbers:.2f} | {each.other_bytes:.2f} | {each.kernels:g}" for each in both)
        print(f"| {name} | {' | '.join(cells)} |")


def count_loss(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(description="Memory traffic of the loss.").parse_args(argv)
    print(f"| {LOSS_TOKENS:,} tokens, {LOSS_WORDS:,} words | forward, GB | backward, GB |\n|---|---|---|")
    for name, more in {"loss": {}, "loss, soft cap": {"logit_softcap": 30.0}}.items():
        print(f"| {name} | {' | '.join(f'{each / 1e9:.2f}' for each in loss_bytes(**more))} |")


class _NoAttention:
    """Attention without its computation."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        return Attended(torch.empty_like(query), query.new_empty(query.shape[0], query.shape[2], query.shape[1]))

    def backward(self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Gradients:
        return Gradients.cut(*(each.new_empty(each.shape) for each in (query, key, value)))


def host_times(model: ModelConfig, rounds: int) -> tuple[float, float]:
    """Least seconds of the host for one layer and token slice in the middle of a sequence, forward and backward."""
    length = model.seq_length // 4
    layers = [TransformerBlock(model, block, TensorParallelRanks()) for block in model.blocks]
    for weight in (weight for layer in layers for weight in layer.parameters()):
        set_sum(weight, AccumulatedGradient(torch.zeros_like(weight), weight.dtype))
    found = []
    with patch.object(sequence_state, "kernel_for", lambda *_, **more: _NoAttention()):
        for _ in range(rounds + 2):
            state, outputs, times = SequenceState(TokenSlices((length,) * 4)), [], []
            for token_slice in range(4):
                hidden = torch.zeros(1, length, model.hidden_size, requires_grad=True)
                start = time.perf_counter()
                for number, layer in enumerate(layers):
                    hidden = layer(hidden, state.past(number, token_slice))
                times.append((time.perf_counter() - start) / len(layers))
                outputs.append(hidden)
            for output in reversed(outputs):
                gradient = torch.zeros_like(output)
                start = time.perf_counter()
                torch.autograd.backward(output, gradient)
                times.append((time.perf_counter() - start) / len(layers))
                for layer in layers:
                    layer.zero_grad()
            found.append((times[2], times[5]))
    forward, backward = (min(each) for each in zip(*found[2:], strict=True))
    return forward, backward


def time_host(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time of the host for a layer and token slice.")
    parser.add_argument("--rounds", type=int, default=50, help="of which the fastest is taken")
    rounds = parser.parse_args(argv).rounds
    torch.set_num_threads(1)
    print("| layer | pointwise functions | forward, ms | backward, ms |\n|---|---|---|---|")
    for name, parts in list(MODELS.items())[:2]:
        sizes = {**SIZES, **parts, "num_layers": 8, "hidden_size": 32, "seq_length": 8, "ffn_hidden_size": 48}
        for choice, words in (("never", "as written"), ("always", "compiled")):
            with patch.dict(os.environ, {VARIABLE: choice}):
                cells = (f"{1e3 * each:.2f}" for each in host_times(ModelConfig(**sizes), rounds))
                print(f"| {name} | {words} | {' | '.join(cells)} |", flush=True)


def main(argv: Sequence[str] | None = None) -> object:
    """Run the named measurement, by default the first."""
    commands = {"kernels": count_kernels, "operators": count_operators, "loss": count_loss, "host": time_host}
    return run_named(commands, argv)


if __name__ == "__main__":
    main()
