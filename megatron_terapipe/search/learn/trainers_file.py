"""Files of `--trainers`: more trainers than the package has, and which of them ran which trials.

    trainers: {NAME: {like: megatron-core, ...}}                # differences, as in a file of `--software`
    trials: [{source: TEXT, software: NAME, precision: bf16}]   # for trials that do not state them

`benchmarks/published/trainers.yaml` has the trainers of published runs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.documents import read_document, suggestion
from megatron_terapipe.search.machine.entries import Entry, Text, fault, place, read_entry
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.trainers import SOFTWARE, described_software

Precision = Literal["fp16", "bf16", "fp32", "fp8"]


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression ({error}): correct it") from None
    return text


class TrialRule(Entry):
    """The trainer and the precision of trials that do not state them."""

    source: Text
    """Text in the source of the trials."""
    named: str = ""
    """Software that they name."""
    group: Annotated[str, AfterValidator(_pattern)] = ""
    """Regular expression found in their group."""
    software: Text | None = None
    precision: Precision | None = None


class TrainersEntry(Entry):
    """A file of `--trainers`."""

    trainers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    trials: list[TrialRule] = Field(default_factory=list)


@dataclass(frozen=True)
class Trainers:
    """Trainers by name, and rules of which the first that applies to a trial counts."""

    software: Mapping[str, Software]
    rules: tuple[TrialRule, ...] = ()

    def rule(self, source: str, named: str, group: str) -> TrialRule | None:
        """Return the rule of a trial; None = it has none."""
        rules = (each for each in self.rules if each.source in source and each.named == named)
        return next((each for each in rules if re.search(each.group, group)), None)


OF_PACKAGE = Trainers(SOFTWARE)
"""Trainers of the package, with no rules."""


def read_trainers(path: str) -> Trainers:
    """Read a JSON or YAML file of `--trainers`; a trainer may be `like` one above it."""
    entry = read_entry(TrainersEntry, read_document(path), path)
    known = dict(SOFTWARE)
    for name, differences in entry.trainers.items():
        if name in known:
            raise ConfigError(f"{place(path, 'trainers', name)} is a trainer of the package: give it another name")
        known[name] = described_software({"name": name, **differences}, path, "trainers", name, known=known)
    for index, rule in enumerate(entry.trials):
        if rule.software is not None and rule.software not in known:
            at = place(path, "trials", index, "software")
            raise fault(at, rule.software, "is not a known trainer", suggestion(rule.software, known))
    return Trainers(known, tuple(entry.trials))
