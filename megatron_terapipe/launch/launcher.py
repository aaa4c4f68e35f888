"""DeepSpeed's launcher on this host and on others: words that remote shells may read, free ports, start and end.

DeepSpeed's pdsh launcher puts words with blanks between double quotes, and quotes no other words (`PDSHRunner` in
deepspeed/launcher/multinode_runner.py, 0.19.8): a path with `;` or `$(...)` would run a command on every host.
A pattern of layers such as `([0]*3+[1])*8` or `M-*-` gets a blank at its end, without which the trainer reads it.
"""

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.launch import supervisor

_WORD = re.compile(r"[\w@+=:,./ -]*")
_PATTERN = re.compile(r"(--[\w-]+=)?[][\d,+()*A-Z|-]+")
_FOLDER = re.compile(r"[\w@+=:,./-]*")
"""Of the folder that is entered on every host, which DeepSpeed never quotes."""

RULE = "which the shells of other hosts would read: use only letters, digits and _@+=:,./-"


def remote_words(words: Iterable[str], folder: Path | None = None) -> list[str]:
    """Return the words of a launch so that shells of other hosts do not change them; raise if they would."""
    sent = [f"{word} " if not _WORD.fullmatch(word) and _PATTERN.fullmatch(word) else word for word in words]
    wrong = next((word for word in sent if not _WORD.fullmatch(word) and not _PATTERN.fullmatch(word[:-1])), None)
    if wrong is None and folder is not None and not _FOLDER.fullmatch(str(folder)):
        wrong = str(folder)
    if wrong is not None:
        raise ConfigError(f"{json.dumps(wrong)} has characters {RULE}")
    return sent


OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a launcher that may have started this process."""

LISTENING_PORTS = range(20_000, 32_768)
"""Ports below those that systems give to outgoing connections, one of which may take a free port before it is used."""

_STRIPES = 64
"""Parts of these ports, of which a process takes one."""


def launcher() -> str:
    """Return the path of the command `deepspeed`."""
    found = shutil.which("deepspeed") or str(Path(sys.executable).with_name("deepspeed"))
    if not Path(found).exists():
        raise ConfigError("the command deepspeed is not installed: install DeepSpeed, or put it on the PATH")
    return found


def variables(*, on_cpu: bool) -> dict[str, str]:
    """Return the environment of a launch: this process's, without a launcher's variables, and MLflow's passwords."""
    # DeepSpeed sends MLflow's variables to other hosts and prints them; the trainer reads none.
    left_out = [name for name in os.environ if name.startswith("MLFLOW") or name in OF_A_LAUNCHER]
    found = {name: value for name, value in os.environ.items() if name not in left_out}
    return found | ({"DS_ACCELERATOR": "cpu"} if on_cpu else {})


def free_port() -> int:
    """Return a port that is free on this host, outside of the ports of outgoing connections."""
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """Return as many different ports that are free."""
    # Concurrent processes choose from disjoint ports, whatever their seeds.
    ports = LISTENING_PORTS[os.getpid() % _STRIPES :: _STRIPES]
    in_any_order = random.SystemRandom().sample(ports, k=len(ports))
    found = list(islice(filter(_is_free, in_any_order), number))
    if len(found) < number:
        raise ConfigError(
            f"{len(found)} of {len(ports)} ports tried in {LISTENING_PORTS} are free, and {number} are needed: end "
            "some of the servers on this host"
        )
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@contextmanager
def supervised(words: Sequence[str], hosts: Sequence[str] = (), **options: Any) -> "Iterator[subprocess.Popen[Any]]":
    """Run a launch, all processes of which, on all hosts, end with the block or with this process."""
    command = [sys.executable, "-I", supervisor.__file__, ",".join(hosts), *words]
    # A new session: only this process gets Ctrl-C, and then ends the launch.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **options)
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        if process.wait() == supervisor.NOT_ENDED:
            print(
                f"warning: processes of a run may be left here or on {', '.join(hosts) or 'no other host'}: end those "
                f"with {supervisor.VARIABLE} among their variables",
                file=sys.stderr,
                flush=True,
            )
