"""Trainers from files: descriptions that users write for `--software`, and more trainers than the package has.

A file of `--trainers` also states which trainers ran which trials; `benchmarks/published/trainers.yaml` is one:

    trainers: {NAME: {like: megatron-core, ...}}                # differences, as in a file of `--software`
    trials: [{source: TEXT, software: NAME, precision: bf16}]   # for trials that do not state them, see `TrialRule`
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from megatron_terapipe.config.parsing import short
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.documents import read_document, suggestion
from megatron_terapipe.search.machine.entries import Entry, FlopsRate, Text, fault, place, read_entry
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.trainers import SOFTWARE

LIKE = "like"
"""Field of a file: the name of the description that it changes."""


def find_software(name: str) -> Software:
    """Return a description by its name, or from a JSON or YAML file.

    A file names the description that it is `like`, and the differences: `{"like": "megatron-core", "name": "ours",
    "communication": {"tensor_parallel_overlap": 0.8}}`. Lists are replaced whole.
    """
    if name in SOFTWARE:
        return SOFTWARE[name]
    if not Path(name).suffix:
        raise ConfigError(f"--software {name} is neither a file nor a known trainer: {suggestion(name, SOFTWARE)}")
    document = read_document(name)
    if not isinstance(document, dict):
        raise ConfigError(f"{name} is not an object: write one with the field {LIKE} and the differences")
    return described_software({"name": Path(name).stem, **document}, name)


def described_software(
    document: Mapping[str, Any], file: str, *path: str, known: Mapping[str, Software] = SOFTWARE
) -> Software:
    """Return the trainer of an object at a place of a file, `like` a known one; `gradients`: `keeping_gradients`."""
    differences = dict(document)
    like, gradients = differences.pop(LIKE, None), differences.pop("gradients", None)
    if not isinstance(like, str) or like not in known:
        raise fault(place(file, *path, LIKE), like, "is not a known trainer", suggestion(str(like), known))
    software = known[like]
    if gradients is not None:
        if gradients not in ("bf16", "fp16", "fp32"):
            raise fault(place(file, *path, "gradients"), gradients, "is not known", "choose among bf16, fp16, fp32")
        software = software.keeping_gradients(gradients)
    if not differences:
        return software
    # Published runs are of the known trainer.
    changed = _changed(asdict(replace(software, measured=())), differences, file, *path)
    try:
        software = TypeAdapter(Software).validate_python(changed)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = place(file, *path, *first["loc"])
        raise ConfigError(f"{at} {short(first['input'])} is wrong ({first['msg']}): correct it") from None
    hidden = software.communication.tensor_parallel_overlap
    if hidden > 1:
        at = place(file, *path, "communication", "tensor_parallel_overlap")
        raise fault(at, hidden, "is not a share up to 1", "give one")
    return software


def _changed(known: Any, given: Any, file: str, *way: str) -> Any:
    """Return known fields with those that are given, objects within objects likewise."""
    if isinstance(known, dict):
        if not isinstance(given, dict):
            raise fault(place(file, *way), given, "is not an object", f"give fields of it: {', '.join(known)}")
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            raise ConfigError(f"{place(file, *way, str(unknown))} is not known: {suggestion(str(unknown), known)}")
        return {
            name: _changed(value, given[name], file, *way, name) if name in given else value
            for name, value in known.items()
        }
    if isinstance(given, int | float) and not (math.isfinite(given) and given >= 0):
        raise fault(place(file, *way), given, "is not a number from 0", "give one")
    return given


Precision = Literal["fp16", "bf16", "fp32", "fp8", "mxfp8"]


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression ({error}): correct it") from None
    return text


class TrialRule(Entry):
    """The trainer and the precision of trials that do not state them, and corrections by their publication."""

    source: Text
    """Text in the source of the trials."""
    named: str = ""
    """Software that they name."""
    group: Annotated[str, AfterValidator(_pattern)] = ""
    """Regular expression found in their group."""
    software: Text | None = None
    precision: Precision | None = None
    recompute: Literal["none", "selective", "full"] | None = None
    """In place of the stated one."""
    half_flops: FlopsRate | None = None
    """Of their devices, in place of the data sheet's."""


NO_RULE = TrialRule(source="-")


class TrainersEntry(Entry):
    """A file of `--trainers`."""

    trainers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    trials: list[TrialRule] = Field(default_factory=list)


@dataclass(frozen=True)
class Trainers:
    """Trainers by name, and rules of which the first that applies to a trial counts."""

    software: Mapping[str, Software]
    rules: tuple[TrialRule, ...] = ()

    def rule(self, source: str, named: str, group: str) -> TrialRule:
        """Return the rule of a trial; one that changes nothing if it has none."""
        rules = (each for each in self.rules if each.source in source and each.named == named)
        return next((each for each in rules if re.search(each.group, group)), NO_RULE)


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
