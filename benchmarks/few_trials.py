"""Errors after eight trials of a cluster: trials that `trials.calibration.design` chooses beside as many at random.

    python -m benchmarks.few_trials TRIALS.jsonl [--trials 8] [--rounds 6]

In each round a third of the trials is held out; the few come from the other two thirds.
"""

import argparse
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.learn.calibration import uncalibrated
from megatron_terapipe.search.learn.cluster_calibrations import propose
from megatron_terapipe.search.learn.fit import NOISE, Sample, fit_efficiency, sample_sensitivities
from megatron_terapipe.search.learn.trials import read_trials
from megatron_terapipe.search.price.efficiency import HardwareEfficiency

RANDOM_PICKS = 3
"""Random choices in each round."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", metavar="TRIALS.jsonl")
    parser.add_argument("--trials", type=int, default=8, help="that are run (default: 8)")
    parser.add_argument("--rounds", type=int, default=6, help="thirds that are held out (default: 6)")
    options = parser.parse_args(argv)
    trials = [one for one in read_trials(options.path) if one.iteration_time_s is not None]
    sample, prior = Sample.of(trials), uncalibrated()
    ratio = sample.simulated_ratio(HardwareEfficiency())
    slopes = sample_sensitivities(sample, HardwareEfficiency(), prior.parameter_names)

    def mape(rows: NDArray[np.int64], held_out: NDArray[np.int64]) -> float:
        efficiency = fit_efficiency(Sample.of([trials[row] for row in rows])).efficiency
        return float(np.abs(np.expm1(sample.errors(efficiency, ratio)[held_out])).mean())

    found: dict[str, list[float]] = {"designed": [], "random": []}
    for round_number in range(options.rounds):
        random = np.random.default_rng(100 + round_number)
        order = random.permutation(len(trials))
        pool, held_out = order[: 2 * len(trials) // 3], order[2 * len(trials) // 3 :]
        chosen = propose(slopes[pool], prior.covariance, NOISE, options.trials)
        found["designed"].append(mape(pool[chosen], held_out))
        for _ in range(RANDOM_PICKS):
            found["random"].append(mape(random.choice(pool, options.trials, replace=False), held_out))
    for name, values in found.items():
        print(f"{name:>10}  mean {np.mean(values):.1%}  worst {np.max(values):.1%}  of {len(values)}")


if __name__ == "__main__":
    main()
