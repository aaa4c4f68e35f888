"""Messages to and from ranks that measure on other hosts."""

import sys
from pathlib import Path

import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.measure import on_hosts
from megatron_terapipe.search.measure.machine import Progress
from megatron_terapipe.search.measure.on_hosts import SIZES, measure_hosts
from megatron_terapipe.search.price.profile import profile_to_json
from tests.search.measure.test_measure import sizes
from tests.search.price.profiles import profile

LAUNCHER = """#!{python}
import sys
from megatron_terapipe.search.measure.on_hosts import SIZES, _decoded, lines_of
assert SIZES.validate_json(_decoded(sys.argv[-1])) == SIZES.validate_json({sizes!r})
assert "--force_multi" in sys.argv  # host-1 is not this host
print("host-1: a warning of a package")
for message in {messages!r}:
    for line in lines_of(message):
        print("host-1: " + line)
sys.exit({code})
"""


def launch(folder: Path, monkeypatch: pytest.MonkeyPatch, messages: list[object], code: int = 0) -> list[object]:
    """Messages from a launcher that puts the name of the host before each line."""
    program = folder / "deepspeed"
    program.write_text(
        LAUNCHER.format(python=sys.executable, messages=messages, code=code, sizes=SIZES.dump_json(sizes()))
    )
    program.chmod(0o755)
    # After a failed launch, its remaining processes on hosts are ended.
    (folder / "pdsh").write_text("#!/bin/sh\nexit 0\n")
    (folder / "pdsh").chmod(0o755)
    monkeypatch.chdir(folder)
    Path("hostfile").write_text("host-1 slots=1\n")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return list(measure_hosts(sizes(), "hostfile", on_cpu=True))


def test_a_profile_comes_back_through_the_launchers_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_hosts, "PART", 100)
    measured = profile()
    messages = [{"progress": {"share": 0.5, "doing": "links"}}, {"profile": profile_to_json(measured)}]
    progress, found = launch(tmp_path, monkeypatch, messages)
    assert progress == Progress(0.5, "links")
    assert found == measured


@pytest.mark.parametrize(
    ("messages", "code", "line"),
    [
        ([{"error": "no room: take another"}], 2, "no room: take another"),
        ([], 3, r"the ranks on hostfile could not measure \(exit code 3\): see the lines above"),
    ],
)
def test_a_failure_is_one_line(
    messages: list[object],
    code: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match=f"^{line}$"):
        launch(tmp_path, monkeypatch, messages, code)
    assert ("a warning of a package" in capsys.readouterr().err) == (not messages)
