"""Days, price, energy and goodput of a whole training."""

import io
import math
from argparse import ArgumentParser
from dataclasses import replace

import pytest
import rich.console

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.answer.decisions import NOT_ASKED, Training, add_training_flags, training_of
from megatron_terapipe.search.answer.figures import print_table
from megatron_terapipe.search.answer.json_documents import AdvicePart, FewerDevicesPart
from megatron_terapipe.search.answer.page import render_page
from megatron_terapipe.search.answer.what_if import advice_notes
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.strategy import Strategy
from tests.search import problems
from tests.search.answer.answers import answer, small_problem, strategies

HOUR, YEAR = 3600, 365.25 * 86_400


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
    assert found is not None and (found.goodput, found.save_interval_s) == (None, None)
    seconds = 1000 * 1.4  # 8 sequences of 128 tokens a step
    assert found.days == pytest.approx(seconds / 86_400)
    assert found.cost == pytest.approx(16 * 2.5 * seconds / HOUR)
    assert found.energy_kwh == pytest.approx(16 * 0.4 * seconds / HOUR)
    # Only devices with a rank are paid for, and failures cost days, money and energy.
    half = training.decision(
        small_problem(), replace(best, strategy=Strategy(data_parallel_size=8, global_batch_size=8))
    )
    assert half is not None and half.cost == pytest.approx(found.cost / 2)
    failing = Training(prices=training.prices, between_failures_s=YEAR, save_s=20, restart_s=600)
    dear = failing.decision(small_problem(), best)
    assert dear is not None and dear.goodput is not None and dear.tokens == 1e6 and dear.days is None
    assert dear.cost == pytest.approx(found.cost / 1.024 / dear.goodput)
    assert NOT_ASKED.decision(small_problem(), best) is None
    assert training.decision(small_problem(), replace(best, reason="it does not fit")) is None


def test_energy_of_unknown_devices_is_unknown() -> None:
    problem = problems.small_problem()
    plain = replace(strategies()[0], strategy=Strategy(data_parallel_size=4, global_batch_size=8))
    found = Training(tokens=1e9).decision(problem, plain)
    assert found is not None and found.days is not None and found.energy_kwh is None
    assert Training(tokens=1e9).notes(problem.cluster) == [
        "days: 1 B tokens at the predicted times; the power of fast is not known"
    ]


@pytest.mark.parametrize(("mean_s", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (HOUR / 4, 9.1)])
def test_save_intervals_are_those_of_daly(mean_s: float, minutes: float) -> None:
    """Figures 3 to 5 of his paper: saves of 5 minutes, restarts of 10."""
    found = Training(between_failures_s=mean_s, save_s=300, restart_s=600).goodput(1)
    assert found is not None
    interval, goodput = found
    assert interval / 60 == pytest.approx(minutes, rel=0.01)

    def lost(interval: float) -> float:
        return mean_s * math.exp(600 / mean_s) * (math.exp((interval + 300) / mean_s) - 1) / interval

    assert goodput == pytest.approx(1 / lost(interval))
    assert lost(interval) < 1.002 * min(lost(step * interval / 50) for step in range(10, 200))


def test_goodput_of_published_failures() -> None:
    """Llama 3 405B: more than 90 % of the time trained, with 419 interruptions in 54 days."""
    rate = 419 / (54 * 86_400 * 16_384)
    found = Training(between_failures_s=1 / rate, save_s=5, restart_s=600).goodput(16_384)
    assert rate * YEAR == pytest.approx(0.17, abs=0.005) and found is not None and 0.9 < found[1] < 0.95


MIXED = ("V100", "T4")
FAILING = "--failures-per-device-year 0.17"


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
        (f"{FAILING} --save-seconds 20", (), Training(between_failures_s=YEAR / 0.17, save_s=20, restart_s=600)),
        ("--tokens zwei", (), "--tokens zwei is not a number above 0 and up to 1e18: give one such as"),
        ("--tokens=-1T", (), "--tokens -1T is not a number above 0"),
        ("--price=-2", (), "--price -2 is not a number above 0"),
        ("--price nan", (), "--price nan is not a number above 0"),
        ("--price 2", MIXED, "--price 2 has no price of V100-SXM2-16GB: give V100-SXM2-16GB=PRICE,T4=PRICE"),
        ("--price V100=2", MIXED, "--price V100=2 has no price of T4: give V100"),
        ("--price V100=2,A40=3,T4=1", MIXED, "--price V100=2,A40=3,T4=1 has A40, which the cluster has not: give V100"),
        ("--price V100=2,V100=3", MIXED, "--price V100=2,V100=3 has two prices of V100-SXM2-16GB: give"),
        ("--price V100=2,T4=", MIXED, "--price V100=2,T4= is not a number above 0"),
        (FAILING, (), "--save-seconds is missing, and a goodput needs failures and saves: give it"),
        ("--restart-seconds 60", (), "--failures-per-device-year is missing"),
        (f"{FAILING} --save-seconds 0", (), "--save-seconds 0 is not a number above 0"),
        ("--failures-per-device-year 1M --save-seconds 1", (),
         "--failures-per-device-year 1e+06 is a failure each 3.94 s on 8 devices, and a save and a restart take 601"),
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
        (Training(tokens=2e12), "days kWh"),
        (Training(prices={"A100-SXM4-80GB": 2}), "price/M tokens"),
        (Training(between_failures_s=YEAR, save_s=1), "goodput"),
        (
            Training(tokens=2e12, prices={"A100-SXM4-80GB": 2}, between_failures_s=YEAR, save_s=1),
            "days price kWh goodput",
        ),
        (NOT_ASKED, ""),
    ],
)
def test_table_and_page_have_what_was_asked(training: Training, columns: str) -> None:
    stream = io.StringIO()
    document = answer(entries=strategies()[:2], training=training)
    print_table(document, rich.console.Console(file=stream, width=120))
    head = next(line for line in stream.getvalue().splitlines() if "rank" in line)
    assert " ".join(head.partition("memory")[2].split()) == columns
    page = render_page(document, small_problem())
    assert all((f">{name}<" in page) == (name in columns.split()) for name in ("days", "kWh", "price", "goodput"))


@pytest.mark.parametrize(
    ("time_ratio", "price_ratio", "said"),
    [
        (1.1, None, "fewer devices take fewer device hours: on 2 of the 4 devices, without the nodes of slow, "),
        (
            1.1,
            None,
            "for 45% fewer device hours a token, 1.10 times those of fast: add --price to compare prices, or --devices",
        ),
        (1.1, 0.97, "fewer devices take fewer device hours: "),
        (1.1, 0.97, ", at 0.97 times the price: add --devices-at-most 2 to rank them"),
        (1.1, 0.8, "fewer devices are cheaper: "),
        (1.9, None, ""),
    ],
)
def test_fewer_devices_of_a_mixed_cluster(time_ratio: float, price_ratio: float | None, said: str) -> None:
    cluster = Cluster(nodes=(problems.node("a"), problems.node("b", problems.SLOW)))
    part = FewerDevicesPart(
        strategy=Strategy(data_parallel_size=2, global_batch_size=8).to_json(), iteration_time_s=1.0, num_devices=2,
        nodes=["a"], time_ratio=time_ratio, cost_ratio=time_ratio / 2, price_ratio=price_ratio,
        device_hours_ratio={"fast": time_ratio, "slow": 0.0},
    )  # fmt: skip
    notes = advice_notes(AdvicePart(fewer_devices=[part]), problems.small_problem(cluster))
    assert said in notes[0] if said else not notes
