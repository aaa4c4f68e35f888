"""How many collectives this rank has started in each of its process groups.

Torch counts them, so a step does nothing for it. Of two ranks of a group, the one that has started fewer is the one
that the other waits for.
"""

from collections.abc import Iterable
from contextlib import suppress

import torch.distributed as dist
from torch.distributed import distributed_c10d


class Collectives:
    """The counts of this rank, by group."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}
        self._left_out: set[str] = set()
        self._before: dict[str, int] = {}

    def name(self, group: dist.ProcessGroup | None, words: str) -> None:
        """Give a group words for a reader.

        Args:
            group: the group; the same words on all of its ranks.
        """
        if group is not None:
            self._words.setdefault(group.group_name, words)

    def leave_out(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Count no collectives of some groups: those for messages, which some backends count with collectives."""
        self._left_out.update(group.group_name for group in groups)

    def start_anew(self) -> None:
        """Count from here, at the same place of the program on all ranks.

        DeepSpeed's engine sends a message to each neighbour when it is made, in the group of all ranks. Some backends
        count messages with collectives, and ranks at the ends of a pipeline have fewer neighbours.
        """
        self._before = self._all()

    def counts(self) -> dict[str, int]:
        """Collectives started, by words and name of the group; from any thread."""
        return {
            f"{self._words.get(name, 'group')}#{name}": count - self._before.get(name, 0)
            for name, count in self._all().items()
            if name not in self._left_out
        }

    def _all(self) -> dict[str, int]:
        # A copy, since the main thread may be making a group.
        groups = [group for group in list(distributed_c10d._world.pg_map) if group.size() > 1]
        counts = {}
        for group in groups:
            with suppress(RuntimeError):  # of a backend that does not count
                counts[group.group_name] = group._get_sequence_number_for_group()
        return counts
