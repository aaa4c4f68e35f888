"""One calibration for each cluster that trials are of: what one cluster reaches of its data sheets, another may not.

A cluster is a source and its kinds of devices: links, drivers and libraries differ from site to site. Trials that name
no source are of whichever cluster they are used for. What nobody calibrated keeps the defaults.
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
        self._ready = list(ready)
        self._found: dict[tuple[str, str], Calibration] = {}
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
        clusters = dict.fromkeys((one.source, one.device) for one in self._trials)
        return [*self._ready, *(self.of(*cluster) for cluster in clusters)]

    def _fit(self, source: str, device: str) -> Calibration:
        trials = [one for one in self._trials if one.device == device and _same(one.source, source)]
        if not trials:
            ready = [one for one in self._ready if one.device == device and _same(one.source, source)]
            return ready[0] if len(ready) == 1 else self._none
        self._progress(f"calibrating on {len(trials)} trials of {trials[0].source or trials[0].path} ({device})")
        return calibrate(trials)


def _same(source: str, wanted: str) -> bool:
    return not source or not wanted or source == wanted
