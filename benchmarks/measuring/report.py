"""The machine and the device of a measurement, and reports as tables between the markers of a page.

Torch and DeepSpeed are imported within functions: tables are made where they are missing, too.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.measuring.worlds import RankFailed
from deepspeed_ext.runtime.cuda_environment import prepare_cuda_environment


def has_gpu() -> bool:
    """Whether DeepSpeed takes a CUDA device here."""
    import torch
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name() == "cuda" and torch.cuda.is_available()


def software() -> dict[str, str]:
    """Names and versions that a result depends on."""
    import torch
    from deepspeed.accelerator import get_accelerator

    named = {"torch": torch.__version__, "deepspeed": importlib.metadata.version("deepspeed")}
    if has_gpu():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        named = {
            "GPU": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {memory:.0f} GiB",
            "driver": _driver_version(),
            **named,
            "CUDA": str(torch.version.cuda),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    else:
        named = {"device": get_accelerator().device_name(), **named}
    return named | {"Python": platform.python_version(), "commit": _commit()}


@dataclass(frozen=True)
class Sharing:
    """A way to give every rank a device."""

    name: str
    variables: Mapping[str, str]
    """Of the environment, the same for all ranks."""
    own: str | None = None
    """Name of a variable that gets another value on each rank; None if there is none."""
    device_each: bool = False
    """Whether every rank has a device of its own."""

    def of_rank(self, rank: int, more: Mapping[str, str]) -> dict[str, str]:
        """Variables that a rank needs, beside those that it inherits."""
        found = {"LOCAL_RANK": str(rank if self.device_each else 0), **self.variables, **more}
        if self.own is not None:
            found[self.own] = f"rank{rank}"
        inherited = {**os.environ, **found}
        prepared = dict(inherited)
        prepare_cuda_environment(prepared, num_pipeline_ranks=1, has_device=has_gpu())
        return found | {name: prepared[name] for name in prepared.keys() - inherited.keys()}


LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    # A plugin of a cluster's network is no help on one host, and NVLink between hosts needs another device.
    "NCCL_NET": "Socket",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    # Messages of all ranks wait on one device: each holds one of its processors.
    "NCCL_MAX_P2P_NCHANNELS": "1",
    "NCCL_MAX_CTAS": "1",
}
"""Ranks with another host name each send over the network; this host's is enough."""

SHARINGS = (
    # NCCL refuses two ranks with one device on one host (init.cc, initTransportsRank): until 2.29 by bus, then by UUID.
    # This variable replaces the name of the host (utils.cc, getHostHash).
    Sharing("one GPU, NCCL_HOSTID", LOOPBACK, own="NCCL_HOSTID"),
    # NCCL 2.30 and later allow it.
    Sharing("one GPU, NCCL_MULTI_RANK_GPU_ENABLE", LOOPBACK | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
)


def possible_sharings(num_ranks: int) -> tuple[Sharing, ...]:
    """Ways to try, best first: gloo on a CPU, a device for each rank where there are enough, one for all."""
    import torch

    if not has_gpu():
        return (Sharing("CPU, gloo", {}),)
    if torch.cuda.device_count() >= num_ranks:
        return (Sharing("a GPU for each rank", {}, device_each=True), *SHARINGS)
    return SHARINGS


def join(timeout_s: float) -> None:
    """Join the other ranks on this rank's device, or over gloo with one thread on a CPU."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from deepspeed_ext.runtime.initialize import init_distributed

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        torch.set_num_threads(1)
    else:
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    backend = accelerator.communication_backend_name() if has_gpu() else "gloo"
    init_distributed(dist_backend=backend, timeout=timedelta(seconds=timeout_s), verbose=False)


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _first_line(command) or "unknown"


def _commit() -> str:
    return _first_line(["git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty"]) or "unknown"


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


BEGIN, END = "<!-- begin results -->", "<!-- end results -->"


def written_between(page: str, results: str) -> str:
    """Return a page with other results between its markers.

    Raises:
        SystemExit: if the page has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"the page has no lines {BEGIN} and {END}: add them at the place of the results")
    return f"{before}{BEGIN}\n\n{results}\n\n{END}{after}"


_LONGEST_CELL = 160


@dataclass
class Section:
    """A table."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    """Cells as text, as many as there are columns, or fewer."""
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Append a row."""
        self.rows.append(tuple(map(str, cells)))

    def guarded(self, name: str, measure: Callable[[], Sequence[object]]) -> bool:
        """Append a name and the cells that a function returns; if it raises, the row has the reason."""
        try:
            self.add(name, *measure())
        except Exception as error:  # A row that fails must not take the others with it.
            traceback.print_exc()
            self.fail(name, error)
            return False
        return True

    def fail(self, name: str, error: Exception) -> None:
        """Append a row with the reason why nothing was measured."""
        text = str(error) if isinstance(error, RankFailed) else f"{type(error).__name__}: {error}"
        self.add(name, f"failed: {one_line(text)}")

    def markdown(self) -> str:
        """The table, with its title above and its notes below."""
        filled = [tuple(_cell(cell) for cell in row) + ("",) * (len(self.columns) - len(row)) for row in self.rows]
        lines = [self.columns, ("---",) * len(self.columns), *filled]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return "\n\n".join([f"### {self.title}", table, *self.notes])


def one_line(text: str) -> str:
    """Return the line of a message with the error; in a traceback, the first line after the last frame."""
    lines = [line for line in text.splitlines() if line.strip()]
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    after = lines[frames[-1] + 1 :] if frames else lines
    return (after or lines or ["no message"])[0].strip()


def markdown(title: str, software: Mapping[str, str], sections: Sequence[Section]) -> str:
    """Return all tables under one heading, after the names of the software."""
    names = ", ".join(f"{name} {version}" for name, version in software.items())
    return "\n\n".join([f"## {title}", names, *(section.markdown() for section in sections)]) + "\n"


def publish(
    title: str, software: Mapping[str, str], sections: Sequence[Section], folder: Path, name: str = "report"
) -> str:
    """Write `report.md` and `report.json`, or files of another name, into a folder, and return the markdown."""
    text = markdown(title, software, sections)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text)
    fields: dict[str, Any] = {
        "title": title,
        "software": dict(software),
        "sections": [asdict(each) for each in sections],
    }
    (folder / f"{name}.json").write_text(json.dumps(fields, indent=1) + "\n")
    return text


def progress(line: str) -> None:
    """Print progress to standard error."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 3]}..."
