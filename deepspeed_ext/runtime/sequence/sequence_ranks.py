"""The ranks that share the tokens of every token slice."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.token_slice_parts import parts_of_rank
from deepspeed_ext.runtime.topology import own_group


@dataclass(frozen=True, slots=True)
class SequenceParallelRanks:
    """Ranks that share the tokens of every token slice between the matrices, and the heads in attention.

    By default one rank alone (ADR 48).
    """

    rank: int = 0
    """Place of this rank among them; it has the part of that number of each token slice."""
    size: int = 1
    group: dist.ProcessGroup | None = None
    """Their process group; None for one alone."""

    @classmethod
    def of(cls, layout: ParallelLayout, timeout: timedelta | None = None) -> "SequenceParallelRanks":
        """Return those of this rank. Every rank must call it at the same time.

        Args:
            timeout: longest time that a head exchange may take; None for torch's default.
        """
        if layout.sequence_parallel_size == 1:
            return cls()
        own = layout.coordinate(dist.get_rank()).sequence
        return cls(own, layout.sequence_parallel_size, own_group(layout.groups("sequence"), timeout))

    def parts(self, token_slices: TokenSlices) -> TokenSlices:
        """Return the part of each token slice that this rank has.

        Raises:
            PlanError: if the ranks cannot share a token slice evenly.
        """
        return parts_of_rank(token_slices, self.rank, self.size)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors [...] of all these ranks, which must have one shape, by rank."""
        given = tensor if dist.get_backend(self.group) == "gloo" else tensor.to(get_accelerator().current_device_name())
        gathered = [torch.empty_like(given, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(gathered, given.contiguous(), group=self.group)
        return gathered
