"""Do ranks that share sequences read the same ones? Compared before the first batch trains on pieces of several.

DeepSpeed takes sequence-parallel ranks for replicas. Whoever deals data by its data-parallel rank gives each of them
other sequences, and attention would join their parts to sequences that nobody wrote.
"""

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.batches.batch import tensors_in
from deepspeed_ext.runtime.sequence.sequence_ranks import SequenceParallelRanks


class SameData:
    """Compares the first micro-batch of training, and the first of evaluation, among ranks that share sequences."""

    def __init__(self, ranks: SequenceParallelRanks) -> None:
        self._ranks = ranks
        self._unknown = {True, False} if ranks.size > 1 else set()

    def check(self, first: Callable[[], Any], *, training: bool) -> None:
        """Compare what the ranks are about to read. All of them must call this together.

        Args:
            first: returns the first micro-batch of a batch; called only where it is compared.
            training: whether the batch trains.

        Raises:
            UserError: on each of them, if they read different micro-batches.
        """
        if training not in self._unknown:
            return
        digests = [digest.item() for digest in self._ranks.gather(torch.tensor(_digest(first())))]
        if len(set(digests)) > 1:
            members = ", ".join(map(str, dist.get_process_group_ranks(self._ranks.group)))
            raise UserError(
                f"ranks {members} share every sequence and were given different micro-batches: deal data to replicas, "
                "by engine.replica of engine.num_replicas, and not by DeepSpeed's data-parallel rank"
            )
        self._unknown.remove(training)


def _digest(batch: Any) -> int:
    """Return a number of 63 bits, which differs where tensors of a micro-batch do."""
    digest = blake2b(digest_size=8)
    for tensor in tensors_in(batch):
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()) >> 1
