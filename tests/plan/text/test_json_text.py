"""JSON of users holds finite numbers and text that can be written, or is refused in one line."""

import pytest

from deepspeed_ext.plan.errors import MOST_CHARACTERS, PlanError, UserError
from deepspeed_ext.plan.text_files import MOST_LEVELS, check_values, parse_json


def test_values_come_back() -> None:
    assert parse_json('{"a": [1, 2.5, null, true, "\\ud83d\\ude00"]}', "f") == {"a": [1, 2.5, None, True, "😀"]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "f is not JSON"),
        ("[NaN]", "holds the number nan"),
        ("[-Infinity]", "holds the number -inf"),
        ("[1e999]", "holds the number inf"),
        ("9" * 5000, "f is not JSON"),
        (f"[{2**63}]", "whole number of 19 digits"),
        ('["\\ud800"]', "half a character"),
        ('{"\\ud800": 1}', "half a character"),
        ("[" * 100_000, "f is not JSON"),
        ("[" * (MOST_LEVELS + 1) + "]" * (MOST_LEVELS + 1), "levels deep: make it flatter"),
        ('{"a": 1, "a": 2}', "key 'a' stands twice"),
        ('{"a\\nb": 1, "a\\nb": 2}', "stands twice"),
    ],
)
def test_what_no_reader_should_see(text: str, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_json(text, "f")
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


def test_whole_numbers_without_bound_where_they_are_asked_for() -> None:
    assert parse_json(f"[{10**30}]", "f", unbounded=True) == [10**30]


def test_a_document_that_refers_to_itself_again_and_again_is_not_walked_through() -> None:
    document: list[object] = []
    for _ in range(40):
        document = [document, document]
    with pytest.raises(PlanError, match="refers to its own parts"):
        check_values(document, "f", 200)


def test_messages_are_one_line() -> None:
    assert str(UserError("--save a\nb\x1b[2J\ud800 é: name another")) == "--save a\\nb\\x1b[2J\\ud800 é: name another"
    assert str(UserError(str(UserError("a\nb")))) == "a\\nb"
    long = str(UserError("--lr " + "9" * 1_000_000 + ": give less"))
    assert len(long) < MOST_CHARACTERS + 100 and long.endswith("9: give less") and "left out" in long
    escaped = str(UserError("--save " + "\ud800" * 5000))
    assert len(escaped) < MOST_CHARACTERS + 100
    assert str(UserError(escaped)).count("left out") <= 2
