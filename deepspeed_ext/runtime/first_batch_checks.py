"""Checks in the first batch: ranks that share sequences read the same data; layers compute the same in token slices.

DeepSpeed regards sequence-parallel ranks as replicas. A loader that shards by its data-parallel rank gives each of them
different sequences, and attention would join their parts to sequences that are not in the data.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.micro_batch import cut_along_sequence, map_tensors, tensors_in
from deepspeed_ext.runtime.state.counts import CountingLayer
from deepspeed_ext.runtime.state.sequence_state import SequenceState
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


def _warn(text: str) -> None:
    """Log a warning on the first rank that has it."""
    if not dist.is_initialized() or dist.distributed_c10d._get_default_store().add(f"warned: {text}", 1) == 1:
        logger.log(logging.WARNING, text)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__} ({str(error).partition(chr(10))[0]})"


def _digest(batch: Any) -> int:
    """Number of 63 bits, which differs if tensors of a micro-batch differ."""
    digest = blake2b(digest_size=8)
    for tensor in tensors_in(batch):
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()) >> 1


MOST_TOKENS = 1024
"""Tokens of each row on which layers are checked. A layer that looks back beyond half of them only is not found."""
MOST_TOKEN_SLICES = 4
"""Token slices in which layers are checked, at most."""
AGAIN_AFTER = 10
"""The batch of training in which layers are checked again."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Largest norm of the difference to norm of the output that may be rounding; a layer's rounding is 4 times smaller.

Layers of GPT-2 and Llama with random weights that attend within their token slice differ by 0.06 to 0.8."""

Run = Callable[[Any, SequenceState, int, Mapping[str, Any]], Any]
"""Runs a layer on one token slice: called with its input, the state, the number of the token slice, and entries."""


class StageLayer(NamedTuple):
    """A layer of a stage."""

    name: str
    run: Run
    modules: tuple[nn.Module, ...] = ()
    """The module and all modules in it; empty for a function."""


def check_layers(
    layers: Iterable[StageLayer],
    inputs: Any,
    entries: Mapping[str, Any],
    *,
    modules: nn.Module,
    seq_length: int,
    token_slices: TokenSlices,
    ranks: SequenceParallelRanks,
) -> bool:
    """Run layers on some tokens, whole and in a few token slices, without an effect on later batches.

    Where ranks share the token slice, each of them does so with its part. Then they run the layers together, and each
    runs them by itself on the tokens of all.

    Args:
        layers: layers of a stage, first to last.
        inputs: input of the first one, of one token slice: a tensor [B, N, ...], or a tuple of tensors.
        entries: entries of the same token slice, by name.
        seq_length: tokens of that token slice, N.
        token_slices: lengths of the run; the first ones give the proportions here.
        ranks: those that share the token slice, all of which call this together.

    Returns:
        Whether there were enough tokens.
    """
    num_tokens = min(seq_length, MOST_TOKENS)
    if num_tokens < 2:
        return False
    cuts = TokenSlices((num_tokens,)), _in_proportion(token_slices, num_tokens)

    def first(tensors: Any) -> Any:
        return cut_along_sequence(tensors, seq_length, 0, num_tokens)

    layers = list(layers)
    for layer in layers:
        _check_batch_norms(layer)
    # The runtime counts in training for some modules, and gives them what they have counted.
    training = {module for module in modules.modules() if module.training and not isinstance(module, CountingLayer)}
    with torch.no_grad(), _undisturbed(modules, inputs):
        hidden, entries = first(inputs), first(entries)
        for layer in layers:
            fault = of_ranks = None
            try:
                for module in layer.modules:
                    module.training = module in training
                # A layer that draws random numbers is compared without them.
                whole, again = (_run(layer, hidden, entries, cuts[0]) for _ in range(2))
                if _difference(whole, again, cuts[0]) is not None:
                    _warn(
                        f"{layer.name} draws random numbers that depend on ranks and token slices, as nn.Dropout and "
                        "F.dropout do: for the same ones in any layout call past.dropout"
                    )
                    for module in layer.modules:
                        module.training = False
                    whole = _run(layer, hidden, entries, cuts[0])
                parts = _run(layer, hidden, entries, cuts[1])
                # Weights that are 0 at the start, as in an output projection, would hide what is before.
                with _shaken(layer):
                    shaken_whole, shaken_parts = (_run(layer, hidden, entries, cut) for cut in cuts)
                    of_outputs = map_tensors(_random_like, shaken_whole[0])
                    gradients = [_gradients(layer, hidden, entries, cut, of_outputs) for cut in cuts]
            except UserError:
                raise
            except Exception as error:
                fault = _in_words(error)
            faults = [fault]
            if ranks.size > 1:  # Before they run it together: a rank that goes on alone would wait for the others.
                faults *= ranks.size
                dist.all_gather_object(faults, fault, group=ranks.group)
            if all(faults):
                # A layer may need all tokens of a token slice, or state of its own.
                _warn(
                    f"{layer.name} and those after it were not checked for token slices: on {num_tokens} tokens they "
                    f"raise {fault}"
                )
                return True
            for number, each in enumerate(faults):
                if each:
                    raise UserError(
                        f"{layer.name} raises {each} on one of the ranks that share every sequence, number {number} of "
                        f"{ranks.size}, and not on all: correct it, or let no ranks share a sequence"
                    )
            if ranks.size > 1:
                with _shaken(layer):
                    of_ranks = _difference_of_ranks(layer, hidden, entries, ranks)
            for what, pair in (
                ("results", (whole, parts)),
                ("results", (shaken_whole, shaken_parts)),
                ("gradients", gradients),
            ):
                if (difference := _difference(*pair, cuts[1])) is not None:
                    raise UserError(
                        f"{layer.name} gives other {what} in token slices than on the whole sequence (a relative "
                        f"difference of {difference:.1g}), as layers do that mix or count positions by themselves: "
                        "give it an argument `past`, and call past.attend(query, key, value), past.positions(N), or "
                        "past.carried and past.carry for a state"
                    )
            if of_ranks is not None:
                raise UserError(
                    f"{layer.name} gives other results on {ranks.size} sequence-parallel ranks than on one (a relative "
                    f"difference of {of_ranks:.1g}): give sums and states over tokens past.all_tokens(x) and "
                    "past.own_heads(weight), and return past.own_tokens(output)"
                )
            hidden = whole[0]
    return True


def _difference_of_ranks(
    layer: StageLayer, hidden: Any, entries: Mapping[str, Any], ranks: SequenceParallelRanks
) -> float | None:
    """Relative difference of a layer's outputs on these ranks and on one, as `_difference`; the same on each rank.

    Raises:
        UserError: if the layer raises an error here: the other ranks may wait for this one within the layer.
    """
    length = next(tensors_in(hidden)).shape[1]
    sequence = TokenSlices((length * ranks.size,))

    def of_all(leaf: Any) -> Any:
        is_part = torch.is_tensor(leaf) and leaf.shape[1:2] == (length,)
        return torch.cat(ranks.gather(leaf), dim=1) if is_part else leaf

    hidden_of_all, entries_of_all = map_tensors(of_all, hidden), map_tensors(of_all, entries)
    state = SequenceState(sequence, ranks=ranks, sequences=range(len(next(tensors_in(hidden)))))
    try:
        whole = _run(layer, hidden_of_all, entries_of_all, sequence)
        own = layer.run(map_tensors(torch.clone, hidden), state, 0, entries)
    except (UserError, dist.DistError):
        raise
    except Exception as error:
        if "gloo" in str(error):  # The connection to a rank is lost.
            raise
        raise UserError(
            f"{layer.name} raises {_in_words(error)} on {length} tokens of rank {dist.get_rank()}, one of {ranks.size} "
            "sequence-parallel ranks that run it together: correct it, or let no ranks share a sequence"
        ) from error
    parts = [*zip(*map(ranks.gather, tensors_in(own)), strict=True)]
    return _difference(whole, parts, TokenSlices((length,) * ranks.size))


def _in_proportion(token_slices: TokenSlices, num_tokens: int) -> TokenSlices:
    """Cut some tokens as the first token slices of a run; in two where a run has one, or one of them would be empty."""
    bounds = [0, *accumulate(token_slices.lengths[:MOST_TOKEN_SLICES])]
    lengths = [later - earlier for earlier, later in pairwise(num_tokens * bound // bounds[-1] for bound in bounds)]
    return TokenSlices(tuple(lengths)) if len(lengths) > 1 and all(lengths) else TokenSlices.uniform(num_tokens, 2)


@torch.enable_grad()
def _gradients(
    layer: StageLayer, hidden: Any, entries: Mapping[str, Any], cut: TokenSlices, of_outputs: Any
) -> list[tuple[torch.Tensor, ...]]:
    """Gradients of a layer's inputs for each token slice, given the gradients of its outputs for the whole sequence."""
    state = SequenceState(cut, sequences=range(len(next(tensors_in(hidden)))))
    inputs: list[Any] = []
    outputs: list[Any] = []
    found: list[tuple[torch.Tensor, ...]] = []

    def part(tensors: Any, bounds: tuple[int, int]) -> Any:
        return cut_along_sequence(tensors, cut.seq_length, *bounds)

    for index, bounds in enumerate(cut.bounds()):
        inputs.append(map_tensors(_leaf, part(hidden, bounds)))
        # Copies, because a layer may change its input in place.
        own = map_tensors(torch.clone, inputs[-1])
        outputs.append(layer.run(own, state, index, part(entries, bounds)))
    for index, bounds in reversed([*enumerate(cut.bounds())]):
        pairs = zip(tensors_in(outputs[index]), tensors_in(part(of_outputs, bounds)), strict=True)
        # Outputs without tokens, such as a mean of them, are not compared.
        length = bounds[1] - bounds[0]
        roots: list[Any] = [pair for pair in pairs if pair[0].requires_grad and pair[0].shape[1:2] == (length,)]
        roots += state.carried.roots(index)
        if roots:
            torch.autograd.backward(*zip(*roots, strict=True))
        found.append(tuple(each.grad for each in tensors_in(inputs[index]) if each.grad is not None))
    return found[::-1]


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _random_like(leaf: Any) -> Any:
    return torch.randn_like(leaf) if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf


def _run(layer: StageLayer, hidden: Any, entries: Mapping[str, Any], cut: TokenSlices) -> list[Any]:
    """Outputs of a layer for each token slice."""
    state = SequenceState(cut, sequences=range(len(next(tensors_in(hidden)))))

    def part(tensors: Any, bounds: tuple[int, int]) -> Any:
        return cut_along_sequence(tensors, cut.seq_length, *bounds)

    outputs = []
    for index, bounds in enumerate(cut.bounds()):
        inputs, before = (part(hidden, bounds), state, index, part(entries, bounds)), _tensors_of(layer)
        outputs.append(layer.run(*inputs))
        if index == 0 and len(cut) > 1:
            kept = {place: tensor for place, tensor in _tensors_of(layer).items() if tensor is not before.get(place)}
    if max(state.attended.values(), default=0) > 1:
        raise UserError(
            f"{layer.name} calls past.attend more than once, and keys of the second call replace the keys of "
            "the first: make it two layers"
        )
    if len(cut) > 1:
        _check_kept_tensors(layer, kept, inputs, outputs[-1])
    return outputs


def _tensors_of(layer: StageLayer) -> dict[tuple[nn.Module, str], torch.Tensor]:
    """Tensors that are attributes of modules, and neither parameters nor buffers."""
    return {
        (module, name): value
        for module in layer.modules
        for name, value in vars(module).items()
        if torch.is_tensor(value) and value.is_floating_point()
    }


def _check_kept_tensors(
    layer: StageLayer,
    kept: Mapping[tuple[nn.Module, str], torch.Tensor],
    inputs: tuple[Any, SequenceState, int, Any],
    output: Any,
) -> None:
    """Refuse a layer whose output changes with a tensor that its forward of the token slice before has set."""
    if not kept:
        return
    after = _tensors_of(layer)
    for (module, name), tensor in kept.items():
        setattr(module, name, torch.rand_like(tensor) + tensor)
    again = layer.run(*inputs)
    for (module, name), tensor in after.items():
        setattr(module, name, tensor)
    for expected, found in zip(tensors_in(output), tensors_in(again), strict=True):
        if expected.is_floating_point() and not torch.equal(expected, found):
            names = ", ".join(sorted({name for _, name in kept}))
            raise UserError(
                f"{layer.name} keeps a state in its attribute {names} from token slice to token slice, through which "
                "no gradient flows: leave it with past.carry(name, state), and read it with past.carried(name, initial)"
            )


def _check_batch_norms(layer: StageLayer) -> None:
    kinds = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
    if any(isinstance(module, kinds) and module.training for module in layer.modules):
        raise UserError(
            f"{layer.name} has a BatchNorm, whose mean is over a token slice and not over the sequence: use LayerNorm "
            "or RMSNorm"
        )


@contextmanager
def _shaken(layer: StageLayer) -> Iterator[None]:
    """Add random numbers to the weights of a layer, the same on each rank; afterwards they are as before."""
    weights = {id(weight): weight for module in layer.modules for weight in module.parameters(recurse=False)}.values()
    before = [weight.data.clone() for weight in weights]
    torch.manual_seed(0)
    try:
        for weight in weights:
            if weight.is_floating_point():
                size = 0.1 if weight.dim() < 2 else weight[0].numel() ** -0.5
                weight.data.add_(torch.randn_like(weight.data).mul_(size))
        yield
    finally:
        # Not counted as changes in place: graphs of other batches may have saved the weights.
        for weight, values in zip(weights, before, strict=True):
            weight.data.copy_(values)


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
    """Freeze modules in evaluation, and restore both, their buffers and the random generators."""
    trained = [weight for weight in modules.parameters() if weight.requires_grad]
    modes = [(module, module.training) for module in modules.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in modules.buffers()]
    device = next(tensors_in(inputs)).device
    forked = {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    with torch.random.fork_rng(**forked):
        modules.eval().requires_grad_(False)
        try:
            yield
        finally:
            for weight in trained:
                weight.requires_grad_()
            for module, training in modes:
                module.training = training
            for buffer, before in buffers:
                buffer.copy_(before)
