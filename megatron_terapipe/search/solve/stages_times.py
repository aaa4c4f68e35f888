"""What each stage would take with each run of layers: the input of the exact partition."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.errors import ConfigError

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class StageTimes:
    """Seconds by stage, first layer and the layer behind the last; infinite where that is not possible.

    Attributes:
        period_s: [num_stages, L + 1, L + 1] what the stage spends on one micro-batch.
        fill_s: [num_stages, L + 1, L + 1] what it adds to the time in which one micro-batch passes all stages.
    """

    period_s: Numbers
    fill_s: Numbers

    @property
    def num_stages(self) -> int:
        """Stages."""
        return int(self.period_s.shape[0])

    @property
    def num_layers(self) -> int:
        """Layers that they hold."""
        return int(self.period_s.shape[1]) - 1


def stage_times(
    layer_times_s: Numbers,
    num_stages: int,
    *,
    cut_times_s: Numbers | None = None,
    blocking: bool = False,
    allowed: NDArray[np.bool_] | None = None,
) -> StageTimes:
    """Times of stages whose layers add up; arguments are those of `stages.best_partition`.

    Raises:
        ConfigError: if there are fewer layers than stages.
    """
    layers = np.atleast_2d(np.asarray(layer_times_s, dtype=np.float64))
    num_layers = layers.shape[1]
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"stage_partition: {num_layers} layers on {num_stages} stages: give between 1 and {num_layers} stages"
        )
    before = np.zeros((layers.shape[0], num_layers + 1))
    np.cumsum(layers, axis=1, out=before[:, 1:])
    compute = before[:, None, :] - before[:, :, None]
    possible = np.triu(np.ones((num_layers + 1, num_layers + 1), dtype=bool), k=1)
    fill = np.where(possible, compute, np.inf)
    fill = np.array(np.broadcast_to(fill, (num_stages, *fill.shape[1:])))
    period = fill.copy()
    if cut_times_s is not None and num_stages > 1:
        cuts = np.broadcast_to(
            np.atleast_2d(np.asarray(cut_times_s, dtype=np.float64)), (num_stages - 1, num_layers + 1)
        )
        # Each cut counts once in the sum: with the stage that ends there.
        fill[:-1] += cuts[:, None, :]
        if blocking:
            period[:-1] += cuts[:, None, :]
            period[1:] += cuts[:, :, None]
    if allowed is not None:
        fill[~allowed] = np.inf
        period[~allowed] = np.inf
    # The first stage begins with the first layer, the last one ends with the last.
    period[0, 1:] = period[-1, :, :-1] = np.inf
    return StageTimes(period, fill)
