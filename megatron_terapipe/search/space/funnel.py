"""How many strategies each rule rejected."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Funnel:
    """Counts of a search, in the order in which strategies fall out of it.

    Attributes:
        total: strategies of the whole space.
        rejected: how many each rule was the first to reject, by its name.
        priced: strategies that kept all rules and were priced in closed form.
        simulated: strategies that were priced on their schedule.
    """

    total: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    priced: int = 0
    simulated: int = 0

    def expect(self, names: Iterable[str]) -> None:
        """Say in which order rules are to be listed."""
        for name in names:
            self.rejected.setdefault(name, 0)

    def reject(self, name: str, number: int) -> None:
        """Count strategies that a rule rejects."""
        if number:
            self.rejected[name] += number

    @property
    def num_rejected(self) -> int:
        """All that were rejected."""
        return sum(self.rejected.values())

    def lines(self) -> list[tuple[str, int]]:
        """What to print: a label and a count a line."""
        return [
            ("strategies of the space", self.total),
            *((f"  rejected: {name}", -number) for name, number in self.rejected.items() if number),
            ("feasible", self.total - self.num_rejected),
            ("priced on their schedule", self.simulated),
        ]
