"""Starts the trainer as a user does, and reads its files."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import psutil

from megatron_terapipe.command.train import RUNNER
from megatron_terapipe.launch.launcher import free_port

ROOT = Path(__file__).parents[2]
PRETRAIN = ROOT / "pretrain_gpt.py"
DEEPSPEED = Path(sys.executable).with_name("deepspeed")
TIMEOUT_S = 900
"""Longer than any launch takes on a busy machine."""

MODEL = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32".split()
TRAINING = "--micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-2 --split 90,10,0".split()
PIPELINE = "--pipeline-model-parallel-size 2 --num-token-slices 4".split()
EVALUATION = "--eval-interval 3 --eval-iters 2".split()
WITHOUT_ZERO = "--zero-stage 0".split()
"""For launched runs: a rank then imports five seconds less at its start."""
NO_EVALUATION = "--eval-iters 0".split()


def flags(data: Path, *more: object) -> list[str]:
    """Flags of a tiny run; of a flag given twice the last counts."""
    return [*MODEL, *TRAINING, *PIPELINE, *EVALUATION, "--data-path", str(data), *map(str, more)]


def environment(**more: str) -> dict[str, str]:
    """Variables for a child: this checkout, CPUs, and none of a launcher that may have started the tests."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launchers}
    paths = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": paths, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} | more


class Launch:
    """The trainer on two ranks of this machine, started by DeepSpeed's launcher.

    Args:
        folder: where it runs.
        trainer_flags: of the run.
        launcher: words of another launcher.
        **variables: of the environment.
    """

    def __init__(
        self,
        folder: Path,
        trainer_flags: Sequence[str],
        *,
        launcher: Sequence[str] = (),
        **variables: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._mark = f"LAUNCH_UNDER_TEST={uuid.uuid4()}"
        name, value = self._mark.split("=")
        launcher = launcher or (str(DEEPSPEED), "--num_accelerators", "2", "--master_port", str(free_port()))
        command = [*launcher, PRETRAIN, *trainer_flags]
        self._log = (folder / f"log_{value}.txt").open("w+")
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(**{name: value}, **variables),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def running(self) -> bool:
        """Whether the launcher has not ended yet."""
        return self._process.poll() is None

    def wait(self) -> int:
        """The exit code."""
        try:
            return self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"no end within {TIMEOUT_S} s:\n{self.output()}") from None

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while the run continues."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self._process.poll() is None, f"it ended too early:\n{self.output()}"
            assert time.monotonic() < deadline, f"it never happened:\n{self.output()}"
            time.sleep(0.02)

    def kill(self) -> None:
        """End launcher and ranks at once, as a machine that loses power does."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def survivors(self) -> list[int]:
        """Processes of this launch that still run."""
        found = []
        for variables in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if self._mark.encode() in variables.read_bytes():
                    found.append(int(variables.parent.name))
        return found

    def processes(self) -> dict[str, int]:
        """Processes of this launch: `rank 0`, `rank 1`, `the launcher` and `the command` that started it."""
        found = {}
        for pid in self.survivors():
            try:
                words, variables = psutil.Process(pid).cmdline(), psutil.Process(pid).environ()
            except psutil.Error:
                continue
            if "deepspeed.launcher.launch" in words[:5]:
                found["the launcher"] = pid
            elif {str(DEEPSPEED), RUNNER} & {*words[:3]}:
                found["the command"] = pid
            elif "RANK" in variables and any(word.endswith(".py") for word in words[:4]):
                found[f"rank {variables['RANK']}"] = pid
        return found

    def wait_for_all(self, seconds: float) -> list[int]:
        """Wait for the end of every process, and return those that are left.

        Args:
            seconds: longest time to wait.
        """
        deadline = time.monotonic() + seconds
        while (left := self.survivors()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def terapipe() -> list[str]:
    """Words of the launcher as `terapipe train` starts it, for two ranks."""
    return [sys.executable, "-m", RUNNER, "--num_accelerators=2", f"--master_port={free_port()}"]


def launch(folder: Path, trainer_flags: Sequence[str], **variables: str) -> Launch:
    """Launch, with more variables set, and wait for a good end."""
    launched = Launch(folder, trainer_flags, **variables)
    code = launched.wait()
    assert code == 0, launched.output()
    return launched


def train_on_this_rank(trainer_flags: Sequence[str], folder: Path | None = None) -> int:
    """Train on this rank: a function for `tests.distributed.run_distributed`, faster than a launcher.

    Args:
        trainer_flags: of the run.
        folder: to run in, with the output of the rank in a file `log_*.txt`; default: the current one.
    """
    import pretrain_gpt

    before = {*threading.enumerate()}
    if folder is None:
        code = pretrain_gpt.main(trainer_flags)
    else:
        os.chdir(folder)
        with Path(f"log_{uuid.uuid4()}.txt").open("w") as log, redirect_stdout(log):
            code = pretrain_gpt.main(trainer_flags)
    # That of progress bars ends with the process.
    left = {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"} - before
    assert not left, f"threads see the end of the interpreter: {left}"
    return code


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Iterations and evaluations of a metrics file."""
    objects = [json.loads(line) for line in path.read_text().splitlines()]
    metrics = [each for each in objects if "event" not in each]
    return [each for each in metrics if "lm_loss" in each], [each for each in metrics if "lm_loss" not in each]


def losses(path: Path) -> list[float]:
    """Losses of the iterations in a metrics file."""
    return [each["lm_loss"] for each in read_metrics(path)[0]]


def num_metrics(path: Path) -> int:
    """Iterations and evaluations that a metrics file has so far."""
    return sum('"event"' not in line for line in path.read_text().splitlines()) if path.exists() else 0


def error_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error:")]
