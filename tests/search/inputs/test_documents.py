import re
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.inputs.documents import Fields, parse_quantity, parse_text, read_document, suggestion


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("25 GB/s", "bandwidth", 25e9),
        ("100 Gbit/s", "bandwidth", 12.5e9),
        ("100Gbps", "bandwidth", 12.5e9),
        ("1.6 TB/s", "bandwidth", 1.6e12),
        ("1 GiB/s", "bandwidth", 2.0**30),
        ("80 GiB", "memory", 80 * 2.0**30),
        ("16 GB", "memory", 16e9),
        ("312 TFLOP/s", "speed", 312e12),
        ("5 us", "time", 5e-6),
        ("1e-3 ms", "time", 1e-6),
        ("25", "bandwidth", None),
        ("25 GB", "bandwidth", None),
        ("fast", "bandwidth", None),
        ("-3 GB/s", "bandwidth", None),
        ("1e400 GB/s", "bandwidth", None),
    ],
)
def test_quantities(text: str, kind: str, expected: float | None) -> None:
    found = parse_quantity(text, kind)
    assert found == expected if expected is None else found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("document", "ask", "message"),
    [
        ({"a": "x"}, lambda f: f.number("a"), 'c.json: at[2].a "x" is not a number above 0: give one'),
        ({3: "x"}, lambda f: f, "c.json: at[2] has 3 for the name of a field: write a name, as text"),
        ({"a": 10**16}, lambda f: f.whole("a"), "c.json: at[2].a 10000000000000000 is more than 1,000,000,000,000,000"),
        ({"a": True}, lambda f: f.whole("a"), "c.json: at[2].a true is not a whole number from 1: give one"),
        ({"a": float("nan")}, lambda f: f.number("a"), "c.json: at[2].a NaN is not a number above 0: give one"),
        ({}, lambda f: f.whole("a"), "c.json: at[2].a is missing: give a whole number"),
        ({"a": None}, lambda f: f.text("a"), "c.json: at[2].a null stands for nothing: give a text"),
        ({"a": ""}, lambda f: f.text("a"), 'c.json: at[2].a "" is not a text: give one'),
        ({"a": 1}, lambda f: f.flag("a"), "c.json: at[2].a 1 is not true or false: give one of them"),
        ({"a": "rwo"}, lambda f: f.choice("a", ["row", "column"]), "did you mean row?"),
        (
            {"a": 3},
            lambda f: f.quantity("a", "bandwidth", units={"GBps": 1e9}),
            "write it as 100 Gbit/s or 25 GB/s, or",
        ),
        ({"a": "0 GB/s"}, lambda f: f.quantity("a", "bandwidth"), "is not above zero"),
        (
            {"a": "1 GB/s", "a_GBps": 1},
            lambda f: f.quantity("a", "bandwidth", units={"GBps": 1e9}),
            "c.json: at[2].a_GBps 1 says again what a says: keep one of them",
        ),
        ({"a": 4}, lambda f: f.section("a"), "c.json: at[2].a 4 is not an object of fields and values: write one"),
        ({"a": []}, lambda f: f.sections("a"), "is not a list of objects"),
        ({"a": [{}, 5]}, lambda f: f.sections("a"), "c.json: at[2].a[1] 5 is not an object"),
        ({"bandwith": 1}, lambda f: (f.has("bandwidth"), f.finish()), "is not a known field: did you mean bandwidth?"),
    ],
)
def test_errors_name_file_field_and_remedy(document: dict[Any, Any], ask: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        ask(Fields(document, "c.json", "at[2]"))
    assert "\n" not in str(caught.value)
    assert ": " in str(caught.value)


def test_a_number_with_its_unit_in_the_name() -> None:
    fields = Fields({"bandwidth_Gbps": 100, "latency": "3 us"}, "c.json")
    assert fields.quantity("bandwidth", "bandwidth", units={"GBps": 1e9, "Gbps": 1e9 / 8}) == 12.5e9
    assert fields.quantity("latency", "time") == pytest.approx(3e-6)
    assert fields.quantity("other", "time", 7.0) == 7.0
    fields.finish()


def test_unknown_names() -> None:
    assert suggestion("a100-80gb", ["T4", "A100-80GB"]) == "did you mean A100-80GB?"
    assert suggestion("zzz", ["T4", "L4"]) == "choose among T4, L4"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "a: 1\na: 2\n", "key 'a' stands twice"),
        ("c.yml", "a: [1\n", "is not YAML"),
        ("c.json", "{", "is not JSON"),
        ("c.json", '{"a": 1, "a": 2}', "stands twice"),
    ],
)
def test_files_that_are_not_what_they_say(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_text(text, name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_yaml_and_json_read_alike(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("nodes:\n  - {count: 2, device: T4}\n")
    (tmp_path / "a.json").write_text('{"nodes": [{"count": 2, "device": "T4"}]}')
    assert read_document(str(tmp_path / "a.yaml")) == read_document(str(tmp_path / "a.json"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_document(str(tmp_path / "none.json"))
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        read_document(str(tmp_path / "b.json"))
