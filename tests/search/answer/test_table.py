import io
from dataclasses import replace

import pytest
import rich.console

from megatron_terapipe.config.flops import iteration_flops
from megatron_terapipe.search.answer.answer import compare
from megatron_terapipe.search.answer.figures import (
    bytes_text,
    count_text,
    flops_utilization,
    interval_text,
    model_flops,
    numbers_text,
    time_text,
)
from megatron_terapipe.search.answer.table import heading, print_table, rows_of
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.machine.trainers import SOFTWARE
from megatron_terapipe.search.price.workload_files import read_workload
from tests.search.answer.answers import answer


def test_the_table() -> None:
    stream = io.StringIO()
    print_table(answer(), rich.console.Console(file=stream, width=170))
    text = stream.getvalue()
    lines = text.splitlines()
    assert lines[0].startswith("4x64 (")
    assert "16 x A100-SXM4-80GB in 2 nodes, bf16" in lines[0]
    head = next(line for line in lines if "rank" in line)
    names = "rank dp tp pp S mbs schedule V recompute ZeRO sp cut time interval tokens/s MFU causal MFU bubble memory"
    assert head.split() == [*names.split(), "why", "not"]
    first = next(line for line in lines if line.split()[:1] == ["1"]).split()
    assert first[:7] == ["1", "2", "2", "4", "2", "1", "1f1b"]
    assert "80,48" in text and "even" in text
    assert "1.4 s" in text and "-10 +20 %" in text and "8 GB" in text
    assert "[why] <it> falls" in text
    assert "note: rank 1: micro-batches extrapolated" in text


def test_another_trainer_is_named() -> None:
    shown = answer()
    assert heading(replace(shown, problem=replace(shown.problem, software=SOFTWARE["megatron-core"]))).endswith(
        "in 2 nodes, bf16, trainer megatron-core"
    )


def test_no_column_of_blanks() -> None:
    stream = io.StringIO()
    shown = answer()
    print_table(replace(shown, entries=shown.entries[:2]), rich.console.Console(file=stream, width=170))
    assert "why not" not in stream.getvalue()


def test_why_the_winner_wins() -> None:
    first, second, _ = answer().entries
    found = compare(first, second)
    assert found.changes == [("token slices", "2", "1"), ("lengths of token slices", "80, 48", "equal")]
    text = " ".join(found.sentences)
    assert "500 ms less (26.3%)" in text
    assert "It saves in bubbles (600 ms)." in text
    assert "It pays with more in compute (100 ms)." in text
    # 1.2 x 1.4 s is below 0.9 x 1.9 s.
    assert "overlap" not in text


@pytest.mark.parametrize("name", ["gpt2", "llama2-7b", "gpt3-175b", "mistral-7b"])
def test_utilization_is_counted_as_the_trainer_logs_it(name: str) -> None:
    workload = read_workload(name)
    assert workload.config is not None
    assert model_flops(workload) == iteration_flops(workload.config, 1)
    assert model_flops(workload, causal=True) == iteration_flops(workload.config, 1, causal=True)


def test_figures() -> None:
    shown = answer()
    strategy = shown.entries[0].strategy
    used = flops_utilization(strategy, shown.workload, shown.cluster, 2.0, "bf16")
    assert used == pytest.approx(model_flops(shown.workload) * 8 / (2.0 * 16 * 312e12))
    assert flops_utilization(strategy, shown.workload, shown.cluster, 2.0, "fp32") == pytest.approx(used * 312 / 19.5)


@pytest.mark.parametrize(
    ("number", "text"),
    [(999_885_952, "1 B"), (999_400_000, "999 M"), (8_030_261_248, "8.03 B"), (494e6, "494 M"), (12, "12")],
)
def test_counts(number: float, text: str) -> None:
    assert count_text(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.345, "12.3 s"), (1234.5, "1,234 s"), (0.0123, "12.3 ms"), (0.9996, "1 s"), (3e-6, "3 us"), (0.0, "0 us")],
)
def test_times(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((80, 48), "80, 48"),
        ((16,) * 128, "128 x 16"),
        ((64, 64, 48, 48, 32), "2 x 64, 2 x 48, 32"),
        ((*range(8, 16), *range(8)), "8 to 15, 0 to 7"),
        ((0, 1, 2, 9), "0, 1, 2, 9"),
        ((), ""),
    ],
)
def test_lists_of_numbers(numbers: tuple[int, ...], text: str) -> None:
    assert numbers_text(numbers) == text


def test_other_texts() -> None:
    assert bytes_text(8.04e10) == "80.4 GB"
    assert bytes_text(1.2e12) == "1.2 TB"
    prediction = answer().entries[0].prediction
    assert prediction is not None
    assert interval_text(prediction) == "-10 +20 %"


def test_a_narrow_terminal_drops_columns_instead_of_cutting_them() -> None:
    wide, narrow = io.StringIO(), io.StringIO()
    shown = replace(answer(), entries=answer().entries[:2])
    print_table(shown, rich.console.Console(file=wide, width=170))
    print_table(shown, rich.console.Console(file=narrow, width=80))
    assert "cut" in wide.getvalue() and "…" not in wide.getvalue()
    assert "…" not in narrow.getvalue()
    head = next(line for line in narrow.getvalue().splitlines() if "rank" in line).split()
    assert {"rank", "dp", "tp", "pp", "S", "mbs", "schedule", "time", "tokens/s", "memory"} <= set(head)
    assert max(map(len, narrow.getvalue().splitlines())) <= 80


def test_no_utilization_of_a_guess() -> None:
    shown = answer()
    cluster, _ = parse_cluster({"nodes": [{"device": "cpu-core", "count": 8}]}, "c.json")
    assert "MFU" in rows_of(shown, shown.entries)[0]
    assert "MFU" not in rows_of(replace(shown, problem=replace(shown.problem, cluster=cluster)), shown.entries)[0]
