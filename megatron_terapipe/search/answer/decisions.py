"""Days, device hours and price of a whole training, from the predicted time of one iteration."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_terapipe.devices import name_words
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.answer.figures import devices_of
from megatron_terapipe.search.answer.json_documents import DecisionPart
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.library import names_one_device
from megatron_terapipe.search.rank.search import Ranked
from megatron_terapipe.search.rank.space import SearchProblem

HOUR, DAY = 3600.0, 86_400.0
MILLION = 1e6  # tokens that device hours and price are of without `--tokens`

_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A whole training, as flags describe it."""

    tokens: float | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    """Price of a device hour by the name of the device; empty = not given."""

    def hourly_price(self, devices: Mapping[str, int]) -> float | None:
        """Return the price of an hour of some devices."""
        return sum(number * self.prices[name] for name, number in devices.items()) if self.prices else None

    def decision(self, problem: SearchProblem, entry: Ranked) -> DecisionPart | None:
        """Return the figures of a strategy; None if it cannot run, or no flag is given."""
        if self == NOT_ASKED or not entry.feasible or entry.prediction is None:
            return None
        devices = devices_of(problem.cluster, entry.strategy)
        tokens = self.tokens or MILLION
        steps = tokens / (entry.strategy.num_sequences * problem.workload.seq_length)
        hours, price = steps * entry.iteration_time_s / HOUR, self.hourly_price(devices)
        return DecisionPart(
            tokens=tokens,
            days=None if self.tokens is None else hours * HOUR / DAY,
            device_hours=hours * sum(devices.values()),
            cost=None if price is None else price * hours,
        )


NOT_ASKED = Training()  # without flags


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a whole training."""
    group = parser.add_argument_group("training", "days, device hours and price of a whole training")
    group.add_argument("--tokens", metavar="N", help="tokens of the training, such as 300B, 2T or 15e12")
    group.add_argument("--price", metavar="P", help="of a device hour, such as 2.5; of each kind: A100=2.5,V100=1.2")


def training_of(options: argparse.Namespace, cluster: Cluster) -> Training:
    """Return the training that the flags describe."""
    tokens = None if options.tokens is None else _number(options.tokens, f"--tokens {options.tokens}")
    prices = {} if options.price is None else parse_prices(options.price, list(devices_of(cluster)))
    return Training(tokens=tokens, prices=prices)


def parse_prices(text: str, devices: Sequence[str]) -> dict[str, float]:
    """Return the price of an hour of each device, from 2.5 or A100=2.5,V100=1.2."""
    parts = text.split(",") if "=" in text or len(devices) > 1 else [f"{devices[0]}={text}"]
    given = [[word.strip() for word in part.partition("=")[::2]] for part in parts]
    found, unused, faults = {}, {name for name, _ in given}, []
    for device in devices:
        named = [pair for pair in given if names_one_device(pair[0], device)]
        # V100 is the one of 16 GB, and any other V100 without a price of its own.
        named = named or [pair for pair in given if name_words(pair[0]) <= name_words(device)]
        if len(named) == 1:
            found[device] = _number(named[0][1], f"--price {text}")
            unused.discard(named[0][0])
        else:
            faults.append(f"{'two prices' if named else 'no price'} of {device}")
    faults += [f"{name}, which the cluster has not" for name in sorted(unused)]
    if faults:
        raise ConfigError(f"--price {text} has {faults[0]}: give {','.join(f'{each}=PRICE' for each in devices)}")
    return found


def _number(text: str, given: str) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:E[+-]?[0-9]+)?)([KMBT]?)", text.strip().upper())
    number = float(match[1]) * _SCALES[match[2]] if match else 0.0
    if not 1e-9 <= number <= 1e18:
        raise ConfigError(f"{given} is not a number above 0 and up to 1e18: give one such as 2.5, 15e12 or 300B")
    return number
