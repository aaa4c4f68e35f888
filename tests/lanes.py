"""How `make test` shares the tests among its workers, and how long the tests of each folder may take."""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[1]
STARTS_RANKS = re.compile(r"\b(?:run_distributed|run_each|results_by_setup|train_on_this_rank)\b")
WORKERS_OF_A_LANE = 3
"""Workers for each lane of ranks: two cores compute what four ranks, a launch and a pure test leave to do."""

BUDGET_S = {
    **{"arguments": 25, "benchmarks": 30, "checkpoint": 100, "command": 40, "config": 10},
    **{"data": 45, "docs": 10, "doctor": 15, "documents": 60, "end_to_end": 220, "examples": 80, "faults": 20},
    **{"gpu": 20, "huggingface": 75, "inference": 25, "model": 60, "neox": 10, "packaging": 30},
    **{"plan": 120, "planning": 25, "run_report": 15, "runtime": 120, "search": 130, "training": 150},
}
"""Seconds of workers by folder, together three workers for eight minutes on two cores that do nothing else."""


@cache
def starts_ranks(file: str) -> bool:
    """Whether a file of tests names a function that starts ranks."""
    return STARTS_RANKS.search((ROOT / file).read_text(encoding="utf-8")) is not None


class Lanes(LoadFileScheduling):
    """One worker of three runs all files that start ranks, which share a server of forks; the others run the rest."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        lanes = max(1, self.numnodes // WORKERS_OF_A_LANE)
        return f"ranks {crc32(file.encode()) % lanes}" if starts_ranks(file) else file


def seconds_by_folder(reports: list[Any]) -> Counter[str]:
    """Seconds of workers by folder of `tests`; files beside the folders count as one folder with an empty name."""
    seconds: Counter[str] = Counter()
    for report in reports:
        folders = report.nodeid.split("::")[0].split("/")[1:-1]
        seconds[folders[0] if folders else ""] += report.duration
    return seconds


def beside_budget(seconds: Counter[str]) -> list[str]:
    """Lines of a table: seconds, budget, and folder, the slowest first; folders over their budget are marked."""
    lines = [f"{'seconds':>8} {'budget':>7}  folder"]
    for folder, taken in seconds.most_common():
        budget = BUDGET_S.get(folder)
        over = "  OVER ITS BUDGET" if budget is not None and taken > budget else ""
        lines.append(f"{taken:8.0f} {budget or '':>7}  tests/{folder}{over}")
    return [*lines, f"{seconds.total():8.0f} {sum(BUDGET_S.values()):>7}  in all"]
