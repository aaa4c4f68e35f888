"""One calibration for each cluster that trials are of: what one cluster reaches of its data sheets, another may not.

A cluster is a source and its kinds of devices: links, drivers and libraries differ from site to site. A trial of a
cluster that nobody calibrated takes the calibration of all trials on such devices, and one of other devices none.
"""

from collections.abc import Callable, Iterable, Sequence

from megatron_terapipe.search.calibrate.calibration import Calibration, calibrate, no_calibration
from megatron_terapipe.search.trials.trial import Trial

Progress = Callable[[str], None]


class Calibrations:
    """Calibrations of several clusters, fitted when they are first asked for.

    Args:
        trials: what was measured; none = nothing is calibrated.
        ready: calibrations that were read from a file.
        progress: told what is being fitted.
    """

    def __init__(
        self, trials: Sequence[Trial] = (), ready: Iterable[Calibration] = (), progress: Progress = lambda _: None
    ) -> None:
        self._trials = list(trials)
        self._found: dict[tuple[str, str], Calibration] = {(one.source, one.device): one for one in ready}
        self._progress = progress
        self._none = no_calibration()

    def of(self, source: str, device: str) -> Calibration:
        """The calibration for a source and its devices; `source` is empty where nobody is known."""
        key = source, device
        if key not in self._found:
            self._found[key] = self._fit(source, device)
        return self._found[key]

    def fitted(self) -> list[Calibration]:
        """One for each cluster that the trials are of, and those that were read."""
        for one in self._trials:
            self.of(one.source, one.device)
        unique = {id(one): one for one in self._found.values() if one is not self._none}
        return list(unique.values())

    def _fit(self, source: str, device: str) -> Calibration:
        same_device = [one for one in self._trials if one.device == device]
        own = [one for one in same_device if one.source == source]
        if not same_device:
            ready = [one for (_, kinds), one in self._found.items() if kinds == device and one is not self._none]
            return ready[0] if len(ready) == 1 else self._none
        if not own and ("", device) in self._found:
            return self._found["", device]
        trials = own or same_device
        self._progress(f"calibrating on {len(trials)} trials of {trials[0].source} ({device})")
        found = calibrate(trials)
        if not own:
            self._found["", device] = found
        return found
