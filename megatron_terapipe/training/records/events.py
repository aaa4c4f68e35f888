"""Events of a run beside its iterations and evaluations: how it started, what it saved and said, and how it ended.

The metrics file has them as lines with the key `event`, for those who look at a run afterwards. Lines of iterations and
of evaluations have no such key.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Machine of a run."""

    host: str
    """Name of the host of the first rank."""
    num_hosts: int
    """Hosts."""
    num_devices: int
    """Devices of all hosts: one for each rank."""
    device: str
    """Name of the first rank's device, as its driver prints it, or `cpu`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """Start of a run, or of one more piece of it: what trains, where, and how."""

    event: ClassVar[str] = "start"

    iteration: int
    """Iterations done before."""
    train_iters: int
    """The last iteration that is planned."""
    command: str
    """Command that started it, as a shell reads it."""
    directory: str
    """Directory in which it was started."""
    versions: Mapping[str, str]
    """Versions of Python and of the packages that compute, by name."""
    machine: Machine
    """Machine that it runs on."""
    model_name: str
    """Name of the preset, or layers x hidden size."""
    parameters: int
    """Parameters, those of a shared weight once."""
    model: Mapping[str, Any]
    """Fields of the model section."""
    precision: Literal["fp32", "fp16", "bf16"]
    """Type of matrix products."""
    strategy: Mapping[str, Any] | None
    """Strategy, as `--strategy` reads it; null if the settings of the run make none that the search knows."""
    strategy_file: str | None = None
    """File of the strategy, if it was read from one: the answer of the search lies beside it."""
    timeline: str | None = None
    """Directory of measured timelines, if some are written."""
    peak_tflops_per_device: float | None = None
    """Peak of a device in TFLOP/s; null where that is unknown."""
    restarts: int = 0
    """Starts before this one, as torch's elastic launcher counts them."""
    checkpoint: str | None = None
    """Checkpoint that it goes on from."""
    time: float = field(default_factory=time.time)
    """Seconds since 1970, in UTC."""

    def as_json(self) -> dict[str, Any]:
        """Return the object of the metrics file."""
        return {"event": self.event, **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint for which training waited."""

    event: ClassVar[str] = "save"

    iteration: int
    """Iterations done."""
    seconds: float
    """Seconds for which training waited."""
    time: float = field(default_factory=time.time)
    """Seconds since 1970, in UTC, when training went on."""

    def as_json(self) -> dict[str, Any]:
        """Return the object of the metrics file."""
        return {"event": self.event, **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A line of the log that is about no iteration or evaluation alone."""

    event: ClassVar[str] = "note"

    iteration: int
    """Iterations done."""
    text: str
    """The line."""
    time: float = field(default_factory=time.time)
    """Seconds since 1970, in UTC."""

    def as_json(self) -> dict[str, Any]:
        """Return the object of the metrics file."""
        return {"event": self.event, **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """End of a run, or of one piece of it. A run that was killed as a whole has none."""

    event: ClassVar[str] = "end"

    iteration: int
    """Iterations done."""
    reason: str
    """Why it ended, in words; empty = the last iteration was reached."""
    failed: bool
    """Whether it ended because something was wrong."""
    time: float = field(default_factory=time.time)
    """Seconds since 1970, in UTC."""

    def as_json(self) -> dict[str, Any]:
        """Return the object of the metrics file."""
        return {"event": self.event, **asdict(self)}


Event = RunStart | Saved | Note | RunEnd
"""Any of them."""
