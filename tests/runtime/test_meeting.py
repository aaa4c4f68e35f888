"""Ranks that cannot meet end in time, with the cause."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime import meeting
from deepspeed_ext.runtime.launch import LaunchEnvironment

SOON = timedelta(seconds=0.15)


@pytest.fixture(autouse=True)
def torch_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's store does not open before the end of the test, as where its constructor hangs."""
    end = threading.Event()
    monkeypatch.setattr(dist, "TCPStore", lambda *words, **settings: end.wait())
    monkeypatch.setattr(meeting, "_LISTEN_S", 0.01)
    yield
    end.set()


@pytest.mark.parametrize(
    ("rank", "server", "line"),
    [
        (
            1,
            "silent",
            "port {port} of 127.0.0.1, where the ranks meet, belongs to another program, or rank 0 is stopped (",
        ),
        (1, "speaks", "port {port} of 127.0.0.1, where the ranks meet, belongs to another program (it sends b'SSH'"),
        (1, "unknown", "MASTER_ADDR=node..1 has no address on host "),
        (1, "none", "Connection refused"),
        (0, "none", "MASTER_ADDR=127.0.0.1 is not an address of host "),
        (0, "hangs up", "port {port} of 127.0.0.1, where the ranks meet, belongs to another program (it hangs up)"),
    ],
)
def test_each_cause_is_named(rank: int, server: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        if server == "none":
            listening.close()
        else:
            listening.listen()

        def serve() -> None:
            with suppress(OSError):  # The end of the test closes the socket.
                while True:
                    connection = stack.enter_context(listening.accept()[0])
                    if server == "speaks":
                        connection.sendall(b"SSH")
                    if server == "hangs up":
                        connection.close()

        if server in ("speaks", "hangs up"):
            threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setenv("MASTER_ADDR", "node..1" if server == "unknown" else "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        # Bytes of a foreign program end the wait at once.
        timeout, begin = timedelta(minutes=1) if server == "speaks" else SOON, time.monotonic()
        with pytest.raises((UserError, dist.DistNetworkError)) as raised:
            meeting.meeting_store(
                LaunchEnvironment(rank=rank, world_size=2, local_rank=0, local_size=1), timeout, look_s=0.05
            )
        assert str(raised.value).startswith(line.format(port=port))
        assert isinstance(raised.value, UserError) == (line != "Connection refused")
        assert time.monotonic() - begin < 30
