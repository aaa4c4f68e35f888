"""Everything that one CUDA device can prove, as one table: `make gpu`.

python -m tests.gpu                # all of it, about an hour
python -m tests.gpu --quick        # a few minutes
python -m tests.gpu --cpu --quick  # on CPUs over gloo, to try the program itself
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measuring.report import (
    Section,
    Sharing,
    has_gpu,
    one_line,
    possible_sharings,
    progress,
    publish,
    software,
)
from benchmarks.measuring.worlds import RankFailed, World
from tests.gpu import marked, numerics
from tests.gpu.cases import COLD, WARM, Case, cases
from tests.gpu.pipelines import exchange
from tests.gpu.runner import Played, Result, Settings, play_case

_MOST_RANKS = 4
"""Ranks of the largest case."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything and print the tables. Returns 1 if something hung or failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer shapes, one number of queues, no drains")
    parser.add_argument("--cpu", action="store_true", help="run on CPUs where there is no GPU, to try the program")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder for report.md and report.json")
    parser.add_argument("--transfer-timeout", type=float, default=30.0, metavar="SECONDS", help="after which one hangs")
    options = parser.parse_args(argv)
    if not (has_gpu() or options.cpu):
        print("no CUDA GPU here: nothing was run")
        return 0
    tests, numbers, played = marked.section(), numerics.section(), pipelines_section()
    sections = (tests, played, numbers)

    def written() -> str:
        """Write what there is so far, so that it is not lost with what is not."""
        return publish("make gpu", software(), [each for each in sections if each.rows], options.output)

    if has_gpu():
        marked.add_rows(tests)
    chosen, played.notes = find_sharing()
    if chosen is None:
        played.add("all", "", "", "", "", "failed: several ranks cannot share this GPU")
    else:
        settings = Settings(chosen, transfer_timeout_s=options.transfer_timeout)
        for case in cases(quick=options.quick):
            progress(f"{case}, {case.hardware_queues} queues")
            add_result(played, play_guarded(case, settings))
            written()
        setups = numerics.SETUPS if not options.quick else numerics.SETUPS[2:5]
        numerics.add_rows(numbers, setups, chosen)
    print(written())
    return 1 if any(_is_bad(row) for each in sections for row in each.rows) else 0


def pipelines_section() -> Section:
    """The empty table of cases."""
    return Section(
        "Pipelines on real communicators: (P, V, M, S), loss and gradient held against plain autograd in fp64",
        ("case", "queues", "cold", "warm", "drains", "result", "s"),
    )


def add_result(table: Section, result: Result) -> None:
    """Append the row of a case."""
    if result.refused:
        cells = ("", "", "", f"refused: {result.refused}")
    else:
        others = {name: played for name, played in result.phases.items() if name not in (COLD, WARM)}
        drains = "; ".join(f"{name}: {played}" for name, played in others.items())
        hung = sum(played.hung for played in result.phases.values())
        verdict = "ok" if result.ok else f"HUNG {hung} times" if hung else "failed"
        cells = (str(result.phases[COLD]), str(result.phases[WARM]), drains, verdict)
    table.add(result.case, result.case.hardware_queues, *cells, f"{result.seconds:.0f}")


def play_guarded(case: Case, settings: Settings) -> Result:
    """Play a case; what goes wrong outside its ranks is a row as well."""
    try:
        return play_case(case, settings)
    except Exception as error:
        return Result(
            case,
            {COLD: Played(1, problems=[f"failed: {one_line(f'{type(error).__name__}: {error}')}"]), WARM: Played(0)},
        )


def find_sharing() -> tuple[Sharing | None, list[str]]:
    """The first way in which several ranks get a device that works, and a line for each that was tried."""
    tried = []
    for sharing in possible_sharings(_MOST_RANKS):
        progress(f"trying {sharing.name}")
        variables = [sharing.of_rank(rank, {}) for rank in range(_MOST_RANKS)]
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log.txt")
            try:
                World(_MOST_RANKS, exchange, 60.0, variables=variables, timeout_s=240.0, log=log).end()
            except RankFailed as failed:
                tried.append(f"Ranks cannot share by {sharing.name}: {one_line(str(failed))}.")
                continue
        return sharing, [*tried, f"Ranks share by {sharing.name}."]
    return None, tried


def _is_bad(row: tuple[str, ...]) -> bool:
    return any(cell.startswith(("failed", "HUNG")) for cell in row)


if __name__ == "__main__":
    sys.exit(main())
