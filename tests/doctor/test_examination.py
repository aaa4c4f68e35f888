"""Several probes of this machine stand for hosts: what they are asked, and what comes of one that fails."""

import asyncio
import os
import shlex
from pathlib import Path

import pytest

from megatron_terapipe.doctor import examination
from megatron_terapipe.doctor.agent import Listener
from megatron_terapipe.doctor.examination import Examination, local_command
from megatron_terapipe.doctor.facts import Examined, Host
from megatron_terapipe.doctor.launching import launching_here

SLOW = ["sh", "-c", f"sleep 0.5; exec {shlex.join(local_command())}"]
UNABLE = ["sh", "-c", 'read modules; read question; echo \'doctor: {"fault": "too many open files"}\'; read more']
LOST = ["sh", "-c", "echo 'Permission denied (publickey).' >&2; exit 255"]
TOKEN = "00" * 16


@pytest.fixture
def said() -> list[str]:
    return []


def examined(folder: Path, said: list[str], master_port: int, *commands: list[str]) -> Examined:
    """What is found with a probe for each command, where all listen on loopback."""
    (folder / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=lo\n")
    launching = launching_here(hostfile="hostfile", launcher="pdsh", save=str(folder), master_port=master_port)
    hosts = [Host(name=f"node{number}", slots=1) for number, _ in enumerate(commands, start=1)]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    asking = Examination(launching, hosts, commands, environment, 30, said.append)
    return asyncio.run(asking.run(with_imports=False))


def test_hosts_are_asked_whichever_answers_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examination, "SENDING_S", 0.02)
    taken = Listener(0, TOKEN)
    found = examined(tmp_path, said, taken.port, SLOW, LOST, local_command())
    taken.close()
    assert [host.failure for host in found.hosts] == [None, "Permission denied (publickey).", None]
    # The first host is the one of the hostfile, though another answered before it.
    assert found.meeting_fault == "address already in use"
    between = {(link.source, link.target): link for link in found.links}
    assert set(between) == {("node1", "node3"), ("node3", "node1")}
    for link in found.links:
        assert (link.address, link.interface, link.fault) == ("127.0.0.1", "lo", None)
        assert link.bandwidth is not None and link.bandwidth > 0
    assert [facts.folder.sees_token for _, facts in found.reached] == [True, True]
    assert [abs(host.clock.offset_s) < 1 for host, _ in found.reached if host.clock is not None] == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == [".deepspeed_env"]
    assert "facts: 2 of 3 hosts, waiting for node1" in said


def test_a_host_that_cannot_do_what_it_is_asked_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [host.failure for host in examined(tmp_path, said, 29500, UNABLE).hosts] == ["too many open files"]


def test_one_host_is_not_asked_about_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    found = examined(tmp_path, said, 29500, local_command())
    assert found.links == ()
    assert [facts.folder.sees_token for _, facts in found.reached] == [None]
