"""Weights of which several pipeline ranks have copies: equal at the start, with the sum of all their gradients.

    shared = model.share((0, 3))                  # on every rank, after the model is built
    if model.layer(0) is not None:                # an embedding, on pipeline rank 0
        shared.register_module(model.layer(0).words)
    if model.layer(25) is not None:               # a head of another class, on pipeline rank 3
        shared.register_module(model.layer(25).projection)
    engine, *_ = initialize(model, config)        # connects them

Unlike DeepSpeed's tied layers, the modules may be of any classes and parts of larger layers. Registered weights are
compared across ranks first, so that a mistake is an error on every rank and not a hang.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.topology import TokenSliceTopology, own_group


class WeightSpec(NamedTuple):
    """Name, shape and type of a shared weight; ranks must agree on all but the name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    def __str__(self) -> str:
        """Text for messages."""
        frozen = "" if self.trained else " frozen"
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}{frozen}"


class Declaration(NamedTuple):
    """A share as one rank declares it."""

    pipeline_ranks: tuple[int, ...]
    modules: tuple[tuple[WeightSpec, ...], ...] = ()
    """Weights of each module registered on this rank."""


class SharedModules:
    """Modules of which several pipeline ranks have a copy. Made by `TokenSlicePipelineModule.share`."""

    def __init__(self, pipeline_ranks: tuple[int, ...], root: nn.Module) -> None:
        self.pipeline_ranks = pipeline_ranks
        """The sharing ranks; all copies start from the weights of the first one."""
        self._root = root
        self.modules: list[dict[str, nn.Parameter]] = []
        """Weights of each module registered on this rank, by name."""

    def register_module(self, module: nn.Module, *weights: str) -> None:
        """Share a module of this rank with the modules that the other ranks register.

        Weights match by their order. If a rank registers several modules, as in a pipeline of one rank, they get the
        same parameters, so make the optimizer later.

        Args:
            weights: names of the weights to share, such as `word.weight`; all of the module's if none is given.
        """
        named = dict(module.named_parameters())
        unknown = [name for name in weights if name not in named]
        if unknown or not named:
            raise UserError(
                f"{type(module).__name__} has no weight {unknown[0] if unknown else 'at all'} to share: name some of "
                f"{', '.join(named) or 'another module'}"
            )
        own = {name: named[name] for name in weights or named}
        first = self.modules[0] if self.modules else own
        if _differences(_specs(first), _specs(own)) is None:
            instead = dict(zip(own.values(), first.values(), strict=True))
            for owner in self._root.modules() if self.modules else ():
                for name, weight in owner._parameters.items():
                    if weight in instead:
                        owner._parameters[name] = instead[weight]
            own = dict(zip(own, first.values(), strict=True))
        self.modules.append(own)

    def declaration(self) -> Declaration:
        """The share as this rank declares it."""
        return Declaration(self.pipeline_ranks, tuple(map(_specs, self.modules)))


def _specs(module: Mapping[str, nn.Parameter]) -> tuple[WeightSpec, ...]:
    return tuple(
        WeightSpec(name, tuple(weight.shape), weight.dtype, weight.requires_grad) for name, weight in module.items()
    )


class ConnectedWeights(NamedTuple):
    """This rank's copies of the weights of one share."""

    weights: tuple[nn.Parameter, ...]
    source: int
    """Rank from whose copies all start."""
    group: dist.ProcessGroup
    """The ranks with copies."""

    def synchronize(self) -> None:
        """Make all copies equal."""
        with torch.no_grad():
            for weight in self.weights:
                dist.broadcast(weight, src=self.source, group=self.group)


def connect(
    shares: Sequence[SharedModules], topology: TokenSliceTopology, rank: int, *, tied: Container[nn.Parameter] = ()
) -> list[ConnectedWeights]:
    """Check the registered weights of all ranks, make the copies of each equal, and return this rank's.

    Every rank must call this together. A fault is an error on every rank alike.

    Args:
        shares: in the same order on the ranks of each of them; other ranks may leave them out.
    """
    declared: list[tuple[list[Declaration], str | None]] = [([], None)] * dist.get_world_size()
    dist.all_gather_object(declared, ([share.declaration() for share in shares], _shared_twice(shares, tied)))
    pipelines = topology.get_axis_comm_lists("pipe")
    for ranks in pipelines:
        faults = [declared[each][1] for each in ranks]
        fault = next(filter(None, faults), None) or find_fault([declared[each][0] for each in ranks])
        if fault is not None:
            raise UserError(fault)
    # Ranks without shares take part too, since groups are made by all together.
    groups = {
        members: own_group([[ranks[pipeline_rank] for pipeline_rank in members] for ranks in pipelines])
        for members in sorted({each.pipeline_ranks for declarations, _ in declared for each in declarations})
    }
    own = next(ranks for ranks in pipelines if rank in ranks)
    connected = []
    for share in shares:
        if share.modules:
            source, weights = own[share.pipeline_ranks[0]], tuple(share.modules[0].values())
            connected.append(ConnectedWeights(weights, source, groups[share.pipeline_ranks]))
            connected[-1].synchronize()
            for weight in weights:
                # By this DeepSpeed counts a weight once in the norm of gradients.
                weight.ds_pipe_replicated = rank != source
    return connected


def find_fault(by_rank: Sequence[Sequence[Declaration]]) -> str | None:
    """The first fault in the declarations of each pipeline rank, in the order in which they were made."""
    shares: dict[tuple[int, ...], list[dict[int, Declaration]]] = defaultdict(list)
    for rank, declarations in enumerate(by_rank):
        seen: Counter[tuple[int, ...]] = Counter()
        for declaration in declarations:
            members = declaration.pipeline_ranks
            if seen[members] == len(shares[members]):
                shares[members].append({})
            shares[members][seen[members]][rank] = declaration
            seen[members] += 1
    found = (_fault_of(members, share) for members, numbered in shares.items() for share in numbered)
    return next(filter(None, found), None)


def _fault_of(members: tuple[int, ...], declarations: Mapping[int, Declaration]) -> str | None:
    named = f"share({members})"
    for rank, declaration in declarations.items():
        if declaration.modules and rank not in members:
            return f"pipeline rank {rank} registers a module with {named}: name it among the ranks that share"
    modules: list[tuple[int, tuple[WeightSpec, ...]]] = []
    for rank in members:
        registered = declarations[rank].modules if rank in declarations else ()
        if not registered:
            return (
                f"pipeline rank {rank} registers no module with {named}: call register_module on each of its ranks "
                "before initialize"
            )
        modules += [(rank, module) for module in registered]
    (first_rank, first), *others = modules
    for rank, module in others:
        if (difference := _differences(first, module)) is not None:
            return (
                f"with {named} pipeline rank {rank} registers {difference[1]}, and pipeline rank {first_rank} "
                f"{difference[0]}: register weights of the same shapes and dtypes, in the same order"
            )
    return None


def _differences(first: Sequence[WeightSpec], other: Sequence[WeightSpec]) -> tuple[str, str] | None:
    """Texts of the first difference of two lists of weights; None if they differ only in names."""
    if len(first) != len(other):
        return f"{len(first)} ({', '.join(map(str, first))})", f"{len(other)} weights ({', '.join(map(str, other))})"
    differing = (pair for pair in zip(first, other, strict=True) if pair[0][1:] != pair[1][1:])
    return next(((str(expected), str(found)) for expected, found in differing), None)


def _shared_twice(shares: Iterable[SharedModules], tied: Container[nn.Parameter]) -> str | None:
    """Fault of a weight of this rank that two shares would sum."""
    owner: dict[nn.Parameter, SharedModules] = {}
    for share in shares:
        for name, weight in chain.from_iterable(module.items() for module in share.modules):
            if weight in tied or owner.setdefault(weight, share) is not share:
                already = "a tied layer" if weight in tied else f"share({owner[weight].pipeline_ranks})"
                return (
                    f"{name} {list(weight.shape)} is in share({share.pipeline_ranks}) and in {already}, and its "
                    "gradient would be summed twice: share it once, among all the ranks that have it"
                )
    return None
