"""Flags of other trainers, read from the table `foreign_flags.toml`, which begins with the meaning of its parts."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, TRAINING_CANNOT_BE_RUN

TABLE = Path(__file__).with_suffix(".toml")

Verdict = Literal["accepted", "neutral", "idle", "refused"]
Takes = Literal[0, 1, "*"]
"""Number of values of a flag; `*` = any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignFlag:
    """A flag of another trainer."""

    verdict: Verdict

    text: str = ""
    """Reason why the flag has no effect; of a flag that is refused, or refused at other values, reason and remedy. Of
    an idle flag, they are those with the flag `without`."""

    takes: Takes = 0

    values: tuple[str, ...] = ()
    """Values without effect; empty if all are, or it takes none."""

    choices: tuple[str, ...] = ()
    """Values that its own trainer takes; empty if any, or if it takes none."""

    says: tuple[str, object] | None = None
    """Field of the configuration that it is about, and the value that it promises."""

    needs: str = ""
    """Field of the configuration that must be set, too; empty if none."""

    without: str = ""
    """Of an idle flag, the flag without which it has no effect in its own trainer either; empty if it concerns
    operation only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignFlags:
    """All of them, by their spelling with dashes."""

    flags: Mapping[str, ForeignFlag]

    families: Mapping[str, str]
    """Line about flags that newer versions add, by the first word of the flag."""

    needed: Mapping[str, tuple[str, ...]]
    """Flags of which one must be given, too, by a flag of ours that Megatron ignores without the first of them."""

    one_value: Mapping[str, str]
    """Line about several values of a flag of ours that takes them in Megatron, by the flag."""

    other_names: Mapping[str, str]
    """Flag of ours, by the name that others have for it."""

    def having(self, verdict: Verdict) -> dict[str, ForeignFlag]:
        """Return the flags of one verdict."""
        return {name: each for name, each in self.flags.items() if each.verdict == verdict}

    def refusal(self, name: str, values: tuple[str, ...], given: Collection[str]) -> str | None:
        """Return why a flag is refused with these values beside the flags given, and the remedy; None if it is not."""
        found = self.flags.get(name)
        if found is None:
            return next((line for beginning, line in self.families.items() if name.startswith(beginning)), None)
        has_effect = not found.values or not set(values) <= set(found.values)
        refused = {
            "refused": True,
            "neutral": has_effect,
            "idle": has_effect and bool(found.text) and found.without in given,
        }
        return found.text if refused.get(found.verdict) else None


@cache
def foreign_flags() -> ForeignFlags:
    """Read the table."""
    import tomllib

    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return ForeignFlags(
        flags=dict(_flags_of(table)),
        families={f"--{word}-": line for line, words in table["families"].items() for word in words.split()},
        needed={f"--{name}": tuple(f"--{each}" for each in others.split()) for name, others in table["needed"].items()},
        one_value={f"--{name}": line for line, names in table["one-value"].items() for name in names.split()},
        other_names={
            f"--{name}": f"--{ours}" for ours, names in table["other-names"].items() for name in names.split()
        },
    )


def _flags_of(table: Mapping[str, Any]) -> Iterator[tuple[str, ForeignFlag]]:
    kinds: tuple[tuple[str, Takes], ...] = (("bare", 0), ("one", 1), ("several", "*"))
    verdicts: tuple[Verdict, ...] = ("accepted", "neutral", "idle")
    for verdict in verdicts:
        for row in table[verdict]:
            names = {takes: row.pop(kind, "").split() for kind, takes in kinds}
            facts: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
            }
            for takes, of_kind in names.items():
                for name in of_kind:
                    choices = tuple(table["choices"].get(name, "").split())
                    yield f"--{name}", ForeignFlag(verdict=verdict, takes=takes, choices=choices, **facts)
    ends = {
        "refused": "",
        "another-model": f": {MODEL_CANNOT_BE_TRAINED}",
        "another-training": f": {TRAINING_CANNOT_BE_RUN}",
    }
    for part, end in ends.items():
        for line, names in table[part].items():
            for name in names.split():
                yield f"--{name}", ForeignFlag(verdict="refused", text=line + end)
