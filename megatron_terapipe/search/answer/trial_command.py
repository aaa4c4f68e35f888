"""`trial`: run the best strategies for real, record them, and learn from them."""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from deepspeed_ext.plan.terminal import STANDARD_OUTPUT, add_json_flag
from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.command.hosts import hosts_of
from megatron_terapipe.command.train import launch_command, split, trainer_file
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.launch.launcher import free_port, remote_words, supervised, variables
from megatron_terapipe.search.answer.answer import predicted_part, question
from megatron_terapipe.search.answer.flags import (
    MANY,
    above_zero,
    add_batch_flag,
    add_constraint_flags,
    add_headroom_flag,
    add_question_flags,
    progress_bar,
    read_strategies,
)
from megatron_terapipe.search.answer.json_documents import Errors, TrialDocument, TrialResult
from megatron_terapipe.search.answer.output_files import Launch, launch_of, write_document
from megatron_terapipe.search.answer.question import Question, question_of
from megatron_terapipe.search.learn.costs import Costs
from megatron_terapipe.search.learn.trials import GIBIBYTE, Trial, read_trials
from megatron_terapipe.search.learn.validation import relative_errors, spearman, top1_regret
from megatron_terapipe.search.machine.cluster import cluster_document, model_document
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.price_document import PredictedPart
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.search.rank.rules import broken_rule
from megatron_terapipe.search.rank.search import search, with_batch
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.texts import strategy_text

HELP = (
    "Run the best strategies of a search, or of a file, for a few iterations each, with DeepSpeed's "
    "launcher. Add a line for each run to a file of trials, calibrate on them, and print the errors of "
    "predictions before and after. Strategies that the file already contains are not run again, so an "
    "interrupted command continues where it stopped."
)

EXAMPLES = """\
examples:
  %(prog)s model.json cluster.json --global-batch-size 8 --top 3
  %(prog)s llama2-7b hostfile --device A100-80GB --global-batch-size 64 --rounds 3 --trials trials.jsonl"""


WARM_UP_ITERATIONS = 3
"""Iterations that are slower than the rest: the first makes the optimizer's state, the next ones the allocator's."""

MEMORY_WORDS = ("out of memory", "outofmemory", "can't allocate memory", "cannot allocate memory")
"""Messages of CUDA, torch's allocators and the operating system when memory runs out, in lower case."""

HOST_PREFIX = re.compile(r"^[\w.-]+: (?=(error|[\w.]+(Error|Exception)): )")
"""Name of a host that pdsh puts before a line about an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of a run."""

    iteration_time_s: float | None
    """Median seconds of the iterations after the warm-up; None = it failed."""
    peak_memory_bytes: float | None = None
    """Bytes of the fullest rank; None = the run ended before its measurement."""
    out_of_memory: bool = False
    reason: str | None = None
    """Why it failed, in one line; None if it did not."""

    def in_words(self) -> str:
        """Return the result in one line."""
        if self.iteration_time_s is None:
            return f"failed: {'out of memory; ' if self.out_of_memory else ''}{self.reason}"
        peak = "" if self.peak_memory_bytes is None else f", {self.peak_memory_bytes / 2**30:.2f} GiB"
        return f"measured {self.iteration_time_s:.4g} s{peak}"


def outcome_of(exit_code: int, output: str, metrics: Path, *, iterations: int) -> Outcome:
    """Read the outcome of a run. One that has done all its iterations is measured, however it ended."""
    times, peaks = read_metrics(metrics)
    peak = max(peaks, default=None)
    if times and (exit_code == 0 or len(times) >= iterations):
        # Of a short run, its later half.
        steady = times[min(WARM_UP_ITERATIONS, len(times) // 2) :]
        return Outcome(iteration_time_s=median(steady), peak_memory_bytes=peak)
    lowered = output.lower()
    # The operating system kills a rank when memory runs out.
    killed = exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL) or "return code = -9" in lowered
    return Outcome(
        iteration_time_s=None,
        peak_memory_bytes=peak,
        out_of_memory=killed or any(words in lowered for words in MEMORY_WORDS),
        reason=failure(exit_code, output),
    )


def over_rounds(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the result of several runs: the median of those that were measured, if any was."""
    measured = [each for each in outcomes if each.iteration_time_s is not None]
    if not measured:
        return outcomes[-1]
    peaks = [each.peak_memory_bytes for each in measured if each.peak_memory_bytes is not None]
    return Outcome(
        iteration_time_s=median(each.iteration_time_s or 0.0 for each in measured),
        peak_memory_bytes=max(peaks, default=None),
    )


def read_metrics(path: Path) -> tuple[list[float], list[float]]:
    """Seconds of each iteration, and peak bytes where they were measured, of a metrics file."""
    times, peaks = [], []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                values = json.loads(line)
            except ValueError:
                continue  # The run died while it wrote.
            if "iteration_time_s" in values:
                times.append(float(values["iteration_time_s"]))
                peaks += [float(peak) for peak in values.get("peak_memory_bytes") or ()]
    return times, peaks


def failure(exit_code: int, output: str) -> str:
    """Reason for a failed run: our own line, or the last line of a traceback, or the exit code."""
    # Over several hosts, each line begins with the name of its host.
    lines = [HOST_PREFIX.sub("", line.strip()) for line in output.splitlines() if line.strip()]
    ours = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    raised = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception")) and " " in line]
    # After a launcher's prefix, such as [rank0]:
    reasons = ours or raised or [f"it ended with exit code {exit_code}"]
    return reasons[-1][:300]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSettings:
    """How strategies are run."""

    iterations: int
    timeout_s: float
    """After which a run is ended and counts as failed."""
    trainer: Path
    flags: tuple[str, ...] = ()
    """More flags for it; without data among them, tokens are random."""
    keep: Path | None = None
    """Directory that keeps files and logs of each run; None = none is kept."""


def run_strategy(strategy: Strategy, problem: SearchProblem, settings: TrialSettings, *, name: str) -> Outcome:
    """Run a strategy for a few iterations and return the result."""
    launch = launch_of(strategy, problem)
    # Other hosts must see the folder, too, as they see the current one.
    with TemporaryDirectory(prefix="trial-", dir=Path.cwd() if launch.many_nodes else None) as scratch:
        directory = Path(scratch) if settings.keep is None else settings.keep / name
        launch.write(str(directory))
        metrics = directory / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        words = command(launch, directory, settings, metrics)
        if launch.many_nodes:
            words = remote_words(words, directory)
        hosts = [node.name for node in launch.nodes] if launch.many_nodes else []
        exit_code, output = run_launcher(words, directory, settings.timeout_s, hosts=hosts, on_cpu=launch.on_cpu)
        if exit_code is None:
            return Outcome(iteration_time_s=None, reason=f"it took longer than {settings.timeout_s:g} s")
        outcome = outcome_of(exit_code, output, metrics, iterations=settings.iterations)
        if outcome.iteration_time_s is None and "error: " in output and not outcome.out_of_memory:
            # What the trainer refuses at once is our mistake, not a property of the strategy.
            raise ConfigError(f"the trainer refused {name}: {failure(exit_code, output)}")
        return outcome


def command(launch: Launch, directory: Path, settings: TrialSettings, metrics: Path) -> list[str]:
    """Return the words of the launch command; the files of the launch are in the directory."""
    has_data = any(flag in settings.flags for flag in ("--data-path", "--train-data-path", "--mock-data"))
    words = [
        *(*launch.where(str(directory)), "--master-port", str(free_port()), str(settings.trainer)),
        *launch.trainer_flags(str(directory)),
        *("--train-iters", str(settings.iterations), "--eval-iters", "0", "--log-interval", "1"),
        *("--metrics-file", str(metrics)),
        *([] if has_data else ["--mock-data"]),
        *settings.flags,
    ]
    launching, training = split(words)
    return launch_command(launching, training, hosts_of(launching))


def run_launcher(
    words: Sequence[str], directory: Path, timeout_s: float, *, hosts: Sequence[str] = (), on_cpu: bool
) -> tuple[int | None, str]:
    """Run a command, and return its exit code, None if it took too long, and its output."""
    log = directory / "log.txt"
    with log.open("w") as output:
        options = {"env": variables(on_cpu=on_cpu), "cwd": directory, "stdout": output, "stderr": subprocess.STDOUT}
        with supervised(words, hosts, **options) as process:
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
    return code, log.read_text(errors="replace")


def explicit(strategy: Strategy, workload: Workload) -> Strategy:
    """Return a strategy with explicit token slices and stages: equal for two that run the same."""
    return replace(
        strategy,
        token_slices=strategy.cut(workload.seq_length).lengths,
        stage_partition=tuple(workload.partition(strategy.stage_partition, strategy.num_stages).bounds),
        global_batch_size=strategy.num_sequences,
    )


SOURCE = "terapipe-trial"


class PendingTrial(NamedTuple):
    """A strategy to run."""

    trial_id: str
    strategy: Strategy
    runs: list[Outcome]
    """Of the rounds before an interruption."""


@dataclass(frozen=True, kw_only=True)
class Journal:
    """The trials of one question in a file."""

    path: Path
    """The file; others' trials in it stay."""
    problem: SearchProblem
    """Model, cluster, precision and batch; the trainer can build the model."""

    @property
    def group(self) -> str:
        """Name of the trials that are ranked together: model, cluster, precision, batch."""
        asked = self.problem
        model = sha256(json.dumps(self._model, sort_keys=True).encode()).hexdigest()[:8]
        return (
            f"{asked.workload.name} ({model}) on {asked.cluster.name}, {asked.precision}, "
            f"batch {asked.global_batch_size}"
        )

    def trials(self) -> list[Trial]:
        """Trials of this group in the file."""
        if not self.path.exists() or not read_text(self.path, "--trials").strip():
            return []
        return [trial for trial in read_trials(self.path) if (trial.source, trial.group) == (SOURCE, self.group)]

    def pending(self, strategies: Iterable[Strategy], rounds: int = 1) -> list[PendingTrial]:
        """Return the strategies that were not run yet, or in too few rounds, each once."""
        trials = self.trials()
        known = {self._key(trial.strategy): trial for trial in trials}
        found: dict[object, PendingTrial] = {}
        for strategy in strategies:
            key = self._key(strategy)
            trial = known.get(key)
            if trial is None:
                found.setdefault(key, PendingTrial(f"trial-{len(trials) + len(found) + 1}", strategy, []))
            elif 0 < len(trial.round_times_s) < min(trial.rounds, rounds):
                failure = str(trial.ignored.get("measured.reason", "it failed"))
                runs = [
                    Outcome(
                        iteration_time_s=time_s,
                        peak_memory_bytes=trial.peak_memory_bytes,
                        out_of_memory=time_s is None and bool(trial.out_of_memory),
                        reason=failure if time_s is None else None,
                    )
                    for time_s in trial.round_times_s
                ]
                found[key] = PendingTrial(trial.id, strategy, runs)
        return list(found.values())

    def write(self, strategy: Strategy, runs: Sequence[Outcome], *, trial_id: str, rounds: int = 1) -> None:
        """Add a line with a trial; `runs`: one for each round that was run."""
        outcome, cluster = over_rounds(runs), self.problem.cluster
        measured: dict[str, Any] = {"iteration_time_s": outcome.iteration_time_s}
        if outcome.reason is not None:
            measured["reason"] = outcome.reason
        if rounds > 1:
            measured |= {"rounds": rounds, "round_times_s": [each.iteration_time_s for each in runs]}
        if (peak := outcome.peak_memory_bytes) is not None:
            measured |= {"peak_memory_bytes": peak, "peak_memory_gb": round(peak / GIBIBYTE, 3)}
        measured["out_of_memory"] = outcome.out_of_memory
        document = {
            "source": SOURCE,
            "id": trial_id,
            "group": self.group,
            "software": TERAPIPE.name,
            "precision": self.problem.precision,
            "model": self._model,
            "cluster": cluster_document(cluster.nodes, cluster.name or "cluster"),
            "strategy": explicit(strategy, self.problem.workload).to_json(),
            "measured": measured,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(document, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"--trials {self.path} cannot be written ({error.strerror}): name another") from None

    def _key(self, strategy: Strategy) -> Strategy:
        """Return the same key for strategies that run the same."""
        return replace(explicit(strategy, self.problem.workload), placement=None)

    @property
    def _model(self) -> dict[str, Any]:
        assert self.problem.workload.config is not None, "checked by the command"
        return model_document(self.problem.workload.config)


def trial_document(journal: Journal, costs: Costs, notes: Sequence[str]) -> TrialDocument:
    """Return the answer of `trial` as a document."""
    trials = journal.trials()
    measured = [trial for trial in trials if trial.iteration_time_s is not None]
    # What a search with --calibrate on this file predicts.
    calibrated = costs.calibrated_on(trials) if measured else None
    entries = [
        TrialResult(
            trial_id=trial.id,
            strategy=trial.strategy,
            iteration_time_s=trial.iteration_time_s,
            peak_memory_bytes=trial.peak_memory_bytes,
            out_of_memory=trial.out_of_memory,
            predicted=_predicted(trial, journal, costs),
            calibrated=None if calibrated is None else _predicted(trial, journal, calibrated),
        )
        for trial in trials
    ]
    done = [(entry.iteration_time_s, entry) for entry in entries if entry.iteration_time_s is not None]
    return TrialDocument(
        **question(journal.problem, journal.problem.global_batch_size),
        notes=list(notes),
        trials=str(journal.path),
        entries=entries,
        errors=_errors([(time_s, entry.predicted) for time_s, entry in done]),
        errors_calibrated=_errors([(time_s, entry.calibrated) for time_s, entry in done if entry.calibrated]),
    )


def print_trials(document: TrialDocument) -> None:
    """Print the trials, fastest first, and the errors of their predictions."""
    measured = [(entry.iteration_time_s, entry) for entry in document.entries if entry.iteration_time_s is not None]
    if not measured:
        print("nothing was measured")
        return
    print(f"\n{'measured s':>10}  {'before':>16}  {'calibrated':>16}  strategy")
    for time_s, entry in sorted(measured, key=lambda each: each[0]):
        cells = [_beside(time_s, predicted) for predicted in (entry.predicted, entry.calibrated)]
        print(f"{time_s:>10.4g}  {cells[0]:>16}  {cells[1]:>16}  {strategy_text(entry.strategy)}")
    for name, errors in (("before", document.errors), ("calibrated on them", document.errors_calibrated)):
        if errors is not None:
            words = [f"mean error {errors.mean_error:.1%}"]
            if errors.spearman is not None:
                words.append(f"Spearman {errors.spearman:.2f}")
            if errors.top1_regret is not None:
                words.append(f"the one predicted best is {errors.top1_regret:.1%} slower than the best")
            print(f"{name}: {', '.join(words)}")
    print(f"{document.trials} has {len(document.entries)} trials of this question")


def _predicted(trial: Trial, journal: Journal, costs: Costs) -> PredictedPart:
    pricing = costs.pricing_on(journal.problem.cluster)
    prediction = costs.with_interval(trial.strategy, pricing.predict(trial.strategy), pricing)
    return predicted_part(journal.problem, trial.strategy, prediction)


def _errors(pairs: Sequence[tuple[float, PredictedPart]]) -> Errors | None:
    """Return the errors of predictions of measured seconds; None for no trials."""
    measured = np.array([time_s for time_s, _ in pairs])
    predicted = np.array([each.iteration_time_s for _, each in pairs])
    if not pairs:
        return None
    return Errors(
        mean_error=float(np.mean(np.abs(relative_errors(measured, predicted)))),
        spearman=spearman((measured, predicted)),
        top1_regret=top1_regret((measured, predicted)),
    )


def _beside(measured_s: float, predicted: PredictedPart | None) -> str:
    if predicted is None:
        return ""
    return f"{predicted.iteration_time_s:.4g} ({predicted.iteration_time_s / measured_s - 1:+.0%})"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_question_flags(parser)
    group = parser.add_argument_group("runs")
    add_batch_flag(group)
    group.add_argument("--top", type=MANY, default=3, metavar="K", help="strategies of the search to run (default: 3)")
    add_headroom_flag(group)
    group.add_argument("--strategies", metavar="S.jsonl", help="run the strategies of this file instead, one per line")
    group.add_argument("--iterations", type=MANY, default=10, metavar="N", help="iterations of each run (default: 10)")
    group.add_argument(
        "--rounds",
        type=MANY,
        default=1,
        metavar="N",
        help=(
            "run every strategy so often, all of them in turn, and take the median: 3 where other work disturbs the "
            "machines (default: 1)"
        ),
    )
    group.add_argument(
        "--timeout-s",
        type=above_zero,
        default=900.0,
        metavar="SECONDS",
        help="end a run that takes longer (default: 900)",
    )
    group.add_argument(
        "--trials",
        metavar="FILE",
        default="trials.jsonl",
        help="file that the results are added to (default: trials.jsonl)",
    )
    group.add_argument(
        "--keep", metavar="DIR", help="keep the strategy, log and metrics of each run in a folder of DIR"
    )
    group.add_argument("--trainer", metavar="FILE", help="path of pretrain_gpt.py (default: in this checkout)")
    group.add_argument(
        "--trainer-flags",
        metavar="WORDS",
        default="",
        help="more flags for the trainer in one text, such as '--data-path PREFIX'; without data, tokens are random",
    )
    add_json_flag(parser.add_argument_group("output"), "the answer")
    add_constraint_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Run and record trials, calibrate on them, compare, and return the exit code: 1 if no trial was measured."""
    if options.iterations < 2:
        raise ConfigError("--iterations 1 has none after the first, which is slower: give 2 or more")
    if options.trainer and not Path(options.trainer).is_file():
        raise ConfigError(f"--trainer {options.trainer} is not a file: name pretrain_gpt.py")
    # JSON on the terminal is the only text there.
    with redirect_stdout(sys.stderr) if options.json == STANDARD_OUTPUT else nullcontext():
        document = _run(options)
    write_document(options.json, document)
    return 0 if any(entry.iteration_time_s is not None for entry in document.entries) else 1


def _run(options: argparse.Namespace) -> TrialDocument:
    """Run the missing trials, print them with their predictions, and return the answer."""
    asked, notes = question_of(options)
    problem, costs = asked.problem, asked.costs
    if problem.workload.config is None:
        raise ConfigError(f"{options.model} lists layers, which the trainer cannot build: give a model by its fields")
    print(*(f"note: {note}" for note in (*notes, *costs.notes)), sep="\n", file=sys.stderr)
    journal = Journal(path=Path(options.trials), problem=problem)
    settings = TrialSettings(
        iterations=options.iterations,
        timeout_s=options.timeout_s,
        trainer=Path(options.trainer).absolute() if options.trainer else Path(trainer_file()),
        flags=tuple(shlex.split(options.trainer_flags)),
        keep=Path(options.keep).absolute() if options.keep else None,
    )
    strategies = _strategies(options, asked)
    pending = journal.pending(strategies, options.rounds)
    if len(pending) < len(strategies):
        print(f"{len(strategies) - len(pending)} of {len(strategies)} are in {options.trials} and are not run again")
    if pending:
        rounds = f", in {options.rounds} rounds of all of them" if options.rounds > 1 else ""
        number = f"{len(pending)} {'strategy' if len(pending) == 1 else 'strategies'}"
        print(
            f"running {number} for {options.iterations} iterations each{rounds}; a run also takes the time to start "
            f"DeepSpeed, and at most {options.timeout_s:g} s in all\n"
            f"each result is added to {options.trials}: an interrupted command continues where it stopped",
            flush=True,
        )
    try:
        _run_all(pending, journal, settings, costs, rounds=options.rounds)
    finally:
        # Results are shown after an interruption, too.
        document = trial_document(journal, costs, (*notes, *costs.notes))
        print_trials(document)
        if document.errors is not None:
            rank = "" if options.profile is None else f" --profile {options.profile}"
            train = "" if options.profile is None else f" --op-profile {options.profile}"
            print(
                f"next: terapipe search rank {options.model} {options.cluster} --global-batch-size "
                f"{options.global_batch_size}{rank} --calibrate {options.trials}\n"
                f"  or: pretrain_gpt.py --strategy auto --cluster {options.cluster}{train} "
                f"--op-calibration {options.trials}"
            )
    return document


def _strategies(options: argparse.Namespace, asked: Question) -> list[Strategy]:
    """Return the strategies to run, the most promising first."""
    problem = asked.problem
    if options.strategies:
        batch = problem.global_batch_size
        found = [with_batch(each, batch) for each in read_strategies(options.strategies)]
        for each in found:
            if (reason := broken_rule(each, problem)) is not None:
                raise ConfigError(f"{options.strategies}: {reason}: leave this strategy out")
            if each.global_batch_size != batch:
                raise ConfigError(
                    f"{options.strategies} has a strategy of global_batch_size {each.global_batch_size}, and "
                    f"--global-batch-size is {batch}: trials of one file are compared, so give them one batch"
                )
        return found
    with progress_bar() as progress:
        result = search(problem, asked.choices, asked.costs.pricing_on, top=options.top, progress=progress)
    if not result.entries:
        raise ConfigError("no strategy can run: `terapipe search rank --explain` with the same flags explains it")
    return [entry.strategy for entry in result.entries]


def _run_all(
    pending: Sequence[PendingTrial], journal: Journal, settings: TrialSettings, costs: Costs, *, rounds: int
) -> None:
    """Run every strategy in its missing rounds, and record each run at once."""
    pricing = costs.pricing_on(journal.problem.cluster)
    queue = [each for number in range(rounds) for each in pending if len(each.runs) <= number]
    started = perf_counter()
    for done, (name, strategy, runs) in enumerate(queue):
        left = f", about {(perf_counter() - started) / done * (len(queue) - done):.0f} s left" if done else ""
        predicted = f"predicted {pricing.predict(strategy).iteration_time_s:.4g} s"
        print(f"{done + 1}/{len(queue)}{left}  {strategy_text(strategy)}  {predicted}", end="", flush=True)
        runs.append(run_strategy(strategy, journal.problem, settings, name=name))
        print(f", {runs[-1].in_words()}", flush=True)
        journal.write(strategy, runs, trial_id=name, rounds=rounds)
