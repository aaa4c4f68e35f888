"""Runs of ZeRO 3 with Ulysses that others published: `published_long_sequences.jsonl`, with their sources.

`checked` says whether the source was read, or the figure is from memory. A GB of a recipe's comment is 2^30 bytes, as
DeepSpeed prints it.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.machine.trainers import ALST
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.memory import default_overheads
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.search.price.workload_files import read_workload
from megatron_terapipe.search.rank.rivals import MemoryLimits, RivalMemory, RivalSettings, memory_limits, rival_memory

FILE = Path(__file__).parent / "published_long_sequences.jsonl"


@dataclass(frozen=True)
class PublishedRun:
    """One line of the file."""

    line: dict[str, Any]

    @property
    def workload(self) -> Workload:
        return read_workload(self.line["model"], {"seq_length": self.line["seq_length"]})

    @property
    def settings(self) -> RivalSettings:
        offloads = {name: value for name, value in self.line.items() if name.startswith("offloads_")}
        return RivalSettings(
            sequence_parallel_size=self.line["sequence_parallel_size"],
            data_parallel_size=1,
            micro_batch_size=1,
            num_micro_batches=1,
            **offloads,
        )

    @property
    def pricing(self) -> Pricing:
        return Pricing(self.workload, parse_cluster(self.line["cluster"], FILE.name)[0])

    @property
    def limits(self) -> MemoryLimits:
        return memory_limits(self.pricing, default_overheads(self.pricing.cluster, ALST), 0.0)

    def memory(self, seq_length: int | None = None) -> RivalMemory:
        """Return the predicted bytes, with a sequence of another length."""
        workload = self.workload
        if seq_length is not None:
            layers = tuple(replace(layer, tokens=seq_length) for layer in workload.layers)
            workload = replace(workload, layers=layers, seq_length=seq_length)
        ranks = min(self.limits.ranks_of_host, self.settings.num_ranks)
        return rival_memory(workload, self.settings, default_overheads(self.pricing.cluster, ALST), ranks)

    def longest(self) -> int:
        """Return the predicted longest sequence, to 1 %."""
        limits = self.limits
        fits, too_long = 1024, 2**30
        while too_long > 1.01 * fits:
            middle = (fits + too_long) // 2
            if limits.fullness(self.memory(middle)) <= 1:
                fits = middle
            else:
                too_long = middle
        return fits


RUNS = {line["id"]: PublishedRun(line) for line in map(json.loads, FILE.read_text(encoding="utf-8").splitlines())}


def with_measured(name: str) -> list[str]:
    """Return the names of the runs that measured something."""
    return [each for each, run in RUNS.items() if name in run.line["measured"]]
