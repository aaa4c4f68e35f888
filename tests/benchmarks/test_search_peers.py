"""The table of the search and its peers, and where it goes."""

from benchmarks.search_peers import ERRORS_OF_PEERS, OURS, SPEED_OF_PEERS, Figure, table


def test_ours_stand_above_the_peers_and_every_figure_has_a_source() -> None:
    lines = table("Errors", [Figure(OURS, "1.0 %", "a test", "this command")], ERRORS_OF_PEERS).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:]]
    assert rows[0] == [OURS, "1.0 %", "a test", "this command"]
    assert [row[0] for row in rows[1:]] == [each.tool for each in ERRORS_OF_PEERS]
    assert all("](https://" in each.source for each in (*SPEED_OF_PEERS, *ERRORS_OF_PEERS))
    assert not any(cell.endswith("...") for row in rows for cell in row)
