"""Sizes of layers and messages to measure, the most informative first, and the classes of links between ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, NamedTuple

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.errors import ConfigError

FEWEST_TOKENS = 16
"""Shorter token slices are not measured, as they are never efficient."""

WEIGHT_OF_MODE: Mapping[str, int] = MappingProxyType({"none": 4, "selective": 1})
"""Share of the time for each mode of recomputation: of the second, only its additional time is measured."""

MESSAGE_BYTES = (2**10, 2**13, 2**16, 2**18, 2**20, 2**22, 2**24)
"""Sizes of messages that are timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSizes:
    """Sizes at which a model is measured."""

    model: ModelConfig
    precision: str
    tensor_parallel_sizes: tuple[int, ...]
    micro_batch_sizes: tuple[int, ...]
    nums_token_slices: tuple[int, ...]
    """Into how many token slices of the same length sequences are cut."""
    budget_s: float
    """Seconds after which no further size is begun."""
    program: tuple[str, ...] | None = None
    """File and flags of a program with layers of its own, which are measured in place of the model's."""

    def __post_init__(self) -> None:
        for size in self.tensor_parallel_sizes:
            if (undivided := undivided_number(self.model, size)) is not None:
                raise ConfigError(
                    f"--tensor-parallel-size {size} does not divide the {undivided} of the model: leave it out"
                )
        for number in self.nums_token_slices:
            if self.model.seq_length % number:
                raise ConfigError(
                    f"--num-token-slices {number} does not divide the {self.model.seq_length} tokens of a sequence: "
                    "leave it out"
                )

    def runs(self, tensor_parallel_size: int, recompute: str) -> Iterator["MeasuredRun"]:
        """Runs of one size of the ranks, first the extremes, between which times are interpolated."""
        batches, counts = self.micro_batch_sizes, self.nums_token_slices
        extremes = [(size, count) for size in (min(batches), max(batches)) for count in (min(counts), max(counts))]
        others = [] if recompute != "none" else [(size, count) for size in sorted(batches) for count in sorted(counts)]
        for size, count in dict.fromkeys([*extremes, *others]):
            yield MeasuredRun(tensor_parallel_size, size, count, recompute)

    def layouts(self) -> Iterator[tuple[int, str, float]]:
        """Tensor-parallel sizes and modes of recomputation, each with its share of the time that is left for it.

        Layers are built for them before sizes of micro-batches and token slices are run through.
        """
        # Norms and activations are computed again by the GPT's layers only.
        modes = [
            (mode, size)
            for mode in WEIGHT_OF_MODE
            for size in self.tensor_parallel_sizes
            if self.program is None or mode == "none"
        ]
        weights = [WEIGHT_OF_MODE[mode] for mode, _ in modes]
        for index, (mode, size) in enumerate(modes):
            yield size, mode, weights[index] / sum(weights[index:])


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Whole sequences forward and backward in token slices, through each kind of layer."""

    tensor_parallel_size: int
    micro_batch_size: int
    num_token_slices: int
    recompute: str

    def __str__(self) -> str:
        cut = f"{self.micro_batch_size} sequences in {self.num_token_slices} token slices"
        recompute = ", recomputing" if self.recompute != "none" else ""
        return f"{cut}, tensor-parallel size {self.tensor_parallel_size}{recompute}"


def undivided_number(model: ModelConfig, size: int) -> str | None:
    """Return a number of a model that tensor-parallel ranks do not divide, and its name; None if they divide all."""
    numbers = [("heads", model.num_attention_heads) for block in model.blocks if block.num_key_value_heads]
    numbers += [("key and value heads", block.num_key_value_heads) for block in model.blocks]
    numbers += [("groups of states", each.num_groups) for block in model.blocks if (each := block.recurrence)]
    numbers += [("numbers of the MLP", block.ffn_hidden_size) for block in model.blocks]
    return next((f"{number} {noun}" for noun, number in numbers if number % size), None)


def default_numbers_of_token_slices(seq_length: int) -> tuple[int, ...]:
    """Powers of two that leave at least `FEWEST_TOKENS` tokens, 16 at most."""
    return tuple(
        number for number in (1, 2, 4, 8, 16) if seq_length % number == 0 and seq_length // number >= FEWEST_TOKENS
    )


Nodes = Sequence[Sequence[int]]
"""Ranks of each node."""


class LinkClass(NamedTuple):
    """Groups of ranks that all send at the same time."""

    where: Literal["inside", "network"]
    what: Literal["all_reduce", "transfer"]
    """`all_reduce` in each group, or `transfer` from its first to its second rank and back."""
    groups: tuple[tuple[int, ...], ...]
    ranks_per_node: int = 1
    """Ranks of a group that one node has."""
    flows: int = 1
    """Groups that use the links of a node at the same time."""

    @property
    def words(self) -> str:
        """Description of the messages."""
        place = "inside a node" if self.where == "inside" else "between nodes"
        if self.what == "transfer":
            return f"messages {place}" + (f", {self.flows} at a time" if self.flows > 1 else "")
        if self.where == "inside":
            return f"all-reduces of the {len(self.groups[0])} ranks of a node"
        if self.ranks_per_node > 1:
            return f"all-reduces of all {len(self.groups[0])} ranks"
        together = f", {self.flows} at a time" if self.flows > 1 else ""
        return f"all-reduces of one rank of each of {len(self.groups[0])} nodes{together}"


def link_classes(nodes: Nodes) -> Iterator[LinkClass]:
    """Yield each class of links that the ranks of nodes have; none for one rank.

    Where nodes have different numbers of ranks, as many of each take part as the smallest has.
    """
    least = min(map(len, nodes))
    alike = [tuple(ranks[:least]) for ranks in nodes]
    if least > 1:
        yield LinkClass("inside", "all_reduce", tuple(alike), least)
        yield LinkClass("inside", "transfer", tuple((ranks[0], ranks[1]) for ranks in alike), 2)
    if len(alike) == 1:
        return
    columns = tuple(zip(*alike, strict=True))
    # Neighbours, as pipelines have them; every card sends and receives at most once per flow and direction.
    pairs = tuple((first[0], second[0]) for first, second in list(pairwise(alike))[::2])
    all_pairs = tuple(pair for first, second in list(pairwise(alike))[::2] for pair in zip(first, second, strict=True))
    yield LinkClass("network", "all_reduce", columns[:1])
    yield LinkClass("network", "transfer", pairs)
    if least > 1:
        yield LinkClass("network", "all_reduce", columns, flows=least)
        yield LinkClass("network", "all_reduce", (tuple(rank for ranks in alike for rank in ranks),), least)
        yield LinkClass("network", "transfer", all_pairs, flows=least)
