"""Tables of the search beside its peers, and of long sequences."""

import csv
import json
from dataclasses import asdict, replace

from benchmarks.long_sequences import HEAD, PREDICTIONS, Ours, Row, Theirs, cells
from benchmarks.search_peers import COLUMNS, ERRORS_OF_PEERS, FIGURES, OURS, SPEED_OF_PEERS, Figure
from benchmarks.search_peers import table as table_of_peers


def test_figures_of_peers_have_sources_and_the_columns_of_the_file() -> None:
    figures = [Figure(OURS, "1.0 %", "a test", "this command"), *ERRORS_OF_PEERS]
    lines = table_of_peers("Errors", figures).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:]]
    assert rows[0] == [OURS, "1.0 %", "a test", "this command"]
    assert [row[0] for row in rows[1:]] == [each.tool for each in ERRORS_OF_PEERS]
    assert all("](https://" in each.source for each in (*SPEED_OF_PEERS, *ERRORS_OF_PEERS))
    assert not any(cell.endswith("...") for row in rows for cell in row)
    with FIGURES.open(encoding="utf-8", newline="") as file:
        head, *figures_of_file = csv.reader(file)
    assert head == ["question", *COLUMNS]
    assert {row[1] for row in figures_of_file} == {OURS, *(each[0] for each in rows[1:]), "AMP"}


BEST = Ours(
    strategy="pp 8",
    simulated_s=2.0,
    closed_form_s=1.9,
    device_bytes=60e9,
    host_bytes=4e11,
    mfu_causal=0.3,
    could_save=0.0,
)
THEIRS = Theirs(
    num_ranks=64,
    ranks_of_sequence=32,
    on_host=("checkpoints",),
    time_s=3.0,
    device_bytes=50e9,
    host_bytes=1.2e12,
    mfu_causal=0.2,
    why_not=None,
)
ROW = Row(
    model="llama3-8b",
    seq_length=131072,
    num_devices=64,
    least_sequences=1,
    global_batch_size=2,
    ours=BEST,
    theirs=THEIRS,
)


def test_rows_are_read_as_they_were_written() -> None:
    for row in (ROW, replace(ROW, ours=None), replace(ROW, theirs=None)):
        read = Row.read(json.dumps(asdict(row)))
        assert cells(read) == cells(row) and read.key == row.key


def test_every_line_has_the_columns_of_the_head() -> None:
    for row in (ROW, replace(ROW, ours=None), replace(ROW, theirs=replace(THEIRS, why_not="it is too large"))):
        assert len(cells(row)) == len(HEAD)
    assert cells(ROW)[-1] == "1.50"


def test_the_predictions_beside_the_page_have_the_same_columns() -> None:
    with PREDICTIONS.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    assert head == list(HEAD)
    assert rows and all(len(row) == len(HEAD) for row in rows)
