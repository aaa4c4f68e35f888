"""Profile files: written, read back, and wrong ones refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.price.profile import profile_to_json, read_profile, write_profile
from tests.search.price.profiles import profile


def test_write_and_read(tmp_path: Path) -> None:
    path = tmp_path / "P.json"
    write_profile(profile(), str(path))
    read = read_profile(str(path))
    assert profile_to_json(read) == profile_to_json(profile())
    assert read.source == str(path)
    # A point a line, so that people can look at it.
    assert "\n    [1, 0, 8, " in path.read_text()


def faulty(change: str, value: Any) -> dict[str, Any]:
    document = json.loads(json.dumps(profile_to_json(profile())))
    *way, last = change.split(".")
    place: Any = document
    for step in way:
        place = place[int(step)] if step.isdigit() else place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return document


@pytest.mark.parametrize(
    ("change", "value", "line"),
    [
        (
            "format",
            "other",
            'format "other" is not terapipe-profile-1: give a file that `terapipe search measure` wrote',
        ),
        ("colour", "red", 'colour "red" is not a known field: '),
        ("layers.0.points", [[1, 0, 8, 1e-3]], "layers[0].points[0] [1, 0, 8, 0.001] is not [micro"),
        ("layers.0.points", [[1, 8, 8, 1, 1, 1]], "layers[0].points[0] [1, 8, 8, 1, 1, 1] has an empty token slice"),
        ("links.0.points", [[8, -1.0]], "links[0].points[0] [8, -1.0] is not [bytes, seconds], none"),
        ("engine.op_s", -1, "engine.op_s -1 is not a number from 0: give one"),
    ],
)
def test_refused_profiles(change: str, value: Any, line: str, tmp_path: Path) -> None:
    path = tmp_path / "P.json"
    path.write_text(json.dumps(faulty(change, value)))
    with pytest.raises(ConfigError) as caught:
        read_profile(str(path))
    assert str(caught.value).startswith(f"{path}: {line}")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--json \S+/file/P.json cannot be written \(.+\): name"):
        write_profile(profile(), str(tmp_path / "file/P.json"))
