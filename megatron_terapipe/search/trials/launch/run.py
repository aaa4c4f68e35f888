"""Launches one strategy with DeepSpeed's launcher, as the search's launch command does."""

import json
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from megatron_terapipe.config.model.model import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.report.launch import Launch, launch_of
from megatron_terapipe.search.report.remote_words import check_remote_words
from megatron_terapipe.search.trials.launch.launcher import free_port, launcher, supervised, variables
from megatron_terapipe.strategy import Strategy

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
    """Bytes of the fullest rank; None = the run did not get so far."""
    out_of_memory: bool = False
    """Whether memory ran out."""
    reason: str | None = None
    """Why it failed, in one line; None if it did not."""


def outcome_of(exit_code: int, output: str, metrics: Path, *, iterations: int) -> Outcome:
    """Read the outcome of a run. One that has done all its iterations is measured, however it ended.

    Args:
        exit_code: of the launcher; below 0 the signal that ended it.
        metrics: the trainer's metrics file, which need not be there.
    """
    times, peaks = read_metrics(metrics)
    peak = max(peaks, default=None)
    if times and (exit_code == 0 or len(times) >= iterations):
        return Outcome(iteration_time_s=median(steady(times)), peak_memory_bytes=peak)
    return Outcome(
        iteration_time_s=None,
        peak_memory_bytes=peak,
        out_of_memory=ran_out_of_memory(exit_code, output),
        reason=failure(exit_code, output),
    )


def over_rounds(outcomes: Sequence[Outcome]) -> Outcome:
    """Return what came of a strategy that was run several times: medians of the runs that were measured, if any was."""
    measured = [each for each in outcomes if each.iteration_time_s is not None]
    if not measured:
        return outcomes[-1]
    peaks = [each.peak_memory_bytes for each in measured if each.peak_memory_bytes is not None]
    return Outcome(
        iteration_time_s=median(each.iteration_time_s or 0.0 for each in measured),
        peak_memory_bytes=max(peaks, default=None),
    )


def steady(times: Sequence[float]) -> Sequence[float]:
    """The iterations behind the warm-up; of a short run, its later half."""
    return times[min(WARM_UP_ITERATIONS, len(times) // 2) :]


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


def ran_out_of_memory(exit_code: int, output: str) -> bool:
    """Whether a failed run ended for lack of memory: its output says so, or the operating system killed a rank."""
    lowered = output.lower()
    killed = exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL) or "return code = -9" in lowered
    return killed or any(words in lowered for words in MEMORY_WORDS)


def failure(exit_code: int, output: str) -> str:
    """Reason for a failed run: our own line, or the last line of a traceback, or the exit code."""
    # Over several hosts, each line stands behind the name of its host.
    lines = [HOST_PREFIX.sub("", line.strip()) for line in output.splitlines() if line.strip()]
    ours = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    raised = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception")) and " " in line]
    # Behind a launcher's prefix, such as [rank0]:
    said = ours or raised or [f"it ended with exit code {exit_code}"]
    return said[-1][:300]


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


def default_trainer() -> Path:
    """`pretrain_gpt.py` of this checkout, else in the current directory.

    Raises:
        ConfigError: if it is in neither.
    """
    for folder in (Path(__file__).parents[4], Path.cwd()):
        if (folder / "pretrain_gpt.py").is_file():
            return folder / "pretrain_gpt.py"
    raise ConfigError(
        "pretrain_gpt.py is neither beside the package nor in the current directory: name it by --trainer"
    )


def run_strategy(
    strategy: Strategy, model: ModelConfig, cluster: Cluster, precision: str, settings: TrialSettings, *, name: str
) -> Outcome:
    """Run a strategy for a few iterations and return the result.

    Args:
        precision: `fp32`, `fp16` or `bf16`.

    Raises:
        ConfigError: if the launcher is not installed or cannot place the ranks so, or other hosts would read a word
            otherwise.
        KeyboardInterrupt: once the run has been ended.
    """
    launch = launch_of(strategy, model, cluster, precision)
    # Other hosts must see the folder, too, as they see the current one.
    with TemporaryDirectory(prefix="trial-", dir=Path.cwd() if launch.many_nodes else None) as scratch:
        directory = Path(scratch) if settings.keep is None else settings.keep / name
        launch.write(str(directory))
        metrics = directory / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        words = command(launch, directory, settings, metrics)
        if launch.many_nodes:
            check_remote_words(words, directory)
        hosts = [node.name for node in launch.nodes] if launch.many_nodes else []
        exit_code, output = _run(words, directory, settings.timeout_s, hosts=hosts, on_cpu=launch.on_cpu)
        if exit_code is None:
            return Outcome(iteration_time_s=None, reason=f"it took longer than {settings.timeout_s:g} s")
        outcome = outcome_of(exit_code, output, metrics, iterations=settings.iterations)
        if outcome.iteration_time_s is None and "error: " in output and not outcome.out_of_memory:
            # What the trainer refuses at once is our mistake, not a property of the strategy.
            raise ConfigError(f"the trainer refused {name}: {failure(exit_code, output)}")
        return outcome


def command(launch: Launch, directory: Path, settings: TrialSettings, metrics: Path) -> list[str]:
    """Return the words of the launch command."""
    where = (
        ["--hostfile", str(directory / "hostfile")]
        if launch.many_nodes
        else ["--num_accelerators", str(launch.strategy.world_size)]
    )
    has_data = any(flag in settings.flags for flag in ("--data-path", "--train-data-path", "--mock-data"))
    return [
        *(launcher(), *where, "--master_port", str(free_port()), str(settings.trainer)),
        *("--strategy", str(directory / "strategy.json"), "--deepspeed-config", str(directory / "ds_config.json")),
        *launch.flags,
        *("--train-iters", str(settings.iterations), "--eval-iters", "0", "--log-interval", "1"),
        *("--metrics-file", str(metrics)),
        *([] if has_data else ["--mock-data"]),
        *settings.flags,
    ]


def _run(
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
