"""Measures on the hosts of a hostfile, with DeepSpeed's launcher: it starts this module once on every slot.

The profile comes back on the output of the first rank.
"""

import base64
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.text_files import read_text
from deepspeed_ext.runtime.launch import is_this_host
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.launch.hostfile import parse_hostfile
from megatron_terapipe.launch.launcher import free_port, launcher, remote_words, supervised, variables
from megatron_terapipe.search.measure.machine import Progress, engine_here, measure_together
from megatron_terapipe.search.measure.sizes import MeasuredSizes
from megatron_terapipe.search.price.profile import Profile, parse_profile, profile_to_json

MARK = "measured: "
"""Begin of a line with a part of a message of the first rank; text before it is of the launcher."""

LAST, MORE = "=", "+"
"""Whether the message ends with this line, or continues in the next."""

PART = 3000
"""Characters of a line: launchers cut long ones, and write short ones in one piece."""

LINES_SHOWN = 15
"""Last lines of the other output that are shown if a rank fails."""

SIZES = TypeAdapter(MeasuredSizes)
"""Reads and writes the word of a rank's command line with the sizes that it must measure."""


def measure_hosts(sizes: MeasuredSizes, hostfile: str, *, on_cpu: bool) -> Iterator[Progress | Profile]:
    """Measure on all slots of a hostfile, and yield how far it is; the profile comes last."""
    environment = variables(on_cpu=on_cpu)
    # The launcher sends it to the other hosts, where the package has the same path.
    package = str(Path(__file__).parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    hosts = [host.name for host in parse_hostfile(read_text(hostfile, "--hostfile"), hostfile)]
    words = [launcher(), "--hostfile", hostfile, "--master_port", str(free_port()), "--no_local_rank", "--module"]
    if len(hosts) == 1 and not is_this_host(hosts[0]):
        words.insert(1, "--force_multi")  # DeepSpeed would start its ranks here.
    words += ["megatron_terapipe.search.measure.on_hosts", _encoded(SIZES.dump_json(sizes).decode())]
    remote_words([*words, environment["PYTHONPATH"]], Path.cwd())
    others: deque[str] = deque(maxlen=LINES_SHOWN)
    options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with supervised(words, hosts, **options) as process:
        assert process.stdout is not None
        message = ""
        for line in process.stdout:
            before, mark, part = line.rstrip("\n").partition(MARK)
            if not mark:
                others.append(before)
                continue
            message += part[1:]
            if part[0] == LAST:
                found, message = json.loads(_decoded(message)), ""
                if "error" in found:
                    raise ConfigError(found["error"])
                if "progress" in found:
                    yield Progress(**found["progress"])
                else:
                    yield parse_profile(found["profile"], "the profile of the first rank")
        if code := process.wait():
            print(*others, sep="\n", file=sys.stderr, flush=True)
            raise ConfigError(f"the ranks on {hostfile} could not measure (exit code {code}): see the lines above")


def lines_of(message: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a message of the first rank."""
    text = _encoded(json.dumps(message))
    parts = [text[begin : begin + PART] for begin in range(0, len(text), PART)]
    yield from (f"{MARK}{MORE}{part}" for part in parts[:-1])
    yield f"{MARK}{LAST}{parts[-1]}"


def _encoded(text: str) -> str:
    """Return a text as letters and digits, which pass every shell and launcher as they are."""
    return base64.urlsafe_b64encode(text.encode()).decode()


def _decoded(text: str) -> str:
    return base64.urlsafe_b64decode(text).decode()


def main(word: str) -> int:
    """Measure the sizes in a word of the command line, and return the exit code; the first rank prints the profile."""
    import torch.distributed as dist

    sizes, begun = SIZES.validate_json(_decoded(word)), time.perf_counter()
    engine = None
    try:
        # The others wait for the first host where they meet.
        if os.environ["CROSS_RANK"] == os.environ["LOCAL_RANK"] == "0":
            report(Progress(0.0, "the engine"))
            engine = engine_here(sizes, int(os.environ["LOCAL_SIZE"]))
        measure_together(report, sizes, sizes.budget_s - (time.perf_counter() - begun), engine)
        # Threads of a group that stays open can abort the end of the process.
        dist.barrier()
        dist.destroy_process_group()
    except UserError as error:
        print(*lines_of({"error": str(error)}), sep="\n", flush=True)
        return 2
    return 0


def report(found: Any) -> None:
    """Print a progress or a profile for the launching process, on the first rank only."""
    if os.environ["RANK"] != "0":
        return
    message = {"profile": profile_to_json(found)} if isinstance(found, Profile) else {"progress": found._asdict()}
    for line in lines_of(message):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
