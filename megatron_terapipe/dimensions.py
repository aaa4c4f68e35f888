"""Declarations of the fields of a strategy: flags, tables, reports and checks follow from them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from megatron_terapipe.config import Config
from megatron_terapipe.config.options import option_of
from megatron_terapipe.errors import ConfigError


class Tried(Enum):
    """Values that the search tries where they follow from the model, the cluster or the batch."""

    REST_OF_DEVICES = auto()
    """The one size with which all devices are used."""

    DIVISORS_OF_DEVICES = auto()
    DIVISORS_OF_BATCH = auto()
    COUNTS_OF_TOKEN_SLICES = auto()
    SHARES_OF_HEADS = auto()
    """Divisors of the devices that divide the attention heads, where sequences are long; else 1."""

    SHARES_OF_EXPERTS = auto()
    """Divisors of the devices that divide the experts of every layer; 1 in a model without experts."""

    KEPT_OF_LATENTS = auto()
    """Keys and values, and in a model with latent attention that can be cut into token slices also latents."""

    SHARDS_OF_A_NODE = auto()
    """None, and on several nodes the divisors of the devices of one, from 2."""


Placed = tuple[int, str]
"""A place among the dimensions in some view, lowest first, and the words there."""


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A field of a strategy, with its flag, its column and its other views."""

    name: str = ""
    default: Any = None
    types: tuple[Any, ...] = ()
    """Types of its values, by the annotation: int, bool, str, None, and tuples of whole numbers."""
    least: int = 1
    most: float = 10**9
    """Largest number; the largest of the field of the configuration that it sets, where there is one."""
    setting: str | None = None
    """Field of the configuration that it sets; None = the one of its name, empty = none."""
    trained: tuple[Any, ...] = ()
    """Values that the trainer supports; empty = all."""
    priced: tuple[Any, ...] = ()
    """Values that the search can price, and that flags may have; empty = all."""
    found: tuple[str, ...] = ()
    """Words of its flag for values that need an order of ops to be found: priced one by one, and not ranked."""
    tried: tuple[Any, ...] | Tried | None = None
    """Values that the search tries without a flag; None = not searched."""
    tried_if_long: tuple[Any, ...] = ()
    """Values that it tries in addition where sequences are long."""
    optional: bool = False
    """Whether JSON objects leave it out where it has its default."""
    ranks: bool = False
    """Whether it multiplies the number of ranks."""
    axis: str = ""
    """Axis of `StrategyGrid` that it is on; empty = all strategies of a grid have the same value."""
    flag_help: Placed | None = None
    """Place and help of the search's flag that constrains it; None = no flag."""
    label: Placed | None = None
    """Place and name in comparisons; None = not compared."""
    none: str = "as it comes"
    """The words for None in comparisons."""
    column: Placed | None = None
    """Place and name in tables; None = not shown."""
    usual: str = ""
    """Text of the column that is not worth a column where every row has it; empty = none."""
    phrase: Placed | None = None
    """Place and template in a strategy written in one line; None = left out."""
    always: bool = False
    """Whether the phrase is also there for the default."""
    tie: int
    """Place in the order that decides between strategies of the same cost."""
    tie_key: Callable[[Any], Any] | None = None
    """Sort key of its values there; None = the values themselves, None and names before lists."""

    @property
    def flag(self) -> str:
        """Flag of the search that constrains it."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_text(self) -> bool:
        """Whether columns of it are aligned to the left."""
        return str in self.types or tuple in self.types

    @property
    def metavar(self) -> str:
        """Name of the value of its flag in the help text."""
        return "LENGTHS" if tuple in self.types and str not in self.types else "LIST"

    def parse(self, text: str) -> tuple[Any, ...]:
        """Return the values that its flag lists, each once; a flag of lists gives one list."""
        for word in self.found:
            if word in text.replace(" ", "").split(","):
                raise ConfigError(
                    f"{self.flag} {word} is not ranked, because an order of ops has to be found for each strategy: "
                    f"leave {word} out; rank reports its saving for the winner, and predict prices it"
                )
        values = self._values(text)
        self._check_most(values, self.flag)
        return values

    def _values(self, text: str) -> tuple[Any, ...]:
        if bool in self.types:
            return tuple(value == "on" for value in self._words(text, ("off", "on")))
        if str in self.types and not (tuple in self.types and text[:1].isdigit()):
            return self._words(text, self.priced)
        if str in self.types:
            return (self._whole_numbers(text, ()),)
        if int in self.types:
            return tuple(dict.fromkeys(self._whole_numbers(text, self.priced)))
        values = _numbers(text)
        if not values or min(values) < self.least:
            raise ConfigError(f"{self.flag} {text} is not lengths with commas between them: write 704,688,656")
        return values

    def _whole_numbers(self, text: str, allowed: Sequence[Any]) -> tuple[int, ...]:
        values, least = _numbers(text), self.least
        if values and min(values) >= least and (not allowed or set(values) <= set(allowed)):
            return values
        if len(allowed) == 1:
            raise ConfigError(f"{self.flag} {text} is not {allowed[0]}, the only value that can be priced: write it")
        which = f"among {', '.join(map(str, allowed))}" if allowed else f"from {least}"
        raise ConfigError(
            f"{self.flag} {text} is not whole numbers {which} with commas between them: write {least},{least + 1}"
        )

    def _words(self, text: str, choices: Sequence[str]) -> tuple[str, ...]:
        values = tuple(part.strip() for part in text.split(","))
        for value in values:
            if value not in choices:
                raise ConfigError(f"{self.flag} {value} is not known: choose among {', '.join(choices)}")
        return tuple(dict.fromkeys(values))

    def check(self, value: object) -> None:
        """Check that a strategy may have a value."""
        if isinstance(value, str | NoneType | bool) and type(value) in self.types:
            return
        if tuple in self.types and not isinstance(value, tuple):
            self._refuse(value, "a list: write it as [1, 2]")
        if bool in self.types:
            self._refuse(value, "true or false: write one")
        if self.types == (str,):
            self._refuse(value, "a name: write one")
        for number in value if isinstance(value, tuple) and tuple in self.types else (value,):
            if not isinstance(number, int) or isinstance(number, bool) or number < self.least:
                self._refuse(number, f"a whole number from {self.least}: give one")
        self._check_most(value, f"strategy: {self.name}")

    def _refuse(self, value: object, wanted: str) -> NoReturn:
        raise ConfigError(f"strategy: {self.name} {json.dumps(value)} is not {wanted}")

    def _check_most(self, value: object, said: str) -> None:
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and number > self.most:
                raise ConfigError(f"{said} {number} is more than {self.most:,}: give {self.most:,} or less")

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the values that `check` takes."""
        whole = {"type": "integer", "minimum": self.least, "maximum": int(self.most)}
        schemas: dict[Any, dict[str, Any]] = {
            int: whole,
            bool: {"type": "boolean"},
            str: {"type": "string"},
            tuple: {"type": "array", "items": whole},
            NoneType: {"type": "null"},
        }
        found = [schemas[each] for each in self.types]
        default = list(self.default) if isinstance(self.default, tuple) else self.default
        return {**(found[0] if len(found) == 1 else {"anyOf": found}), "default": default}

    def tie_key_of(self, value: Any) -> Any:
        """Return the sort key of a value among strategies of the same cost, smallest first."""
        if self.tie_key is not None:
            return self.tie_key(value)
        return value is not None, isinstance(value, tuple), value

    def check_trained(self, value: object) -> None:
        """Check that the trainer supports a value."""
        if self.trained and value not in self.trained:
            choices = " or ".join(json.dumps(choice) for choice in self.trained)
            raise ConfigError(f"strategy: {self.name} {json.dumps(value)} cannot be trained yet: use {choices}")


def dimension(default: Any, **facts: Any) -> Any:
    """Declare a field of a strategy, as `option` declares one of a section: its type is the annotation's."""
    return field(default=default, metadata={"dimension": Dimension(default=default, **facts)})


def dimensions_of(strategy: type[Any]) -> tuple[Dimension, ...]:
    """Return the dimensions that the fields of a dataclass declare, in their order."""
    sections = Config.sections().values()
    most = {each.name: option_of(each).most for section in sections for each in fields(section)}
    hints = get_type_hints(strategy)
    found = []
    for declared in fields(strategy):
        facts, hint = declared.metadata["dimension"], hints[declared.name]
        setting = declared.name if facts.setting is None else facts.setting
        types = (hint,) if isinstance(hint, type) else tuple(get_origin(each) or each for each in get_args(hint))
        most_of_setting = most.get(setting) or facts.most
        found.append(replace(facts, name=declared.name, types=types, setting=setting, most=most_of_setting))
    return tuple(found)


def ordered_for(dimensions: Sequence[Dimension], view: str) -> list[tuple[Dimension, str]]:
    """Return the dimensions that a view shows, in its order, each with its words there.

    Args:
        view: a field of `Dimension` that has a place and words, such as `column`.
    """
    shown = [(each, getattr(each, view)) for each in dimensions if getattr(each, view) is not None]
    return [(each, words) for each, (_, words) in sorted(shown, key=lambda pair: pair[1][0])]


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them; empty if they are something else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        return ()
