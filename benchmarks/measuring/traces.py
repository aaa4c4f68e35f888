"""Traces of `torch.profiler` in Chrome's format: kernels of a step, time in which the device idles, time of the host.

device    |--kernel--|      |---kernel---||copy|        idle: the gap
host      |launch|launch|launch......|sync.........|    waits: at a full queue of the device, and for its end
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

_COPIES = ("gpu_memcpy", "gpu_memset")
_HOST = ("cuda_runtime", "cuda_driver")
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")
"""How calls that launch kernels begin."""


class Call(NamedTuple):
    """A kernel, a copy, or a call of the host; times in microseconds."""

    name: str
    start: float
    duration: float
    thread: tuple[Any, Any] = (0, 0)
    """Process and thread, or device and stream."""

    @property
    def end(self) -> float:
        """Time at its end."""
        return self.start + self.duration


class Total(NamedTuple):
    """All calls of one name."""

    name: str
    count: int
    duration: float
    """Of all together, in microseconds."""


@dataclass(frozen=True)
class Trace:
    """Calls of a step."""

    kernels: list[Call]
    """On a CPU, operators that call no other."""
    copies: list[Call]
    host: list[Call]
    """Calls of CUDA's runtime and driver."""
    of_device: bool = True
    """Whether a device ran the kernels."""

    @property
    def span(self) -> float:
        """Microseconds from the first call to the end of the last."""
        every = [*self.kernels, *self.copies, *self.host]
        return max(call.end for call in every) - min(call.start for call in every) if every else 0.0

    @property
    def busy(self) -> float:
        """Microseconds in which a kernel or a copy runs; those that run at once count once."""
        return covered([*self.kernels, *self.copies])

    @property
    def idle_share(self) -> float:
        """Share of the span in which the device does nothing, in [0, 1]."""
        return 1 - self.busy / self.span if self.span else 0.0

    @property
    def launches(self) -> int:
        """Calls of the host that launch kernels."""
        return sum(call.name.startswith(_LAUNCHES) for call in self.host)

    @property
    def host_time(self) -> float:
        """Microseconds of the host from its first call to its last, less those in which it waits for the device.

        It waits in calls that synchronise, and in launches while the queue of the device is full: these are the time of
        a launch above the median.
        """
        if not self.host:
            return 0.0
        launches = [call.duration for call in self.host if call.name.startswith(_LAUNCHES)]
        usual = median(launches) if launches else 0.0
        waits = sum(max(0.0, each - usual) for each in launches)
        waits += covered(call for call in self.host if "Synchronize" in call.name)
        return max(call.end for call in self.host) - min(call.start for call in self.host) - waits

    def longest(self, count: int) -> list[Total]:
        """The names with most time in kernels, longest first."""
        durations = defaultdict(list)
        for call in self.kernels:
            durations[call.name].append(call.duration)
        totals = [Total(name, len(each), sum(each)) for name, each in durations.items()]
        return sorted(totals, key=lambda total: (-total.duration, total.name))[:count]


def covered(calls: Iterable[Call]) -> float:
    """Microseconds in which at least one call runs."""
    total, until = 0.0, float("-inf")
    for call in sorted(calls, key=lambda call: call.start):
        total += max(0.0, call.end - max(call.start, until))
        until = max(until, call.end)
    return total


def read_trace(document: Mapping[str, Any]) -> Trace:
    """Return the calls of a document of `export_chrome_trace`."""
    by_kind = defaultdict(list)
    for event in document["traceEvents"]:
        if event.get("ph") == "X" and "dur" in event:
            thread = (event.get("pid"), event.get("tid"))
            by_kind[event.get("cat")].append(Call(event["name"], float(event["ts"]), float(event["dur"]), thread))
    kernels, copies, host = (
        [call for kind in kinds for call in by_kind[kind]] for kinds in (("kernel",), _COPIES, _HOST)
    )
    if not (kernels or host):
        return Trace(_innermost(by_kind["cpu_op"]), [], [], of_device=False)
    return Trace(kernels, copies, host)


def _innermost(operators: Iterable[Call]) -> list[Call]:
    """Operators that call no other."""
    ordered = sorted(operators, key=lambda call: (str(call.thread), call.start, -call.duration))
    inner = [one for one, after in pairwise(ordered) if after.thread != one.thread or after.start >= one.end]
    return [*inner, *ordered[-1:]]


def trace_of(profiler: Any) -> Trace:
    """Return the calls that a profiler recorded."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_bytes()))
