"""Results that a command writes into a page, between two comments."""

BEGIN, END = "<!-- begin results -->", "<!-- end results -->"


def written_between(page: str, results: str) -> str:
    """Return a page with other results between its markers.

    Raises:
        SystemExit: if the page has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"the page has no lines {BEGIN} and {END}: write them where the results are to stand")
    return f"{before}{BEGIN}\n\n{results}\n\n{END}{after}"
