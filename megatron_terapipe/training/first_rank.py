"""Answers that the first rank finds for all ranks, sent over the store where they meet, before their process group.

A search takes seconds, and ranks with other files or releases could find other answers, with which they would hang.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.health.rank_watch import RankWatch
from deepspeed_ext.runtime.launch import AbsentRankError, LaunchEnvironment
from megatron_terapipe.config import Config
from megatron_terapipe.errors import ConfigError, SearchError
from megatron_terapipe.planning import Ask

_READ_S = 30.0
"""Seconds for which the store outlives an error on the first rank, so that all can read it."""

_COUNT_S = 1.0
"""Seconds between two counts by which the first rank shows that it is still at work."""

_LATE_S = 15.0
"""Seconds after the timeout at which a rank ends whose call to the store does not return."""

Limit = Callable[[], AbstractContextManager[None]]
"""Limits the time of a block."""


class FirstRank:
    """The first rank, as all ranks ask it: the same questions in any order. An answer is kept.

    Args:
        watch: called before this rank may wait for the first one; returns the watch of this rank.
    """

    def __init__(self, watch: Callable[[LaunchEnvironment, Config], RankWatch]) -> None:
        # A launcher that starts ranks again may keep its store.
        self._prefix = f"first rank, start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._answers: dict[str, Any] = {}
        self._own_store: Any = None
        self._watch = watch

    def ask(self, config: Config) -> Ask | None:
        """Return the function by which the ranks of a run ask; None where this process searches by itself."""
        launch = LaunchEnvironment.read(local_rank=config.parallel.local_rank)
        if config.training.dry_run or launch.world_size == 1:
            return None
        timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
        return partial(self.answer, self._watch(launch, config), timeout)

    def answer(self, watch: RankWatch, timeout: timedelta, question: str, find: Callable[[], Any]) -> Any:
        """Return on every rank the result of `find` on the first one, through JSON.

        Args:
            timeout: longest time to wait for a sign of the first rank, which may search longer.

        Raises:
            SearchError: on every rank, if `find` raises a UserError.
        """
        # Torch takes seconds to import.
        import torch.distributed as dist

        if question not in self._answers:
            launch = watch.place
            limit = partial(watch.limit, *limit_of_meeting(launch, timeout))
            try:
                store = self._store(launch, timeout)
                self._answers[question] = self._exchanged(store, launch, f"{self._prefix}/{question}", find, limit)
            except (dist.DistNetworkError, dist.DistStoreError) as error:
                raise rendezvous_error(launch, timeout, error) from error
        answer = self._answers[question]
        if "error" in answer:
            raise SearchError(answer["error"])
        return answer["found"]

    @staticmethod
    def _exchanged(store: Any, launch: LaunchEnvironment, key: str, find: Callable[[], Any], limit: Limit) -> Any:
        if launch.rank:
            answer = json.loads(_received(store, key, limit))
            with limit():
                store.add(f"{key}, read", 1)
            return answer
        has_found = threading.Event()

        def count() -> None:
            while not has_found.wait(_COUNT_S):
                store.add(f"{key}, at work", 1)

        threading.Thread(target=count, name="signs of a search", daemon=True).start()
        try:
            text = json.dumps({"found": find()})
        except UserError as error:
            text = json.dumps({"error": str(error)})
        finally:
            has_found.set()
        store.set(key, text)
        answer = json.loads(text)
        end = time.monotonic() + _READ_S
        while "error" in answer and store.add(f"{key}, read", 0) < launch.world_size - 1 and time.monotonic() < end:
            time.sleep(0.05)
        return answer

    def _store(self, launch: LaunchEnvironment, timeout: timedelta) -> Any:
        """Return the store: of the process group once there is one, until then this rank's own connection."""
        import torch.distributed as dist

        from deepspeed_ext.runtime.meeting import meeting_store

        if dist.is_initialized():
            # The group holds the server from now on.
            self._own_store = None
            return dist.distributed_c10d._get_default_store()
        if self._own_store is None:
            launch.export()
            if "MASTER_ADDR" not in os.environ:  # Where mpi4py is installed; DeepSpeed does the same later.
                from deepspeed.comm.comm import mpi_discovery

                mpi_discovery(verbose=False)
            # The process group uses the same server later.
            self._own_store = meeting_store(launch, timeout)
        return self._own_store


def _received(store: Any, key: str, limit: Limit) -> bytes:
    """Wait for a value of the first rank for as long as it counts on within the timeout of the store."""
    import torch.distributed as dist

    before = 0
    while True:
        with limit():
            try:
                return store.get(key)
            except dist.DistStoreError:
                now = store.add(f"{key}, at work", 0)
                if now == before:
                    raise
                before = now


def limit_of_meeting(launch: LaunchEnvironment, timeout: timedelta) -> tuple[float, str]:
    """Return the seconds and the error of a rank that waits for others without an end, as where a host is cut off."""
    return timeout.total_seconds() + _LATE_S, str(rendezvous_error(launch, timeout, TimeoutError("no answer")))


def rendezvous_error(launch: LaunchEnvironment, timeout: timedelta, error: Exception) -> UserError:
    """Return the exception of a failed rendezvous: the port is in use, as by a second run, or a rank is missing."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if launch.rank == 0 and "EADDRINUSE" in str(error):
        return ConfigError(
            f"port {port} of {host}, the rendezvous of the ranks, is in use, perhaps by another run: give the launcher "
            "another with --master_port, or set MASTER_PORT for mpirun and srun"
        )
    why = str(error).partition("\n")[0]
    return AbsentRankError(
        f"the ranks did not meet at {host}:{port} within --distributed-timeout-minutes "
        f"{timeout.total_seconds() / 60:g} ({why}): find the rank or host that did not start"
    )
