"""The command `doctor` on this machine: its table, its JSON, its exit codes."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import jsonschema
import pytest
from pydantic import TypeAdapter
from rich.console import Console

from megatron_terapipe.doctor.__main__ import _commands, main
from megatron_terapipe.doctor.checks import findings
from megatron_terapipe.doctor.facts import Examined, Host
from megatron_terapipe.doctor.findings import Document, Level, document, print_examination
from tests.doctor.made import GIB, healthy, on


def printed(examined: Examined, *, verbose: bool = False) -> list[str]:
    """Lines of the table."""
    stream = StringIO()
    print_examination(examined, findings(examined), verbose=verbose, console=Console(file=stream, width=200))
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]


def test_this_machine_is_checked_with_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--save", str(tmp_path), "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    jsonschema.validate(found, TypeAdapter(Document).json_schema())
    assert code == (1 if found["errors"] else 0)
    (host,) = found["hosts"]
    assert host["imports"]["error"] is None
    assert host["imports"]["accelerator"] in ("cpu", "cuda")
    assert f"{found['passed']} checks passed" in capsys.readouterr().out


def test_errors_and_a_bad_directory_give_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--no-imports", "--save", "/proc/checkpoints", "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    (disk,) = [each for each in found["findings"] if each["check"] == "disk"]
    assert (disk["level"], disk["hosts"]) == ("error", ["this machine"])
    assert disk["remedy"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--hostfile", "missing"], "--hostfile missing"),
        (["--hostfile", "hostfile"], "hostfile: line 1 of the hostfile"),
        (["--master-port", "70000"], "--master-port: 70000 is not a whole number from 1 to 65,535"),
        (["--timeout", "0"], "--timeout 0"),
        (["--launcher", "rsh"], "--launcher"),
        (["--verbos"], "--verbos"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(
    words: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hostfile").write_text("-oProxyCommand=true slots=2\n")
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert error in line


@pytest.mark.parametrize(("names", "over_ssh"), [(["localhost"], False), (["192.0.2.1"], True), (["a", "b"], True)])
def test_each_host_is_examined_where_it_is(names: list[str], over_ssh: bool) -> None:
    hosts = [Host(name=name) for name in names]
    commands = _commands(hosts, healthy().launching, None)
    assert [command[0] == "ssh" for command in commands] == [over_ssh] * len(names)
    assert all(name in command for name, command in zip(names, commands, strict=True) if over_ssh)


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == TypeAdapter(Document).json_schema()


@pytest.mark.parametrize("examined", [healthy(), on(2, facts=None, imports=None, clock=None, failure="no")(healthy())])
def test_documents_follow_the_schema(examined: Examined) -> None:
    jsonschema.validate(
        json.loads(json.dumps(document(examined, findings(examined)))), TypeAdapter(Document).json_schema()
    )


def test_the_table_shows_hosts_and_then_faults() -> None:
    examined = on(1, slots=9)(on(2, failure="Connection refused", facts=None, imports=None, clock=None)(healthy()))
    lines = printed(examined)
    assert lines[0] == "host slots devices cores memory free disk free Python torch deepspeed clock next host"
    assert lines[1] == "node1 error 9 8 x NVIDIA H100 64 500 GiB 1000 GB 3.12.4 2.13.0 0.19.8 +0.001 s 50 us"
    assert lines[2].startswith("node2 error 8")
    assert lines[3].startswith("node3 ok 8")
    assert lines[5].startswith("error node2 reach Connection refused; ")
    assert lines[6].startswith("error node1 slots slots=9, and 8 devices; ")
    found = findings(examined)
    passed = sum(max(1, len(each.hosts)) for each in found if each.level is Level.OK)
    assert lines[-1] == f"2 errors, {passed} checks passed"
    assert not any(line.startswith("ok") for line in lines)
    assert any(line.startswith("ok node1, node3 reach") for line in printed(examined, verbose=True))
    assert len(printed(healthy())) == 6


def test_words_in_brackets_are_printed_as_they_are() -> None:
    device = replace(on(1)(healthy()).hosts[0].facts.devices[0], free_bytes=GIB, processes=("[python] (1)",))  # type: ignore[union-attr]
    assert any("[python] (1)" in line for line in printed(on(1, devices=(device,) * 8)(healthy())))
