"""Starts and ends DeepSpeed's launcher, which starts ranks here and on other hosts."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from megatron_terapipe.errors import ConfigError

END_S = 10.0
"""Seconds that ranks have to end once they are told to."""

OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a launcher that may have started this process."""

SENT = "MLFLOW"
"""Begin of variables that DeepSpeed sends to other hosts and prints, passwords among them; the trainer reads none."""

LISTENING_PORTS = range(20_000, 32_768)
"""Ports below those that systems give to outgoing connections, one of which may take a free port before it is used."""


def launcher() -> str:
    """Return the path of the command `deepspeed`.

    Raises:
        ConfigError: if it is not installed.
    """
    found = shutil.which("deepspeed") or str(Path(sys.executable).with_name("deepspeed"))
    if not Path(found).exists():
        raise ConfigError("the command deepspeed is not installed: install DeepSpeed, or put it on the PATH")
    return found


def variables(*, on_cpu: bool) -> dict[str, str]:
    """Return the environment of a launch: this process's, without a launcher's variables, and MLflow's passwords.

    Args:
        on_cpu: whether DeepSpeed must be told to take the CPU.
    """
    found = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
    found = {name: value for name, value in found.items() if not name.startswith(SENT)}
    return found | ({"DS_ACCELERATOR": "cpu"} if on_cpu else {})


def free_port() -> int:
    """Return a port that is free on this host, and that no connection will be given by chance.

    Raises:
        ConfigError: if none of many is free.
    """
    for port in random.sample(LISTENING_PORTS, k=100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise ConfigError(f"no free port of 100 tried in {LISTENING_PORTS}: end some of the servers on this host")


def end(process: "subprocess.Popen[bytes] | subprocess.Popen[str]") -> None:
    """End launcher and ranks, which are one process group."""
    for each in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, each)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
