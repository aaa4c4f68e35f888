"""Docstrings become the markup that Sphinx reads."""

from docs.extensions.docstrings import as_markup


def test_code_blocks_are_marked_and_sections_are_not() -> None:
    lines = [
        "Says.",
        "",
        "    a = 1",
        "",
        "    b = 2",
        "Then:",
        "",
        "Args:",
        "    name: `Spec`s of it.",
        "",
        "Raises:",
        "    E: so.",
    ]
    assert as_markup(lines) == [
        *("Says.", "", "::", "", "    a = 1", "", "    b = 2", "Then:", "", "Args:", "    name: `Spec`\\ s of it."),
        *("", "Raises:", "    E: so."),
    ]


def test_code_keeps_its_backticks() -> None:
    assert as_markup(["Says:", "", "    `a`b"])[-1] == "    `a`b"


def test_code_with_and_without_an_ending_in_one_line() -> None:
    assert as_markup(["It prints `error: ...` and has `assert`s."]) == ["It prints `error: ...` and has `assert`\\ s."]
