"""Numbers of iterations as a flag names them: `10`, `10,20`, `30-34`."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class IterationNumbers:
    """Some iterations of a run.

    Attributes:
        runs: first and last of each run of consecutive numbers, in rising order.
    """

    runs: tuple[tuple[int, int], ...]

    def __contains__(self, iteration: int) -> bool:
        """Whether an iteration is one of them."""
        return any(first <= iteration <= last for first, last in self.runs)

    @property
    def last(self) -> int:
        """The last of them."""
        return self.runs[-1][1]

    @classmethod
    def parse(cls, text: str, flag: str) -> "IterationNumbers":
        """Read numbers and runs of numbers, with commas between them.

        Args:
            text: the text.
            flag: the flag that it is given to, for the error.

        Raises:
            ConfigError: if it is something else, or names an iteration below 1.
        """
        try:
            runs = tuple(sorted(_runs(text)))
        except ValueError:
            raise ConfigError(f"{flag} {text} is no list of iterations: write it as 10 or 10,20 or 30-34") from None
        if runs[0][0] < 1:
            raise ConfigError(f"{flag} {text} names an iteration that is never done: count from 1")
        return cls(runs)


def _runs(text: str) -> Iterator[tuple[int, int]]:
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        run = int(first), int(last) if dash else int(first)
        if run[1] < run[0]:
            raise ValueError(part)
        yield run
