"""Kills of ranks, of DeepSpeed's launcher and of its command, in all phases: all processes end, and the run resumes."""

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

from megatron_terapipe.checkpoint.directories import latest_checkpoint
from megatron_terapipe.launch.launcher import free_port
from tests.end_to_end.corpus import write_corpus
from tests.end_to_end.launching import DEEPSPEED, Launch, error_lines, flags, read_metrics
from tests.faults.campaign import Ending, Outcome, Settings, ending, together

NUM_KILLS, NUM_QUICK_KILLS = 50, 4
VICTIMS = ("rank 0", "rank 1", "the launcher", "the command")
PHASES = ("starts", "trains", "saves", "ends")
TRAINING = "--train-iters 100000 --save-interval 4 --eval-interval 6 --eval-iters 2 --keep-last-n-checkpoints 4".split()
SAVED = re.compile(r"saved checkpoint \S+global_step(\d+)$", re.MULTILINE)
ENDS_WITHIN_S = 30.0
"""Seconds after the death of a rank or a launcher in which all others end, as docs/reliability.md promises."""


def campaign(settings: Settings) -> Iterator[Outcome]:
    """Kill one run many times, resume it after each, and compare its losses with those of an undisturbed run."""
    run = KilledRun(settings.folder, random.Random(settings.seed))
    kills = [(victim, phase) for phase in PHASES for victim in VICTIMS]
    number = NUM_QUICK_KILLS if settings.quick else NUM_KILLS
    chosen = run.chance.sample(kills, len(kills))
    outcomes: dict[str, list[Outcome]] = {}
    for victim, phase in islice(cycle(chosen), number):
        outcomes.setdefault(victim, []).append(run.kill(victim, phase))
    for victim, found in outcomes.items():
        yield together(f"kill -9 of {victim} while the run starts, trains, saves or ends", found)
    iterations, broken = run.compare()
    yield Outcome(
        fault=f"resuming after each kill: losses of {iterations} iterations beside an undisturbed run's",
        tried=number,
        message="equal to the bit" if not broken else "",
        broken=tuple(broken),
    )


class KilledRun:
    """A run that is killed and resumed, again and again."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        (folder / "data").mkdir()
        self.folder, self.chance, self.data = folder, chance, write_corpus(folder / "data")
        self._losses: list[dict[int, float]] = []

    def kill(self, victim: str, phase: str) -> Outcome:
        """Start or resume the run, kill one process in a phase, and check the outcome."""
        metrics, started_from = self.folder / f"metrics{len(self._losses)}.jsonl", _iteration(self.folder / "save")
        run = self._launch(metrics, "--exit-interval", 8 if phase == "ends" else 100000)
        end = self._end(run, victim, self._moment(run, phase, metrics))
        broken = [f"{end.left} processes left"] * bool(end.left)
        broken += [f"printed {len(end.lines)} lines"] * (len(end.lines) > 1)
        if "exiting after iteration" not in end.output and phase in ("trains", "saves"):
            # The command is the launcher of the launchers.
            named = "".join(end.lines).replace("the launcher deepspeed (", "the command (")
            broken += ["exit code 0"] * (end.code == 0) + ["not named"] * (victim.removeprefix("the ") not in named)
        self._losses.append(_losses(metrics))
        first, saved = min(self._losses[-1], default=None), [int(number) for number in SAVED.findall(end.output)]
        if first not in (None, started_from + 1):
            broken.append(f"resumed with iteration {first}, and {started_from} was saved")
        if _iteration(self.folder / "save") < max(saved, default=0):
            broken.append(f"the checkpoint of iteration {max(saved)} is lost")
        return Outcome(
            fault=victim,
            tried=1,
            longest_s=end.seconds,
            promised_s=ENDS_WITHIN_S,
            message=end.lines[-1] if end.lines else "",
            broken=tuple(f"killed while it {phase}: {line}" for line in broken),
        )

    def compare(self) -> tuple[int, list[str]]:
        """Return the number of iterations compared, and those whose losses differ from an undisturbed run's."""
        last = max(max(losses, default=0) for losses in self._losses)
        metrics = self.folder / "undisturbed.jsonl"
        words = ["--exit-interval", max(last, 1), "--metrics-file", metrics, *TRAINING]
        words += ["--save", "save", "--save-interval", 100000]
        run = Launch(self.folder / "undisturbed", flags(self.data, *words))
        assert run.wait() == 0, run.output()
        expected = _losses(metrics)
        pairs = [(number, loss) for losses in self._losses for number, loss in losses.items()]
        return len(pairs), [f"loss of iteration {number} differs" for number, loss in pairs if loss != expected[number]]

    def _launch(self, metrics: Path, *more: object) -> Launch:
        save = self.folder / "save"
        words = [*TRAINING, "--save", save, "--load", save, "--metrics-file", metrics, *more]
        return Launch(self.folder / "launches", flags(self.data, *words))

    def _moment(self, run: Launch, phase: str, metrics: Path) -> Callable[[], bool]:
        """Return a function that is true at the moment of the kill."""
        save, begin, wait_s = self.folder / "save", time.monotonic(), self.chance.uniform(0.0, 2.0)
        trained: list[float] = []

        def trains() -> bool:
            if not trained and metrics.exists() and metrics.stat().st_size:
                trained.append(time.monotonic())
            return bool(trained) and time.monotonic() > trained[0] + wait_s

        if phase == "starts":
            start_s = self.chance.uniform(2.0, 10.0)
            return lambda: time.monotonic() > begin + start_s
        if phase == "saves":
            return lambda: bool(trained or trains() or trained) and any(save.glob("*.partial"))
        if phase == "ends":
            return lambda: "exiting after iteration" in run.output()
        return trains

    def _end(self, run: Launch, victim: str, come: Callable[[], bool]) -> Ending:
        """Kill, unless the run ends before, and return its end."""
        while not (come() and victim in (there := run.processes())) and run.running:
            time.sleep(0.01)
        if run.running:
            os.kill(there[victim], signal.SIGKILL)
        return ending(run)


def _losses(metrics: Path) -> dict[int, float]:
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    whole = metrics.with_suffix(".whole")
    whole.write_text("".join(line for line in lines if line.endswith("\n")))
    return {each["iteration"]: each["lm_loss"] for each in read_metrics(whole)[0] if "learning_rate" in each}


def _iteration(save: Path) -> int:
    found = latest_checkpoint(save)
    return 0 if found is None else int(found.name.removeprefix("global_step"))


def restarts(settings: Settings) -> Iterator[Outcome]:
    """Kill ranks of a run that torchrun starts again, and compare its losses with those of an undisturbed run."""
    data = write_corpus(settings.folder)
    words = ("--train-iters", 24, "--save-interval", 3, "--eval-iters", 0)
    expected = settings.folder / "expected.jsonl"
    undisturbed = Launch(settings.folder / "undisturbed", flags(data, *words, "--metrics-file", expected))
    assert undisturbed.wait() == 0, undisturbed.output()
    meetings = [("--standalone",)] if settings.quick else [("--standalone",), ("--master-port", str(free_port()))]
    for meeting in meetings:
        for rank in (0, 1):
            folder = settings.folder / f"{meeting[0]}-{rank}"
            metrics = folder / "metrics.jsonl"
            launcher = (str(DEEPSPEED.with_name("torchrun")), "--nproc-per-node", "2", "--max-restarts", "2", *meeting)
            run = Launch(folder, flags(data, *words, "--save", "save", "--metrics-file", metrics), launcher=launcher)
            for iteration in (5, 14):
                _kill_at(run, f"rank {rank}", iteration, metrics)
            broken = [f"exit code {code}"] if (code := run.wait()) else []
            if _losses(metrics) != _losses(expected):
                broken.append("losses differ from those of an undisturbed run")
            if left := run.survivors():
                broken.append(f"{len(left)} processes left")
            yield Outcome(
                fault=f"kill -9 of rank {rank}, twice, under torchrun {meeting[0]} --max-restarts 2",
                tried=2,
                message=next(iter(error_lines(run.output())), ""),
                broken=tuple(broken),
            )


def _kill_at(run: Launch, victim: str, iteration: int, metrics: Path) -> None:
    run.wait_for(lambda: iteration in _losses(metrics) and victim in run.processes())
    os.kill(run.processes()[victim], signal.SIGKILL)
