"""Process groups of different sizes that take turns in one program, each rank a process of its own."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.launch.launcher import free_port


class RankFailed(RuntimeError):
    """A rank raised, died, or gave no answer in time.

    Attributes:
        rank: the first that did.
        refused: whether it raised a `UserError`, which the message then is.
        silent: whether it gave no answer in time.
    """

    def __init__(self, message: str, *, rank: int, refused: bool = False, silent: bool = False) -> None:
        super().__init__(message)
        self.rank, self.refused, self.silent = rank, refused, silent


class World:
    """Ranks that build an object and run functions on it, call by call. Leaving a `with` block ends them.

    Args:
        build: called on every rank; its result is the first argument of functions of `run`; importable by name.
        variables: of the environment, for each rank; they are set before torch is imported.
        timeout_s: how long all ranks may take for one call; None to wait for ever.
        log: file for the output of the ranks; None = the output of this process.

    Raises:
        RankFailed: if a rank cannot build.
    """

    def __init__(
        self,
        size: int,
        build: Callable[..., Any],
        *arguments: Any,
        variables: Sequence[Mapping[str, str]] | None = None,
        timeout_s: float | None = None,
        log: Path | None = None,
        start_method: str = "spawn",
    ) -> None:
        context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            # The server keeps the environment of its start, for the children of others, too.
            forkserver.ensure_running()
        self._timeout_s = timeout_s
        self._pipes: list[Connection] = []
        self._processes = []
        port = free_port()
        for rank in range(size):
            own = _rank_variables(rank, size, port) | dict(variables[rank] if variables else {})
            here, there = context.Pipe()
            arguments_of_rank = (there, own, log, build, arguments)
            process: Any = context.Process(target=_serve, args=arguments_of_rank, daemon=True)
            # A child that is spawned imports modules, and with them torch, before it runs a line of ours.
            with _environment(own):
                process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        try:
            self._answers(timeout_s)
        except RankFailed:
            self.end()
            raise

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call `function(built, *arguments)` on every rank; return the results by rank.

        Raises:
            RankFailed: if a rank raised, died or was too late. The world is then only good to end.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        return self._answers(timeout_s or self._timeout_s)

    def seconds(self, function: Callable[..., Any]) -> float:
        """Time until all ranks are done with a function."""
        start = time.perf_counter()
        self.run(function)
        return time.perf_counter() - start

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the ranks, wherever they are."""
        for process in self._processes:
            process.kill()
            process.join()

    def _answers(self, timeout_s: float | None) -> list[Any]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(waiting), timeout=left)
            if not ready:
                missing = sorted(waiting.values())
                raise RankFailed(f"ranks {missing} gave no answer in {timeout_s:g} s", rank=missing[0], silent=True)
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    kind, answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    raise RankFailed(f"rank {rank} died without a word", rank=rank) from None
                if kind != "done":
                    raise RankFailed(answers[rank], rank=rank, refused=kind == "refused")
        return [answers[rank] for rank in range(len(self._pipes))]


def _serve(
    pipe: Connection, variables: Mapping[str, str], log: Path | None, build: Callable[..., Any], arguments: tuple[Any]
) -> None:
    os.environ.update(variables)
    if log is not None:
        with log.open("a") as opened:
            os.dup2(opened.fileno(), 1)
            os.dup2(opened.fileno(), 2)
    built: list[Any] = []
    # Whoever fails stays, because other ranks may still need it: the parent ends all, or is itself gone.
    with suppress(EOFError):
        if _answer(pipe, lambda: built.append(build(*arguments))):
            while True:
                function, passed = pipe.recv()
                _answer(pipe, partial(function, built[0], *passed))
        pipe.recv()


def _answer(pipe: Connection, call: Callable[[], Any]) -> bool:
    """Send the result of a call, or its error."""
    try:
        pipe.send(("done", call()))
    except UserError as error:
        pipe.send(("refused", str(error)))
    except Exception:
        pipe.send(("failed", traceback.format_exc()))
    else:
        return True
    return False


def _rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    sizes = {"WORLD_SIZE": str(size), "LOCAL_SIZE": str(size)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)} | sizes | meeting


@contextmanager
def _environment(variables: Mapping[str, str]) -> Any:
    """The environment with more variables, for as long as a child is started."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
