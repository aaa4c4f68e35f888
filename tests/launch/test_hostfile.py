"""Hostfiles: accepted as by DeepSpeed's launcher, and otherwise refused in one line."""

import json

import pytest
from deepspeed.launcher.runner import _parse_hostfile as deepspeed_reads
from hypothesis import given
from hypothesis import strategies as st

from megatron_terapipe.config.parsing import is_host_name
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.launch.hostfile import hostfile_notes, hostfile_text, is_hostfile, parse_hostfile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (f"# ours\n{line}\n", f"hostfile: line 2 of the hostfile, {json.dumps(line)}, is not HOST slots=N")
            for line in (
                "a", "a:8", "a slots=eight", "a slots=-1", "a slots = 8", "a max_slots=16 slots=8", "slots=8", "a 8"
            )
        ),
        ("a slots=8\nb slot=8\n", "line 2 of the hostfile"),
        ("a slots=8\na slots=8\n", "names host a again"),
        ("# nothing\n", "is a hostfile that names no host"),
        ("a slots=0\n", "is a hostfile without slots"),
    ],
)  # fmt: skip
def test_refused_in_one_line_and_by_deepspeed(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "hostfile")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    if text.count("slots=0") + text.count("nothing") == 0:
        with pytest.raises(ValueError):
            deepspeed_reads(text.splitlines())
        assert is_hostfile(text)


_WORD = st.sampled_from(
    ["a", "b", "slots=8", "slots=", "slots=0x", "slots", "=", "8", "#", "#c", "max_slots=9", ":", ""]
)
_BLANK = st.sampled_from([" ", "  ", "\t", ""])


@given(
    st.lists(st.lists(st.tuples(_WORD, _BLANK), max_size=5).map(lambda each: "".join(map("".join, each))), max_size=4)
)
def test_any_text_is_read_as_deepspeed_reads_it(lines: list[str]) -> None:
    try:
        expected = deepspeed_reads(lines)
    except ValueError:
        expected = None
    if expected is not None and any(expected.values()) and all(map(is_host_name, expected)):
        assert {each.name: each.slots for each in parse_hostfile("\n".join(lines), "hostfile")} == expected
    else:
        with pytest.raises(ConfigError):
            parse_hostfile("\n".join(lines), "hostfile")


def test_notes_about_words_without_effect() -> None:
    hosts = parse_hostfile("a slots=8 max_slots=16\nb slots=8 # ours\nc slots=0\n", "hostfile")
    assert hostfile_text(hosts) == "a slots=8\nb slots=8\nc slots=0\n"
    assert hostfile_notes(hosts) == (
        "hosts without slots are not used: c",
        "the hostfile has max_slots=16 after the slots of a host, which DeepSpeed ignores",
    )


@pytest.mark.parametrize(
    ("text", "path", "is_one"),
    [
        ("", "hostfile", False),
        ('{"nodes": []}', "cluster", False),
        ("nodes:\n  - machine: dgx-a100\n", "cluster", False),
        ("- a\n", "cluster", False),
        ("a:8\n", "cluster.json", False),
        ("a slots=8\n", "cluster.yaml", True),
    ],
)
def test_files_recognised_as_hostfiles(text: str, path: str, is_one: bool) -> None:
    assert is_hostfile(text, path) == is_one
