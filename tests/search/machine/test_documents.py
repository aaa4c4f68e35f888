import re
from typing import Any, Literal

import pytest
from pydantic import Field, TypeAdapter

from megatron_terapipe.config.parsing import parse_yaml
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.documents import parse_text, suggestion
from megatron_terapipe.search.machine.entries import (
    Bandwidth,
    Count,
    Entry,
    FlopsRate,
    Memory,
    Positive,
    Text,
    Time,
    read_entry,
)

QUANTITIES: dict[str, tuple[Any, list[tuple[str, float | None]]]] = {
    "bandwidth": (
        Bandwidth,
        [
            ("25 GB/s", 25e9),
            ("100 Gbit/s", 12.5e9),
            ("100Gbps", 12.5e9),
            ("1.6 TB/s", 1.6e12),
            ("1 GiB/s", 2.0**30),
            ("25", None),
            ("25 GB", None),
            ("fast", None),
            ("-3 GB/s", None),
            ("1e400 GB/s", None),
        ],
    ),
    "memory": (Memory, [("80 GiB", 80 * 2.0**30), ("16 GB", 16e9)]),
    "speed": (FlopsRate, [("312 TFLOP/s", 312e12)]),
    "time": (Time, [("5 us", 5e-6), ("1e-3 ms", 1e-6)]),
}


@pytest.mark.parametrize("kind", QUANTITIES)
def test_quantities(kind: str) -> None:
    annotated, cases = QUANTITIES[kind]
    adapter = TypeAdapter(annotated)
    for text, expected in cases:
        if expected is None:
            with pytest.raises(ValueError, match=kind):
                adapter.validate_python(text)
        else:
            assert adapter.validate_python(text) == pytest.approx(expected)


class Inner(Entry):
    number: Positive


class Outer(Entry):
    a: Positive | None = None
    count: Count = 1
    flag: bool = False
    text: Text = "x"
    word: Literal["row", "column"] = "row"
    link: Bandwidth | None = None
    inner: list[Inner] = Field(default_factory=list, min_length=1)
    pair: tuple[int, int] = (0, 0)
    needed: Count


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"a": "x"}, 'c.json: at[2].a "x" is not a number: give one'),
        ({"a": -1}, "c.json: at[2].a -1 is not a number above 0: give one"),
        ({"needed": 1, 3: "x"}, "c.json: at[2] has 3 for the name of a field: write a name, as text"),
        ({"count": 10**16}, "c.json: at[2].count 10000000000000000 is more than 1,000,000,000,000,000: give less"),
        ({"count": True}, "c.json: at[2].count true is not a whole number: give one"),
        ({"count": 0}, "c.json: at[2].count 0 is not a whole number from 1: give one"),
        ({"a": float("nan")}, "c.json: at[2].a NaN is not a finite number: give one"),
        ({}, "c.json: at[2].needed is missing: give a whole number"),
        ({"needed": None}, "c.json: at[2].needed is missing: give a whole number"),
        ({"text": ""}, 'c.json: at[2].text "" is not a text: give one'),
        ({"flag": 1}, "c.json: at[2].flag 1 is not true or false: give one of them"),
        ({"word": "rwo"}, 'c.json: at[2].word "rwo" is not known: did you mean row?'),
        (
            {"link": 3},
            "c.json: at[2].link 3 is not a bandwidth with its unit, but a number: write it as 100 Gbit/s or 25 GB/s",
        ),
        ({"link": "0 GB/s"}, 'c.json: at[2].link "0 GB/s" is not above zero: give more'),
        ({"inner": {}}, "c.json: at[2].inner {} is not a list: write one in [ ]"),
        ({"inner": []}, "c.json: at[2].inner [] is an empty list: write one entry or more in [ ]"),
        ({"inner": [{"number": 1}, 5]}, "c.json: at[2].inner[1] 5 is not an object of fields and values: write one"),
        ({"pair": (1,)}, "c.json: at[2].pair [1] has no number 1: add it"),
        ({"inner": [{}]}, "c.json: at[2].inner[0].number is missing: give a number"),
        ({"needed": 1, "inner": [{"number": 1, "numbr": 2}]}, "numbr 2 is not a known field: did you mean number?"),
    ],
)
def test_errors_name_file_field_and_remedy(document: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        read_entry(Outer, document, "c.json", "at[2]")
    assert "\n" not in str(caught.value)


def test_a_number_with_its_unit_in_the_name() -> None:
    assert read_entry(Outer, {"needed": 1, "link_GBps": 100}, "c.json").link == 1e11
    assert read_entry(Outer, {"needed": 1, "link_Gbps": 8, "link": None}, "c.json").link == 1e9
    for document, message in (
        ({"link_GBps": 1, "link": "1 GB/s"}, "c.json: link_GBps 1 is a second value of link: keep one of them"),
        ({"link_GBps": 1, "link_Gbps": 2}, "c.json: link_Gbps 2 is a second value of link: keep one of them"),
        ({"link_GBps": -1}, "c.json: link_GBps -1 is not a number above 0: give one"),
        ({"needed": 1, "link_us": 1}, "c.json: link_us 1 is not a known field: did you mean link?"),
        ({"needed": 1, "a_GBps": 1}, "c.json: a_GBps 1 is not a known field: "),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            read_entry(Outer, document, "c.json")


def test_unknown_names() -> None:
    assert suggestion("a100-80gb", ["T4", "A100-80GB"]) == "did you mean A100-80GB?"
    assert suggestion("zzz", ["T4", "L4"]) == "choose among T4, L4"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "a: 1\na: 2\n", "key 'a'"),
        ("c.yml", "a: [1\n", "is not YAML"),
        ("c.json", "{", "is not JSON"),
        ("c.json", '{"a": 1, "a": 2}', "twice"),
    ],
)
def test_files_in_another_format(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_text(text, name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_of_yaml_need_no_point() -> None:
    text = "a: 1e-5\nb: 1e1\nc: -2.5E+3\nd: '1e5'\ne: 1e\nf: 0x1e5\ng: 1e5B"
    assert parse_yaml(text, "f") == {"a": 1e-5, "b": 10.0, "c": -2500.0, "d": "1e5", "e": "1e", "f": 0x1E5, "g": "1e5B"}
