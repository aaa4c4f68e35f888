"""Checks in the first batch: ranks that share sequences read the same data; layers compute the same in token slices.

DeepSpeed regards sequence-parallel ranks as replicas. A loader that shards by its data-parallel rank gives each of them
different sequences, and attention would join their parts to sequences that are not in the data.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.sequence_state import SequenceState
from deepspeed_ext.runtime.micro_batch import cut_along_sequence, tensors_in
from deepspeed_ext.runtime.topology import SequenceParallelRanks


def check_same_data(ranks: SequenceParallelRanks, batch: Any) -> None:
    """Compare a micro-batch among ranks that share sequences. All of them must call this together."""
    digests = [digest.item() for digest in ranks.gather(torch.tensor(_digest(batch)))]
    if len(set(digests)) > 1:
        members = ", ".join(map(str, dist.get_process_group_ranks(ranks.group)))
        raise UserError(
            f"ranks {members} share every sequence and were given different micro-batches: distribute data to "
            "replicas, by engine.replica of engine.num_replicas, and not by DeepSpeed's data-parallel rank"
        )


def _digest(batch: Any) -> int:
    """Number of 63 bits, which differs if tensors of a micro-batch differ."""
    digest = blake2b(digest_size=8)
    for tensor in tensors_in(batch):
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()) >> 1


MOST_TOKENS = 64
"""Tokens of each row on which layers are checked; more would not find more."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Largest norm of the difference to norm of the output that may be rounding; that of a layer is 4 times smaller.

Layers of GPT-2 and Llama with random weights that attend within their token slice differ by 0.06 to 0.8."""

Run = Callable[[Any, SequenceState, int, Mapping[str, Any]], Any]
"""Runs a layer on one token slice: called with its input, the state, the number of the token slice, and entries."""


class StageLayer(NamedTuple):
    """A layer of a stage."""

    name: str
    run: Run


def check_layers(
    layers: Iterable[StageLayer], inputs: Any, entries: Mapping[str, Any], *, modules: nn.Module, seq_length: int
) -> bool:
    """Run layers on some tokens, whole and in two token slices, without an effect on later batches.

    Args:
        layers: layers of a stage, first to last.
        inputs: input of the first one, of one token slice: a tensor [B, N, ...], or a tuple of tensors.
        entries: entries of the same token slice, by name.

    Returns:
        Whether there were enough tokens.
    """
    num_tokens = min(seq_length, MOST_TOKENS)
    if num_tokens < 2:
        return False
    cuts = TokenSlices((num_tokens,)), TokenSlices.uniform(num_tokens, 2)

    def first(tensors: Any) -> Any:
        return cut_along_sequence(tensors, seq_length, 0, num_tokens)

    with torch.no_grad(), _undisturbed(modules, inputs):
        hidden, entries = first(inputs), first(entries)
        for layer in layers:
            try:
                whole, parts = (_run(layer, hidden, entries, cut) for cut in cuts)
            except UserError:
                raise
            except Exception as error:
                # A layer may need all tokens of a token slice, or state of its own.
                reason = str(error).partition("\n")[0]
                logger.log(
                    logging.WARNING,
                    f"{layer.name} and those after it were not checked for token slices: on {num_tokens} tokens they "
                    f"raise {type(error).__name__} ({reason})",
                )
                return True
            difference = _difference(whole, parts, cuts[1])
            if difference is not None:
                raise UserError(
                    f"{layer.name} gives other results in token slices than on the whole sequence (a relative "
                    f"difference of {difference:.1g}), as layers do that mix or count positions by themselves: give it "
                    "an argument `past`, and call past.attend(query, key, value) and past.positions(N); or turn "
                    "this check off with initialize(..., check_token_slices=False)"
                )
            hidden = whole[0]
    return True


def _run(layer: StageLayer, hidden: Any, entries: Mapping[str, Any], cut: TokenSlices) -> list[Any]:
    """Outputs of a layer for each token slice."""
    state = SequenceState(cut, sequences=range(len(next(tensors_in(hidden)))))

    def part(tensors: Any, bounds: tuple[int, int]) -> Any:
        return cut_along_sequence(tensors, cut.seq_length, *bounds)

    outputs = [
        layer.run(part(hidden, bounds), state, index, part(entries, bounds))
        for index, bounds in enumerate(cut.bounds())
    ]
    if max(state.attended.values(), default=0) > 1:
        raise UserError(
            f"{layer.name} calls past.attend more than once, and keys of the second call replace those of "
            "the first: make it two layers"
        )
    return outputs


def _difference(whole: list[Any], parts: list[Any], cut: TokenSlices) -> float | None:
    """Relative difference of the outputs, of their first tensor that differs; None if it may be rounding."""
    for expected, *found in zip(*(list(tensors_in(each)) for each in (whole[0], *parts)), strict=True):
        lengths = [tensor.shape[1] if tensor.dim() >= 2 else 0 for tensor in found]
        if lengths != list(cut.lengths) or not expected.is_floating_point():
            continue
        tolerance = TOLERANCES.get(expected.dtype, max(TOLERANCES.values()))
        joined, expected = torch.cat(found, dim=1).double(), expected.double()
        difference = float((joined - expected).norm() / expected.norm().clamp_min(1e-30))
        if difference > tolerance:
            return difference
    return None


@contextmanager
def _undisturbed(modules: nn.Module, inputs: Any) -> Iterator[None]:
    """Set modules to evaluation, and restore their modes, their buffers and the random generators."""
    modes = [(module, module.training) for module in modules.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in modules.buffers()]
    device = next(tensors_in(inputs)).device
    forked = {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    with torch.random.fork_rng(**forked):
        modules.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            for buffer, before in buffers:
                buffer.copy_(before)
