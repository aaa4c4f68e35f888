"""The machine, its software, and how quiet it is."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import psutil


def machine() -> str:
    """Return processor, cores and memory, in words."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}, {memory:.0f} GiB"


def software() -> dict[str, str]:
    """Return the versions that matter, by name."""
    return {"Python": platform.python_version()} | {name: version(name) for name in ("torch", "deepspeed", "numpy")}


class Processors:
    """Counts the time of all cores since it was made."""

    def __init__(self) -> None:
        self._start = self._now()

    def _now(self) -> Mapping[str, float]:
        return psutil.cpu_times()._asdict()

    def shares(self, own_s: float) -> tuple[float, float]:
        """Return the shares of the cores' time that other processes took, and that the host of the machine took.

        Args:
            own_s: seconds of processor time that the processes of the benchmark took.
        """
        spent = {name: after - self._start[name] for name, after in self._now().items()}
        # Linux counts guests within user time, too.
        total = sum(seconds for name, seconds in spent.items() if not name.startswith("guest"))
        stolen = spent.get("steal", 0.0)
        busy = total - spent["idle"] - spent.get("iowait", 0.0) - stolen
        return max(0.0, (busy - own_s) / total), stolen / total
