"""Programs for a shell that need no second to start: processes forked from a server that has imported the packages.

`programs()` is a folder with `python`, `terapipe` and `deepspeed`, for the start of PATH. Each is a small client: it
sends its words, folder, environment and open files to the server, passes signals on, and ends as the forked process
does. That process finds what a new one would: its own words, environment, `sys.path` and `__main__`. Its
`sys.executable` is one of these programs, so that DeepSpeed's launchers and ranks of `terapipe train` are warm, too.
`deepspeed` starts ranks on this host and ends all of them when one fails.
"""

import argparse
import atexit
import ctypes
import importlib
import json
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import cache, partial
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_terapipe.command.main import COMMANDS
from megatron_terapipe.launch.launcher import free_port
from tests.distributed import fork_server
from tests.end_to_end.launching import TIMEOUT_S, environment

NAMES = ("python", "python3", "terapipe", "deepspeed")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ONLY_FLAGS = "WARM_PROGRAMS_ONLY_READ_FLAGS"
"""Variable with which a program ends, successfully, as soon as its flags are read."""
PR_SET_PDEATHSIG = 1

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
pid = int(server.recv(16))
for number in {signals}:
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(server.recv(16))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@cache
def programs() -> Path:
    """Start the server, which ends with this process, and return the folder of its programs."""
    folder = Path(tempfile.mkdtemp(prefix="warm-programs-"))
    address = f"\0{folder}"
    words = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep='\\n')"]
    paths = subprocess.run(words, env={}, capture_output=True, text=True, check=True).stdout.splitlines()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    fork_server.Process(target=_serve, args=(listener, paths), daemon=True).start()
    signals = tuple(map(int, PASSED_ON))
    for name in NAMES:
        (folder / name).write_text(CLIENT.format(python=sys.executable, address=address, signals=signals))
        (folder / name).chmod(0o755)
    return folder


def variables(**more: str) -> dict[str, str]:
    """Environment of a user's shell on a host without GPUs, with our programs first."""
    found = environment(**more)
    del found["PYTHONPATH"]
    return found | {"PATH": os.pathsep.join([str(programs()), found.get("PATH", "")])}


def run(
    command: str | Sequence[str], folder: Path, *, timeout_s: float = TIMEOUT_S, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run words, or lines of a shell, in a folder, and return what became of them.

    Args:
        more: variables of the environment.
    """
    words = ["bash", "-ec", command] if isinstance(command, str) else command
    return subprocess.run(
        words, cwd=folder, env=variables(**more), capture_output=True, text=True, timeout=timeout_s, check=False
    )


def _serve(listener: socket.socket, paths: list[str]) -> None:
    for module in ("numba", "scipy.optimize", *(command.module for command in COMMANDS.values())):
        importlib.import_module(module)
    tests_run = multiprocessing.parent_process()
    assert tests_run is not None
    keepers: set[int] = set()
    while tests_run.sentinel not in wait([listener, tests_run.sentinel]):
        keepers -= {pid for pid in keepers if os.waitpid(pid, os.WNOHANG)[0]}
        connection, _ = listener.accept()
        keeper = os.fork()
        if keeper == 0:
            listener.close()
            _keep(connection, paths)
        connection.close()
        keepers.add(keeper)


def _keep(connection: socket.socket, paths: list[str]) -> None:
    """Run the program that a client asks for, and tell it the end; kill the program when the client has gone."""
    length, files, *_ = socket.recv_fds(connection, 8, 3)
    request = connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
    words, folder, environment = json.loads(request)

    def program() -> None:
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        # A rank whose launcher is not above it would be an orphan.
        os.environ.pop("CROSS_RANK", None)
        os.chdir(folder)
        sys.stdin, sys.stdout, sys.stderr = (open(number, "r" if number == 0 else "w") for number in range(3))
        sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *paths]
        # What it starts is warm, too: DeepSpeed's launchers, and ranks.
        sys.executable = str(Path(words[0]).with_name("python"))
        _run(Path(words[0]).name, words[1:])

    pid = _forked(program)
    for file in files:
        os.close(file)
    connection.sendall(f"{pid:16}".encode())
    end = os.pidfd_open(pid)
    if end not in wait([connection, end]):
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        connection.sendall(f"{code:16}".encode())
    finally:
        os._exit(0)


def _forked(program: Callable[[], object]) -> int:
    """Fork a process that runs a program and ends as an interpreter does; return its number."""
    pid = os.fork()
    if pid:
        return pid
    code: object = 1
    try:
        # It ends with the process above it, and is a main process to multiprocessing.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
        multiprocessing.process._children = set()  # type: ignore[attr-defined]
        multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
        # Neither do the processes that it spawns import anything again.
        multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.get_context("fork")  # type: ignore[attr-defined]
        atexit._clear()
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        program()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    try:
        if isinstance(code, str):
            print(code, file=sys.stderr)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code if isinstance(code, int) else 1)


def _run(name: str, words: list[str]) -> None:
    """Run a program in this process, and raise what it raises."""
    if ONLY_FLAGS in os.environ and name != "deepspeed":
        parse = argparse.ArgumentParser.parse_args

        def only_parse(*given: Any, **named: Any) -> None:
            parse(*given, **named)
            sys.exit()

        argparse.ArgumentParser.parse_args = only_parse  # type: ignore[assignment]
    if name == "deepspeed":
        sys.exit(_launch(words))
    if name == "terapipe":
        sys.argv = [name, *words]
        from megatron_terapipe.command.main import main

        sys.exit(main())
    while words[0] in ("-u", "-I", "-s"):
        words = words[1:]
    if words[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *words[2:]], [""]
        main_module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main_module))  # noqa: S102 - as `python -c` does
    elif words[0] == "-m":
        sys.argv, sys.path[:0] = words[1:], [os.getcwd()]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = words, [str(Path(words[0]).absolute().parent)]
        runpy.run_path(words[0], run_name="__main__")


def _launch(words: list[str]) -> int:
    """Run ranks on this host, and return the first code that is not 0; the other ranks are then ended."""
    parser = argparse.ArgumentParser(prog="deepspeed")
    parser.add_argument("--num_accelerators", "--num_gpus", type=int, default=2)
    parser.add_argument("--master_port", type=int, default=0)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("--no_local_rank", action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    words, at = ["-m"] * options.module + options.program, 1 + options.module
    size, port = options.num_accelerators, options.master_port or free_port()
    place = {"WORLD_SIZE": size, "LOCAL_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks: set[int] = set()
    for rank in range(size):
        local = [f"--local_rank={rank}"] * (not options.no_local_rank)
        variables = place | {"RANK": rank, "LOCAL_RANK": rank}
        ranks.add(_forked(partial(_rank, variables, [*words[:at], *local, *words[at:]])))

    def end_ranks(number: int, _: object = None) -> None:
        for rank in ranks:
            os.kill(rank, number)

    for number in PASSED_ON:
        signal.signal(number, end_ranks)
    first = 0
    while ranks:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        ranks.discard(pid)
        if code and not first:
            first = code
            end_ranks(signal.SIGTERM)
    return first


def _rank(variables: dict[str, object], words: list[str]) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    _run("python", words)
