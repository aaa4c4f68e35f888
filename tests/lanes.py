"""How `make test` shares the tests among its workers, and how long the tests of each folder may take."""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[1]
STARTS_RANKS = re.compile(r"\b(?:run_distributed|run_each|results_by_setup|train_on_this_rank)\b")
SECOND_LANE = ("training", "checkpoint")
"""Folders whose tests that start ranks take about as long as those of all other folders."""

BUDGET_S = {
    **{"training": 220, "runtime": 165, "search": 165, "end_to_end": 140, "documents": 105, "plan": 105},
    **{"checkpoint": 80, "huggingface": 80, "examples": 55, "model": 52, "gpu": 38, "planning": 30, "data": 22},
    **{"benchmarks": 17, "packaging": 15, "command": 12, "doctor": 12, "arguments": 10, "faults": 10, "config": 5},
    **{"inference": 5, "neox": 5, "docs": 5, "run_report": 5, "launch": 5},
}
"""Seconds of workers by folder, as measured with three workers on two cores: seven and a half minutes of each."""


@cache
def starts_ranks(file: str) -> bool:
    """Whether a file of tests names a function that starts ranks."""
    return STARTS_RANKS.search((ROOT / file).read_text(encoding="utf-8")) is not None


class Lanes(LoadFileScheduling):
    """Few workers run the files that start ranks, each with a server of forks of its own; all others run the rest."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return lane(file, self.numnodes) if starts_ranks(file) else file


def lane(file: str, workers: int) -> str:
    """Name of the lane of a file that starts ranks: of one lane for two workers, of two for five, else by folder.

    Two lanes and a worker of pure tests keep two cores busy: a launch waits as long as it computes.
    """
    folder = file.split("/")[1]
    if workers < 6:
        folder = "two folders" if workers > 2 and folder in SECOND_LANE else "all folders"
    return f"ranks of {folder}"


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
