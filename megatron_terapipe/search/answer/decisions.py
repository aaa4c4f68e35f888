"""Days, price, energy and goodput of a whole training, from the predicted time of one iteration.

The goodput follows J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
FGCS 22 (2006), for failures that are independent of each other. A published rate of failures: Llama 3 405B had 419
unexpected interruptions in 54 days on 16,384 H100 (arXiv 2407.21783, section 3.3.4), 0.17 a year for each device.
"""

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_terapipe.devices import name_words
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.answer.figures import count_text, devices_of
from megatron_terapipe.search.answer.json_documents import DecisionPart
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.library import names_one_device, power_of
from megatron_terapipe.search.rank.search import Ranked
from megatron_terapipe.search.rank.space import SearchProblem

HOUR, DAY, YEAR = 3600.0, 86_400.0, 365.25 * 86_400.0
MILLION = 1e6  # tokens that price and energy are of without `--tokens`

RESTART_S = 600.0
"""Seconds of a restart: the detection and diagnosis of a failure in MegaScale (arXiv 2402.15627, section 6.3)."""

_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A whole training, as flags describe it."""

    tokens: float | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    """Price of a device hour by the name of the device; empty = not given."""
    between_failures_s: float | None = None
    """Mean time between failures of a device."""
    save_s: float = 0.0
    """Seconds without training for a save."""
    restart_s: float = RESTART_S
    """Seconds from a failure to the next iteration."""

    def hourly_price(self, devices: Mapping[str, int]) -> float | None:
        """Return the price of an hour of some devices."""
        return sum(number * self.prices[name] for name, number in devices.items()) if self.prices else None

    def goodput(self, num_devices: int) -> tuple[float, float] | None:
        """Return the best seconds of training between two saves, and the share of the time that is then not lost.

        Equations 37 and 20 of Daly; the first term of the former is by J. W. Young, CACM 17 (1974).
        """
        if self.between_failures_s is None:
            return None
        mean = self.between_failures_s / num_devices
        share = self.save_s / (2 * mean)
        interval = 2 * mean * math.sqrt(share) * (1 + math.sqrt(share) / 3 + share / 9) - self.save_s
        lost = math.exp(self.restart_s / mean) * math.expm1((interval + self.save_s) / mean)
        return interval, interval / (mean * lost)

    def decision(self, problem: SearchProblem, entry: Ranked) -> DecisionPart | None:
        """Return the figures of a strategy; None if it cannot run, or no flag is given."""
        if self == NOT_ASKED or not entry.feasible or entry.prediction is None:
            return None
        devices = devices_of(problem.cluster, entry.strategy)
        saves, goodput = self.goodput(sum(devices.values())) or (None, None)
        tokens = self.tokens or MILLION
        steps = tokens / (entry.strategy.num_sequences * problem.workload.seq_length)
        hours = steps * entry.iteration_time_s / (1.0 if goodput is None else goodput) / HOUR
        price = self.hourly_price(devices)
        watts = sum(number * (power_of(name) or math.nan) for name, number in devices.items())
        return DecisionPart(
            tokens=tokens,
            days=None if self.tokens is None else hours * HOUR / DAY,
            cost=None if price is None else price * hours,
            energy_kwh=None if math.isnan(watts) else watts / 1e3 * hours,
            goodput=goodput,
            save_interval_s=saves,
        )

    def notes(self, cluster: Cluster) -> list[str]:
        """Return the assumptions, a line each."""
        lines = []
        if self.tokens is not None:
            unknown = " and ".join(name for name in devices_of(cluster) if power_of(name) is None)
            energy = "kWh: boards at the power limit of their data sheets, without hosts, network and cooling"
            energy = f"the power of {unknown} is not known" if unknown else energy
            lines.append(f"days: {count_text(self.tokens)} tokens at the predicted times; {energy}")
        if self.between_failures_s and (found := self.goodput(cluster.num_devices)):
            hours = self.between_failures_s / cluster.num_devices / HOUR
            lines.append(
                f"goodput: a failure each {hours:,.1f} hours on {cluster.num_devices:,} devices, a restart of "
                f"{self.restart_s:g} s, and each {found[0] / 60:,.1f} minutes a save of {self.save_s:g} s"
            )
        return lines


NOT_ASKED = Training()  # without flags


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a whole training."""
    group = parser.add_argument_group("training", "days, price, energy and goodput of a whole training")
    group.add_argument("--tokens", metavar="N", help="tokens of the training, such as 300B, 2T or 15e12")
    group.add_argument("--price", metavar="P", help="of a device hour, such as 2.5; of each kind: A100=2.5,V100=1.2")
    group.add_argument(
        "--failures-per-device-year", metavar="R", help="failures that end the job; Llama 3 405B on 16,384 H100: 0.17"
    )
    group.add_argument("--save-seconds", metavar="T", help="time without training for a save")
    group.add_argument(
        "--restart-seconds", metavar="T", help=f"from a failure to the next iteration (default: {RESTART_S:g})"
    )


def training_of(options: argparse.Namespace, cluster: Cluster) -> Training:
    """Return the training that the flags describe."""
    tokens, rate, save_s, restart_s = (
        None if (text := getattr(options, name)) is None else _number(text, f"--{name.replace('_', '-')} {text}")
        for name in ("tokens", "failures_per_device_year", "save_seconds", "restart_seconds")
    )
    prices = {} if options.price is None else parse_prices(options.price, list(devices_of(cluster)))
    if (rate is None) != (save_s is None) or (rate is None and restart_s is not None):
        missing = "--failures-per-device-year" if rate is None else "--save-seconds"
        raise ConfigError(f"{missing} is missing, and a goodput needs failures and saves: give it")
    training = Training(
        tokens=tokens,
        prices=prices,
        between_failures_s=None if rate is None else YEAR / rate,
        save_s=save_s or 0.0,
        restart_s=restart_s or RESTART_S,
    )
    lost_s = training.save_s + training.restart_s
    if rate is not None and (mean_s := YEAR / rate / cluster.num_devices) <= lost_s:
        raise ConfigError(
            f"--failures-per-device-year {rate:g} is a failure each {mean_s:.3g} s on {cluster.num_devices:,} devices, "
            f"and a save and a restart take {lost_s:g} s: correct them"
        )
    return training


def parse_prices(text: str, devices: Sequence[str]) -> dict[str, float]:
    """Return the price of an hour of each device, from 2.5 or A100=2.5,V100=1.2."""
    parts = text.split(",") if "=" in text or len(devices) > 1 else [f"{devices[0]}={text}"]
    given = [[word.strip() for word in part.partition("=")[::2]] for part in parts]
    found, unused, fault = {}, {name for name, _ in given}, None
    for device in devices:
        named = [pair for pair in given if names_one_device(pair[0], device)]
        # V100 is the one of 16 GB, and any other V100 without a price of its own.
        named = named or [pair for pair in given if name_words(pair[0]) <= name_words(device)]
        if len(named) == 1:
            found[device] = _number(named[0][1], f"--price {text}")
            unused.discard(named[0][0])
        else:
            fault = fault or f"{'two prices' if named else 'no price'} of {device}"
    if fault or unused:
        fault = fault or f"{' and '.join(sorted(unused))}, which the cluster has not"
        raise ConfigError(f"--price {text} has {fault}: give {','.join(f'{each}=PRICE' for each in devices)}")
    return found


def _number(text: str, given: str) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:E[+-]?[0-9]+)?)([KMBT]?)", text.strip().upper())
    number = float(match[1]) * _SCALES[match[2]] if match else 0.0
    if not 1e-9 <= number <= 1e18:
        raise ConfigError(f"{given} is not a number above 0 and up to 1e18: give one such as 2.5, 15e12 or 300B")
    return number
