"""The order in which samples come from several datasets: always from the one furthest below its share, as in Megatron.

Megatron compares all datasets for each sample. Here they play a tournament, in which a match is played again only once
its result may be another: after a sample of its winner, and from the moment at which the loser may overtake. A sample
costs about the logarithm of the number of datasets, and the order is Megatron's to the last tie.

The order is computed in blocks, when they are read. Where a block begins, all that matters is how many samples each
dataset has given, of which some are stored.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from math import inf
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.simulate.arrays import compiled
from megatron_terapipe.data.file_arrays import IndexCache, with_progress

_BLOCK, _BLOCKS_KEPT = 1 << 18, 4
"""Samples of a block, and blocks in memory: threads of a loader read neighbouring ones."""
_BLOCKS_STORED_ONCE = 64
"""Blocks after which the samples that were given are stored: some seconds of work."""
_COMPILED_FROM = 20_000
"""Samples from which the compiled function is faster than Python's, with the time to load it."""


class BlendOrder:
    """Dataset of each sample, and its number there. A longer run begins alike.

    Args:
        weights: share of each dataset, positive, in any unit.
        cache: stores how many of the first samples are of each dataset, at some samples; None: they are counted.
    """

    def __init__(self, weights: Sequence[float], num_samples: int, cache: IndexCache | None = None) -> None:
        self._shares = np.asarray(weights, np.float64) / np.sum(weights, dtype=np.float64)
        self._num_samples, self._cache = num_samples, cache or IndexCache(None)
        self._description = {
            "kind": "samples that datasets have given, version 1",
            "weights": hashlib.sha256(np.asarray(weights, "<f8").tobytes()).hexdigest(),
        }
        self._given = {0: np.zeros(len(weights), np.int64)}
        self._lock = Lock()
        self._block = lru_cache(_BLOCKS_KEPT)(self._computed)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, sample: int, /) -> tuple[int, int]:
        """Return the dataset of a sample, and the number of the sample in it."""
        block, place = divmod(sample, _BLOCK)
        with self._lock:
            datasets, numbers = self._block(block)
        return int(datasets[place]), int(numbers[place])

    def given(self, num_samples: int) -> NDArray[np.int64]:
        """Return how many of the first samples are of each dataset, [datasets]."""
        block, rest = divmod(num_samples, _BLOCK)
        with self._lock:
            given = self._given_before(block)
            return given if not rest else given + np.bincount(self._block(block)[0][:rest], minlength=len(given))

    def _computed(self, block: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        first = block * _BLOCK
        datasets, numbers, given = _chosen(
            self._shares, self._given_before(block), first, min(_BLOCK, self._num_samples - first)
        )
        kept = (each for each in self._given if each % _BLOCKS_STORED_ONCE == 0)
        self._given = {each: self._given[each] for each in kept} | {block + 1: given}
        return datasets, numbers

    def _given_before(self, block: int) -> NDArray[np.int64]:
        """Return how many samples before a block are of each dataset, [datasets]."""
        known = max(each for each in self._given if each <= block)
        given = self._given[known]
        while known < block:
            end = min(block, (known // _BLOCKS_STORED_ONCE + 1) * _BLOCKS_STORED_ONCE)
            if end % _BLOCKS_STORED_ONCE:
                return self._advanced(given, known, end)["given"]
            compute = partial(self._advanced, given, known, end)
            stored = self._cache.get(self._description | {"samples": end * _BLOCK}, ("given",), compute)
            given = self._given[end] = np.asarray(stored["given"][:])
            known = end
        return given

    def _advanced(self, given: NDArray[np.int64], known: int, end: int) -> dict[str, NDArray[np.int64]]:
        for block in with_progress(range(known, end), shown=self._cache.keeps):
            given = _chosen(self._shares, given, block * _BLOCK, _BLOCK)[2]
        return {"given": given}


def _chosen(
    shares: NDArray[np.float64], given: NDArray[np.int64], first: int, num_samples: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Choose the datasets of the samples from `first` on.

    Args:
        given: samples before `first` of each dataset, [datasets].

    Returns:
        Dataset of each sample, and its number there, [samples] each; `given` after them.
    """
    # The largest shares first: among similar ones a loser rarely overtakes.
    players = np.argsort(-shares, kind="stable")
    missing = (1 << (len(players) - 1).bit_length()) - len(players)  # They lose every match.
    score = np.concatenate([given[players].astype(np.float64), np.full(missing, 1e300)])
    datasets, numbers = np.empty(num_samples, np.int32), np.empty(num_samples, np.int64)
    choose = _compiled_play() if num_samples >= _COMPILED_FROM else play
    choose(
        np.concatenate([players, np.arange(len(players), len(score))]),
        np.concatenate([shares[players], np.zeros(missing)]),
        score,
        first,
        datasets,
        numbers,
    )
    after = np.empty_like(given)
    after[players] = score[: len(players)]
    return datasets, numbers, after


@cache
def _compiled_play() -> Callable[..., None]:
    return compiled(play)


def play(
    players: NDArray[np.int64],
    shares: NDArray[np.float64],
    given: NDArray[np.float64],
    first: int,
    datasets: NDArray[np.int32],
    numbers: NDArray[np.int64],
) -> None:
    """Fill in the dataset of each sample from `first` on, and the number of the sample in it; count `given` up.

    A dataset's lag is its share of the samples so far, less those that it has given; the larger lag wins, and of equal
    ones the dataset with the lower number. Match 1 is the final; the winners of matches 2 n and 2 n + 1 meet in n.

    Args:
        players: number of each dataset, [a power of two].
        shares: of all samples; in this order of the players, as is `given`.
    """
    size = len(players)
    winners, until = np.empty(2 * size, np.int64), np.empty(2 * size, np.float64)
    for match in range(2 * size):
        winners[match] = match - size
        # The moment from which a match, or one before it, must be played again.
        until[match] = inf if match >= size else 0.0
    # More than the error by rounding of the difference of two lags.
    margin = 2.0**-49 * (first + len(datasets) + 4)
    for place in range(len(datasets)):
        # As in Megatron, the first two samples are both chosen at moment 1.
        moment, chosen = float(max(first + place, 1)), -1
        while True:
            match = 1
            if until[match] <= moment:
                while 2 * match < size and min(until[2 * match], until[2 * match + 1]) <= moment:
                    match = 2 * match + (until[2 * match] > moment)
            elif chosen < 0:
                chosen = winners[match]
                datasets[place] = players[chosen]
                numbers[place] = int(given[chosen])
                given[chosen] += 1.0
                match = (size + chosen) // 2
            else:
                break
            while match:  # Play it, and all that follow from it.
                winner, loser = winners[2 * match], winners[2 * match + 1]
                ahead = (shares[winner] * moment - given[winner]) - (shares[loser] * moment - given[loser])
                if ahead < 0.0 or (ahead == 0.0 and players[loser] < players[winner]):
                    winner, loser, ahead = loser, winner, -ahead
                gains = shares[loser] - shares[winner]
                again = inf
                if gains != 0.0 and ahead <= margin:
                    again = moment + 1.0
                elif gains > 0.0:
                    again = moment + max(1.0, (ahead - margin) / gains)
                winners[match] = winner
                until[match] = min(again, until[2 * match], until[2 * match + 1])
                match //= 2
