"""Weights and optimizer states of a rank by name: states with bad numbers, and copies that differ between ranks.

Replicas, tied stages, and tensor-parallel ranks hold copies, which are compared by hashes. Copies start equal and get
equal updates, so they stay equal to the bit. If they do not, memory or a link is broken, or ranks have computed
different values; training shows no sign of it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor, nn

from deepspeed_ext.runtime.topology import any_rank, is_of_experts

WEIGHT, MASTER = "weight", "fp32 weight"
"""Kinds of a state: the weight that layers use, and the one that DeepSpeed's optimizers step. Others are moments, such
as `exp_avg`."""


Named = TypeVar("Named")


class State(NamedTuple):
    """A tensor that outlives a step."""

    name: str
    parameter: nn.Parameter
    kind: str
    """`weight`, `fp32 weight`, or the name of a moment."""
    values: Tensor
    """[elements] or in the shape of the parameter; a view, not a copy."""

    def __str__(self) -> str:
        """Text for messages: `weight 2.mlp.up.weight`, `exp_avg of 2.mlp.up.weight`."""
        return f"{self.kind} {self.name}" if self.kind in (WEIGHT, MASTER) else f"{self.kind} of {self.name}"


def states_of(engine: Any) -> Iterator[State]:
    """The states of a rank, parameter by parameter, after all pending gathers."""
    engine.complete_weights()
    optimizer = engine.optimizer
    in_fragments = not isinstance(optimizer, torch.optim.Optimizer)
    for name, parameter in engine.module.named_parameters():
        yield State(name, parameter, WEIGHT, parameter.detach())
        kept = _fragments(optimizer, parameter) if in_fragments else _moments(optimizer.state.get(parameter, {}))
        for kind, values in kept:
            yield State(name, parameter, kind, values.detach())


def _moments(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of floating point in the state of an optimizer of torch, without the count of steps."""
    for key, value in state.items():
        if torch.is_tensor(value) and value.is_floating_point() and value.dim() > 0:
            yield key, value


def _fragments(optimizer: Any, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    """This rank's fragments of a parameter in DeepSpeed's flat groups."""
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return
    yield MASTER, mapping.hp_fragment
    inner, address = optimizer.optimizer, mapping.get_hp_fragment_address()
    flat = inner.param_groups[mapping.param_group_index]["params"][0]
    for key, value in _moments(inner.state.get(flat, {})):
        yield key, value.narrow(0, address.start, address.numel)


def bad_states(engine: Any) -> list[str]:
    """States of all ranks that have a NaN or an infinity, moments first; every rank must call this.

    One pass over the states without a copy; the host waits once.
    """
    mine = []
    for state in not_finite((state, state.values) for state in states_of(engine)):
        size = state.values.numel()
        count = int(size - torch.isfinite(state.values).sum())
        mine.append(f"{state} on rank {engine.global_rank} ({count} of {size} numbers)")
    # A bad moment spoils the weight that it steps. A bad weight does not spoil others: its gradient is not stepped on.
    return sorted(_of_all_ranks(mine), key=lambda text: text.startswith((WEIGHT, MASTER)))


def _of_all_ranks(mine: list[str]) -> list[str]:
    """Texts of all ranks, each once."""
    if not any_rank(bool(mine)):
        return []
    gathered: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return list(dict.fromkeys(text for of_rank in gathered for text in of_rank))


def not_finite(named: Iterable[tuple[Named, Tensor]]) -> list[Named]:
    """The names of tensors that have a NaN or an infinity; the host waits once for each type."""
    by_dtype: dict[torch.dtype, list[tuple[Named, Tensor]]] = defaultdict(list)
    for name, values in named:
        if values.numel():
            by_dtype[values.dtype].append((name, values))
    found = []
    for of_one_dtype in by_dtype.values():
        names, tensors = zip(*of_one_dtype, strict=True)
        finite = are_finite(list(tensors)).tolist()
        found += [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]
    return found


def are_finite(tensors: list[Tensor]) -> Tensor:
    """Whether each tensor has only finite numbers: [tensors], on their device.

    Args:
        tensors: of one dtype, none of them empty.
    """
    # The largest magnitude is never rounded, so a large number is not taken for an infinity.
    return torch.stack(torch._foreach_norm(tensors, float("inf"))).isfinite()


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Words by bytes of an element. They are far smaller than the modulus, which keeps their highest bits apart."""

_PIECE = 1 << 20
"""Words that are hashed at a time, so that the copy of them in 64 bits stays small."""

_GOLDEN = -7046029254386353131
"""2^64 over the golden ratio, as a signed number: multiples of it are spread evenly over all 64 bits."""


def hashes(tensors: Sequence[Tensor]) -> Tensor:
    """Hash of the bits of each tensor: [tensors], on their device.

    The words of the tensor are multiplied by odd numbers and added up modulo 2^64, as in the multilinear
    hashing of Dietzfelbinger (STACS 1996). A product with an odd number is 0 only if the other factor is: two tensors
    that differ in one word always have two hashes.
    """
    device = tensors[0].device
    longest = max(each.nbytes // min(each.element_size(), 4) for each in tensors)
    factors = torch.arange(min(_PIECE, longest), dtype=torch.int64, device=device)
    factors.mul_(_GOLDEN).bitwise_or_(1)
    return torch.stack([_hash(each, factors) for each in tensors])


def _hash(tensor: Tensor, factors: Tensor) -> Tensor:
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in words.split(_PIECE):
        total = total * (_GOLDEN | 1) + (piece * factors[: piece.numel()]).sum()
    return total


REPLICAS, TENSOR_PARALLEL, TIED = "replicas", "tensor-parallel ranks", "tied stages"
REPLICAS_AND_SEQUENCE = "replicas and sequence-parallel ranks"
EXPERTS = "ranks with the same experts"
"""Kinds of ranks that hold copies."""


class _Copies(NamedTuple):
    """States of which all ranks of a group hold copies, in one order."""

    among: str
    group: dist.ProcessGroup
    states: list[State]


def differences(engine: Any) -> list[str]:
    """Copies that differ, the same list on every rank; every rank must call this."""
    found: list[str] = []
    for copies in _all_copies(engine):
        own = hashes([state.values for state in copies.states])
        ranks = dist.get_process_group_ranks(copies.group)
        gathered = [torch.empty_like(own) for _ in ranks]
        dist.all_gather(gathered, own, group=copies.group)
        by_rank = torch.stack(gathered).tolist()
        for number, state in enumerate(copies.states):
            difference = compared(str(state), copies.among, ranks, [each[number] for each in by_rank])
            found += [] if difference is None else [difference]
    return _of_all_ranks(found)


def compared(state: str, among: str, ranks: Sequence[int], hashed: Sequence[int]) -> str | None:
    """The ranks with other copies of a state than most; all ranks without a majority; None if copies are equal."""
    (usual, count), *others = Counter(hashed).most_common()
    if not others:
        return None
    majority = 2 * count > len(ranks)
    odd = [rank for rank, each in zip(ranks, hashed, strict=True) if not majority or each != usual]
    usual_ranks = [rank for rank in ranks if rank not in odd]
    from_others = f" from that on {_listed(usual_ranks)}" if usual_ranks else ""
    return f"{state} on {_listed(odd)} differs{from_others} ({among})"


def _all_copies(engine: Any) -> Iterator[_Copies]:
    """States of which this rank has copies, by group, in an order in which no two ranks wait for each other."""
    states = list(states_of(engine))
    weights = [state for state in states if state.kind == WEIGHT]
    whole = isinstance(engine.optimizer, torch.optim.Optimizer)
    grid = engine.grid
    shared = [state for state in states if is_of_experts(state.parameter)]
    if shared and dist.get_world_size(experts := engine.module.expert_ranks.copies) > 1:
        yield _Copies(EXPERTS, experts, [state for state in shared if whole or state.kind == WEIGHT])
    states, weights = ([state for state in each if not is_of_experts(state.parameter)] for each in (states, weights))
    if grid.get_data_parallel_world_size() > 1:
        # DeepSpeed's optimizers distribute their states over the replicas.
        among = REPLICAS if engine.module.sequence_ranks.size == 1 else REPLICAS_AND_SEQUENCE
        yield _Copies(among, grid.get_data_parallel_group(), states if whole else weights)
    if grid.get_slice_parallel_world_size() > 1:
        # Those ranks distribute their parts in the same way.
        uncut = [state for state in states if not is_model_parallel_parameter(state.parameter)]
        if uncut:
            yield _Copies(TENSOR_PARALLEL, grid.get_slice_parallel_group(), uncut)
    tied: dict[tuple[int, ...], tuple[dist.ProcessGroup, list[State]]] = {}
    for weight, group in engine.module.get_tied_weights_and_groups():
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1:
            held = [state for state in (states if whole else weights) if state.parameter is weight]
            tied.setdefault(ranks, (group, []))[1].extend(held)
    for ranks in sorted(tied):
        yield _Copies(TIED, *tied[ranks])


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


_NAMED = 3
"""States that a message names; more are counted."""


def described(found: Sequence[str], separator: str = ", ") -> str:
    """Bad states or differences for a message: the first few, and the number of others."""
    more = [f"and {len(found) - _NAMED} more"] if len(found) > _NAMED else []
    return separator.join([*found[:_NAMED], *more])
