"""Plays cases on worlds of ranks: what hangs, fails or is refused becomes an entry of a table, and the rest goes on."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.measuring.report import Sharing, has_gpu, join, one_line
from benchmarks.measuring.worlds import RankFailed, World
from deepspeed_ext.plan.ops import Op
from deepspeed_ext.runtime.cuda_environment import HARDWARE_QUEUES
from tests.gpu.cases import Case, Trial
from tests.gpu.pipelines import EXACT, Outcome, Pipeline, play, setup_of, step_of_one_rank
from tests.runtime.reference import reference_gradients

TOLERANCE = 1e-6
"""Of the loss and the norm of the gradient in fp32, against one rank of the same device, and on CPUs against fp64."""
OF_CUDA = {"loss": 1e-5, "norm": 5e-5}
"""Of CUDA against fp64: attention multiplies by three products of tensor cores (`OpMultiplyAddFastF32`)."""

_STALLS = "the run has stalled: "


@dataclass(frozen=True)
class Settings:
    """How cases are played."""

    sharing: Sharing
    """How ranks get their device."""
    transfer_timeout_s: float = 30.0
    """How long a transfer may take; a little less, and the run names the rank that blocks it."""
    start_s: float = 180.0
    """How long ranks may take to start and to import torch."""
    most_hangs: int = 2
    """Of one phase, before its other trials are left out."""
    start_method: str = "spawn"
    of_one_rank: Mapping[tuple[int, int], Outcome] = field(default_factory=dict)
    """Steps of one rank of the same device, by the numbers of micro-batches and token slices."""

    @property
    def trial_timeout_s(self) -> float:
        """How long a trial may take: a transfer that is lost, and time for a step and a new engine around it."""
        return 2 * self.transfer_timeout_s + 30.0


@dataclass
class Played:
    """What came of the trials of one phase."""

    trials: int
    good: int = 0
    """How many ended with the right loss and gradient."""
    hung: int = 0
    """How many did not end."""
    problems: list[str] = field(default_factory=list)
    """A line for each that was not good, as far as they were played."""

    def __str__(self) -> str:
        if not self.problems:
            return f"ok ({self.good})"
        return f"{self.good} of {self.trials} ok: {self.problems[0]}"


@dataclass
class Result:
    """What came of a case."""

    case: Case
    phases: dict[str, Played] = field(default_factory=dict)
    """By their names; empty if it was refused."""
    refused: str = ""
    """Why it was not run, in the words of a user's error."""
    seconds: float = 0.0
    of_fp64: float | None = None
    """Largest relative error of a loss or norm; None if no trial ended."""
    of_one_rank: float | None = None
    """The same beside one rank of the same device; None without it."""

    @property
    def ok(self) -> bool:
        """Whether nothing hung or failed; what is refused cannot hang."""
        return all(not played.problems for played in self.phases.values())


def play_case(case: Case, settings: Settings) -> Result:
    """Play all trials of a case. After one that hangs, the rest goes on in a new world."""
    start, orders = time.monotonic(), case.orders()
    if refused := case.refusal(orders):
        return Result(case, refused=refused)
    result = Result(case, {name: Played(len(trials)) for name, trials in case.phases(orders).items()})
    with tempfile.TemporaryDirectory() as folder:
        table = _Table(case, orders, settings, Path(folder))
        try:
            for name, trials in case.phases(orders).items():
                for trial in trials:
                    played = result.phases[name]
                    if played.hung < settings.most_hangs:
                        table.play(trial, played)
        except _Refused as said:
            result.phases, result.refused = {}, str(said)
        finally:
            table.end()
    result.of_fp64, result.of_one_rank = table.worst
    result.seconds = time.monotonic() - start
    return result


class _Refused(Exception):
    """A case that the engine refuses."""


class _Table:
    """The world on which a case is played; a new one after each trial that was not good."""

    def __init__(self, case: Case, orders: Sequence[Sequence[Op]], settings: Settings, folder: Path) -> None:
        self._case, self._orders, self._settings, self._folder = case, orders, settings, folder
        self._expected = _expected(case)
        self._world: World | None = None
        self._num_worlds = 0
        self.worst: list[float | None] = [None, None]
        """Largest relative errors: beside fp64, and beside one rank."""

    def play(self, trial: Trial, played: Played) -> None:
        """Play one trial and book what came of it."""
        try:
            outcomes = self._living().run(play, trial, timeout_s=self._settings.trial_timeout_s)
        except RankFailed as failed:
            if failed.refused:
                raise _Refused(str(failed)) from None
            self._book(trial, played, failed)
            self.end()
            return
        wrong = [line for rank, outcome in enumerate(outcomes) if (line := self._wrong(rank, outcome))]
        played.good += not wrong
        played.problems += [f"{_words(trial, self._orders)}{wrong[0]}"] if wrong else []

    def end(self) -> None:
        """End the ranks."""
        if self._world is not None:
            self._world.end()
        self._world = None

    def _living(self) -> World:
        if self._world is None:
            self._num_worlds += 1
            more = EXACT | {HARDWARE_QUEUES: str(self._case.hardware_queues)}
            self._world = World(
                self._case.num_ranks,
                Pipeline,
                self._case,
                self._orders,
                self._settings.transfer_timeout_s,
                self._folder / "ledgers",
                variables=[self._settings.sharing.of_rank(rank, more) for rank in range(self._case.num_ranks)],
                timeout_s=self._settings.start_s,
                log=self._log,
                start_method=self._settings.start_method,
            )
        return self._world

    @property
    def _log(self) -> Path:
        return self._folder / f"world{self._num_worlds}.txt"

    def _book(self, trial: Trial, played: Played, failed: RankFailed) -> None:
        printed = self._log.read_text(errors="replace") if self._log.exists() else ""
        stalls = [line.partition(_STALLS)[2] for line in printed.splitlines() if _STALLS in line]
        print(f"{self._case}, trial {trial}: {failed}\n{printed}")
        hung = failed.silent or bool(stalls)
        played.hung += hung
        said = stalls[0].partition("; the ledger")[0] if stalls else one_line(str(failed))
        played.problems.append(f"{_words(trial, self._orders)}{'HUNG: ' if hung else 'failed: '}{said}")

    def _wrong(self, rank: int, outcome: Outcome) -> str:
        one_rank = self._settings.of_one_rank.get((self._case.num_micro_batches, self._case.num_token_slices))
        limits = OF_CUDA if has_gpu() else dict.fromkeys(OF_CUDA, TOLERANCE)
        wrong = ""
        for place, (reference, expected) in enumerate((("fp64", self._expected), ("one rank", one_rank))):
            if expected is None:
                continue
            for name in ("norm", "loss"):
                found, right = getattr(outcome, name), getattr(expected, name)
                error = abs(found - right) / right
                self.worst[place] = max(self.worst[place] or 0.0, error)
                # Not a number is above every limit.
                if not error <= (TOLERANCE if place else limits[name]):
                    wrong = f"wrong {name} {found:.9g} on rank {rank}, not {right:.9g} as {reference}"
        return wrong


def steps_of_one_rank(played: Sequence[Case], settings: Settings) -> dict[tuple[int, int], Outcome]:
    """Loss and norm of one rank of the same device, for the micro-batches and token slices of cases.

    Raises:
        RankFailed: if the rank fails.
    """
    extents = dict.fromkeys((case.num_micro_batches, case.num_token_slices) for case in played)
    with tempfile.TemporaryDirectory() as folder:
        world = World(
            1,
            join,
            settings.start_s,
            variables=[settings.sharing.of_rank(0, EXACT)],
            timeout_s=settings.start_s,
            log=Path(folder, "log.txt"),
            start_method=settings.start_method,
        )
        with world:
            return {each: world.run(step_of_one_rank, Case("1f1b", 1, 1, *each))[0] for each in extents}


def _expected(case: Case) -> Outcome:
    """Loss and norm of the gradient by plain autograd in fp64, on this process."""
    loss, gradients = reference_gradients(setup_of(case))
    return Outcome(loss, float(np.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))))


def _words(trial: Trial, orders: Sequence[Sequence[Op]]) -> str:
    """Which trial it was, as far as its phase does not say."""
    if trial.drain is None:
        return ""
    return f"before {orders[trial.drain.rank][trial.drain.op]} on rank {trial.drain.rank}, "
