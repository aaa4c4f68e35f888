"""Days, device hours and price of a whole training."""

import io
from argparse import ArgumentParser
from dataclasses import replace

import pytest
import rich.console

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.answer.figures import NOT_ASKED, Training, add_training_flags, training_of
from megatron_terapipe.search.answer.page import render_page
from megatron_terapipe.search.answer.screen import print_table
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.strategy import Strategy
from tests.search.answer.answers import answer, small_problem, strategies


def cluster_of(*devices: str) -> Cluster:
    return parse_cluster({"nodes": [{"device": each, "devices": 8} for each in devices]}, "c.json")[0]


def asked(flags: str, *devices: str) -> Training:
    parser = ArgumentParser()
    add_training_flags(parser)
    return training_of(parser.parse_args(flags.split()), cluster_of(*devices or ("A100-SXM4-40GB",)))


def test_figures_by_hand() -> None:
    training = Training(tokens=1.024e6, prices={"A100-SXM4-80GB": 2.5})
    best = strategies()[0]
    found = training.decision(small_problem(), best)
    assert found is not None
    seconds = 1000 * 1.4  # 8 sequences of 128 tokens a step
    assert found.days == pytest.approx(seconds / 86_400)
    assert found.device_hours == pytest.approx(16 * seconds / 3600)
    assert found.cost == pytest.approx(2.5 * found.device_hours)
    # Only devices with a rank are paid for.
    plain = replace(best, strategy=Strategy(data_parallel_size=8, global_batch_size=8))
    half = Training(prices=training.prices).decision(small_problem(), plain)
    assert half is not None and half.cost == pytest.approx(found.cost / 2 / 1.024)
    assert half.tokens == 1e6 and half.days is None
    assert NOT_ASKED.decision(small_problem(), best) is None
    assert training.decision(small_problem(), replace(best, reason="it does not fit")) is None


MIXED = ("V100", "T4")


@pytest.mark.parametrize(
    ("flags", "devices", "expected"),
    [
        ("--tokens 300B", (), Training(tokens=3e11)),
        ("--tokens 15e12 --price 2", (), Training(tokens=1.5e13, prices={"A100-SXM4-40GB": 2})),
        ("--price A100=2.5", (), Training(prices={"A100-SXM4-40GB": 2.5})),
        ("--price t4=.5,V100=2", MIXED, Training(prices={"V100-SXM2-16GB": 2, "T4": 0.5})),
        ("--price A100-40GB=1,A100=2", ("A100-40GB", "A100"), Training(
            prices={"A100-SXM4-40GB": 1, "A100-SXM4-80GB": 2})),
        ("--price V100=1", ("V100", "V100-32GB"), Training(prices={"V100-SXM2-16GB": 1, "V100-SXM2-32GB": 1})),
        ("--tokens zwei", (), "--tokens zwei is not a number above 0 and up to 1e18: give one such as"),
        ("--tokens=-1T", (), "--tokens -1T is not a number above 0"),
        ("--price=-2", (), "--price -2 is not a number above 0"),
        ("--price nan", (), "--price nan is not a number above 0"),
        ("--price 2", MIXED, "--price 2 has no price of V100-SXM2-16GB: give V100-SXM2-16GB=PRICE,T4=PRICE"),
        ("--price V100=2", MIXED, "--price V100=2 has no price of T4: give V100"),
        ("--price V100=2,A40=3,T4=1", MIXED, "--price V100=2,A40=3,T4=1 has A40, which the cluster has not: give V100"),
        ("--price V100=2,V100=3", MIXED, "--price V100=2,V100=3 has two prices of V100-SXM2-16GB: give"),
        ("--price V100=2,T4=", MIXED, "--price V100=2,T4= is not a number above 0"),
    ],
)  # fmt: skip
def test_flags(flags: str, devices: tuple[str, ...], expected: Training | str) -> None:
    if isinstance(expected, Training):
        assert asked(flags, *devices) == expected
        return
    with pytest.raises(ConfigError) as refused:
        asked(flags, *devices)
    assert str(refused.value).startswith(expected) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("training", "columns"),
    [
        (Training(tokens=2e12), "days device hours"),
        (Training(prices={"A100-SXM4-80GB": 2}), "device hours/M tokens price/M tokens"),
        (Training(tokens=2e12, prices={"A100-SXM4-80GB": 2}), "days device hours price"),
        (NOT_ASKED, ""),
    ],
)
def test_table_and_page_have_what_was_asked(training: Training, columns: str) -> None:
    stream = io.StringIO()
    document = answer(entries=strategies()[:2], training=training)
    print_table(document, rich.console.Console(file=stream, width=120))
    head = next(line for line in stream.getvalue().splitlines() if "rank" in line)
    assert " ".join(head.partition("memory")[2].split()) == columns
    pricing = Pricing(small_problem().workload, small_problem().cluster)
    page = render_page(document, small_problem(), pricing.cost_model.pipeline_costs)
    assert all((f">{name}" in page) == (name in columns) for name in ("days", "device hours", "price"))
