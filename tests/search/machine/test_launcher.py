"""Ports of launches: free, and of several each another one."""

import os
import socket

import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine import launcher
from megatron_terapipe.search.machine.launcher import LISTENING_PORTS, free_port, free_ports


def test_of_many_ports_none_is_given_twice_and_each_is_free() -> None:
    found = free_ports(100)
    assert len(set(found)) == 100
    assert set(found) <= set(LISTENING_PORTS)
    with socket.create_server(("", free_port())):
        pass


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(launcher, "LISTENING_PORTS", [port] * (os.getpid() % launcher._STRIPES + 1))
        with pytest.raises(ConfigError, match=r"0 of 1 ports tried in .* are free, and 1 are needed: end some of"):
            free_port()
