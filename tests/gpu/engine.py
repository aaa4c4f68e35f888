"""The engine on a CUDA device: numbers of one rank, then two ranks that share it, over real communicators."""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.measuring.report import Section, Sharing, one_line, possible_sharings, progress
from benchmarks.measuring.worlds import RankFailed, World
from tests.gpu import numerics
from tests.gpu.cases import COLD, WARM, Case, DrainKind, cases
from tests.gpu.pipelines import exchange
from tests.gpu.runner import Played, Result, Settings, play_case, steps_of_one_rank

FIRST = (
    Case("1f1b", 2, 1, 1, 4),
    Case("zero-bubble", 2, 1, 2, 2),
    Case("interleaved", 2, 2, 2, 4),
)
"""Cases of two ranks, cold and warm."""

LATER = (
    replace(FIRST[0], drains=(DrainKind.FREE, DrainKind.SYNCHRONIZE)),
    replace(FIRST[2], hardware_queues=8),
    replace(FIRST[0], hardware_queues=8),
)
"""Drains and fewer queues, each on small shapes."""


def one_rank() -> Iterator[Section]:
    """Numbers of GPT and Llama in fp32 and bf16 on one rank."""
    ranks = numerics.Ranks(possible_sharings(1)[0])
    yield from numerics.rows(numerics.ONE_RANK, ranks)
    ranks.end()


def two_ranks(transfer_timeout_s: float) -> Iterator[Section]:
    """Schedules, a new length of token slices, numbers, drains and fewer queues, on two ranks."""
    chosen, tried = find_sharing(2)
    yield tried
    if chosen is None:
        return
    table, settings = pipelines_section(), Settings(chosen, transfer_timeout_s, start_s=90.0)
    yield from play(FIRST, settings, table)
    ranks = numerics.Ranks(chosen)
    yield from numerics.changed_lengths(ranks)
    yield from numerics.rows(numerics.TWO_RANKS, ranks)
    ranks.end()
    yield from play(LATER, settings, table)


def all_cases(transfer_timeout_s: float) -> Iterator[Section]:
    """Every case and every setup, on up to four ranks."""
    chosen, tried = find_sharing(4)
    yield tried
    if chosen is None:
        return
    yield from play(cases(), Settings(chosen, transfer_timeout_s), pipelines_section())
    ranks = numerics.Ranks(chosen)
    yield from numerics.rows(numerics.ALL, ranks)
    ranks.end()


def find_sharing(num_ranks: int) -> tuple[Sharing | None, Section]:
    """The first way in which several ranks get a device that works, and a row for each that was tried."""
    table = Section("Several ranks on the devices of this host", ("way", "result"))
    for sharing in possible_sharings(num_ranks):
        progress(f"trying {sharing.name}")
        variables = [sharing.of_rank(rank, {}) for rank in range(num_ranks)]
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log.txt")
            try:
                World(num_ranks, exchange, 45.0, variables=variables, timeout_s=60.0, log=log).end()
            except RankFailed as failed:
                table.fail(sharing.name, failed)
                print(log.read_text(errors="replace") if log.exists() else "")
                continue
        table.add(sharing.name, "ok")
        return sharing, table
    return None, table


def pipelines_section() -> Section:
    """The empty table of cases."""
    return Section(
        "Pipelines on real communicators: (P, V, M, S), loss and norm of the gradient",
        ("case", "queues", "cold", "warm", "drains", "beside fp64", "beside one rank", "result", "s"),
    )


def play(played: Iterable[Case], settings: Settings, table: Section) -> Iterator[Section]:
    """Play cases; yield their table after each."""
    each = list(played)
    try:
        settings = replace(settings, of_one_rank=steps_of_one_rank(each, settings))
    except RankFailed as failed:
        table.notes.append(f"No step of one rank to compare with: {one_line(str(failed))}.")
    for case in each:
        progress(f"{case}, {case.hardware_queues} queues")
        add_result(table, play_guarded(case, settings))
        yield table


def play_guarded(case: Case, settings: Settings) -> Result:
    """Play a case; what goes wrong outside its ranks is a row as well."""
    try:
        return play_case(case, settings)
    except Exception as error:
        return Result(
            case,
            {COLD: Played(1, problems=[f"failed: {one_line(f'{type(error).__name__}: {error}')}"]), WARM: Played(0)},
        )


def add_result(table: Section, result: Result) -> None:
    """Append the row of a case."""
    if result.refused:
        cells = ("", "", "", "", "", f"refused: {result.refused}")
    else:
        others = {name: played for name, played in result.phases.items() if name not in (COLD, WARM)}
        drains = "; ".join(f"{name}: {played}" for name, played in others.items())
        hung = sum(played.hung for played in result.phases.values())
        verdict = "ok" if result.ok else f"HUNG {hung} times" if hung else "failed"
        errors = tuple(f"{each:.1e}" if each is not None else "" for each in (result.of_fp64, result.of_one_rank))
        cells = (str(result.phases[COLD]), str(result.phases[WARM]), drains, *errors, verdict)
    table.add(result.case, result.case.hardware_queues, *cells, f"{result.seconds:.0f}")
