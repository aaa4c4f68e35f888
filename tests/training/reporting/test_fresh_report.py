"""The report of a run that trains is fresh, and takes a hundredth of its time at most."""

from megatron_terapipe.training.reporters import FreshReport
from tests.run_report.made_up import iteration


class Watched:
    """A clock that is set by hand, and a report that takes some of its time."""

    def __init__(self, takes_s: float) -> None:
        self.now_s, self.takes_s, self.written_at = 0.0, takes_s, []

    def clock(self) -> float:
        return self.now_s

    def refresh(self) -> bool:
        self.written_at.append(self.now_s)
        self.now_s += self.takes_s
        raise OSError("disk full: told at the end")


def test_a_report_is_written_as_often_as_a_hundredth_of_the_time_allows() -> None:
    watched = Watched(takes_s=0.5)
    fresh = FreshReport(watched.refresh, watched.clock)
    for number in range(1, 401):
        watched.now_s += 1.0
        fresh.iteration(iteration(number))
    assert watched.written_at[:2] == [100.0, 150.5]
    assert len(watched.written_at) * watched.takes_s <= watched.now_s / 100
