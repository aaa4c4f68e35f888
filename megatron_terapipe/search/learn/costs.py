"""Sources of prices: data sheets, a profile, trials. The commands of the search and the trainer share them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_terapipe.search.learn.calibration import Calibration, calibrate, no_calibration
from megatron_terapipe.search.learn.cluster_calibrations import calibrated
from megatron_terapipe.search.learn.trials import Trial
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.cost_model import Prediction, Pricing
from megatron_terapipe.search.price.efficiency import ProfileFactors, is_guessed
from megatron_terapipe.search.price.layer_times import OpTimes, ScaledTimes
from megatron_terapipe.search.price.makespan import ScheduleSimulator
from megatron_terapipe.search.price.profile import Profile
from megatron_terapipe.search.price.profile_times import (
    MeasuredProfile,
    measured_cluster,
    measured_efficiency,
    profile_notes,
)
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The sources of prices."""

    workload: Workload
    precision: str
    software: Software
    calibration: Calibration
    """Constants that were fitted to trials, or the defaults."""
    profile: Profile | None
    """Measured op times and links; None = data sheets."""
    notes: tuple[str, ...] = ()
    """The sources, a line each."""
    simulator: ScheduleSimulator = field(default_factory=ScheduleSimulator, repr=False, compare=False)
    """Shared by all clusters, as the orders of schedules do not depend on them."""

    def pricing_on(self, cluster: Cluster) -> Pricing:
        """Return the pricing of strategies on a cluster, or on its nodes in another order, without intervals."""
        efficiency, factors = self.calibration.efficiency, self.calibration.factors
        op_times: OpTimes | None = None
        if self.profile is not None:
            op_times = MeasuredProfile(self.profile)
            efficiency = measured_efficiency(self.profile, cluster, efficiency, self.software)
            if factors is not None:
                op_times, efficiency = ScaledTimes(op_times, factors.ops), factors.efficiency(efficiency)
        return Pricing(
            self.workload,
            cluster,
            software=self.software,
            efficiency=efficiency,
            memory_overheads=self.calibration.memory_overheads,
            op_times=op_times,
            precision=self.precision,
            simulator=self.simulator,
            measured_cluster=None if self.profile is None else measured_cluster(self.profile, cluster),
        )

    def problem_with(self, problem: SearchProblem, constraints: Mapping[str, tuple[Any, ...]]) -> SearchProblem:
        """Return the problem with the combinations of values that flags name or trials have."""
        named = "schedule" in constraints and not constraints.keys().isdisjoint({"num_token_slices", "token_slices"})
        return replace(problem, interleaves_token_slices=named or self.calibration.interleaves_token_slices)

    def with_interval(self, strategy: Strategy, prediction: Prediction, pricing: Pricing) -> Prediction:
        """Return a price with its interval; it takes as long as pricing a few hundred strategies in closed form."""
        time_s = prediction.iteration_time_s
        (interval_s,) = self.calibration.intervals_s(pricing.cost_model, [strategy], [time_s])
        return replace(prediction, interval_s=interval_s, interval_coverage=self.calibration.intervals.coverage)

    def calibrated_on(self, trials: Sequence[Trial]) -> "Costs":
        """Return these sources with constants fitted to trials of this cluster, as `--calibrate` does it."""
        return replace(self, calibration=calibrate(trials, self.profile))


def read_costs(
    workload: Workload,
    cluster: Cluster,
    precision: str,
    *,
    profile: Profile | None,
    calibration_path: str | None,
    software: Software = TERAPIPE,
) -> Costs:
    """Return the sources of prices of a model on a cluster.

    Args:
        profile: None = data sheets and formulas.
        calibration_path: trials of this cluster, or constants that were fitted to them; None = the defaults.
    """
    notes: list[str] = [] if profile is None else [*profile_notes(profile, cluster)]
    if calibration_path is None:
        calibration = no_calibration(cluster if profile is None else None)
        guessed = sorted({node.device.name for node in cluster.nodes if is_guessed(node.device)})
        if guessed and profile is None:
            notes.append(f"the speed of kernels on {' and '.join(guessed)} is a guess: measure it (--profile)")
    else:
        calibration = calibrated(cluster, calibration_path, profile)
        notes.append(
            f"calibrated on {calibration.num_trials} trials of {calibration_path}{_in_words(calibration.factors)}"
        )
        notes += [f"{calibration_path}: {note}" for note in calibration.notes]
    return Costs(
        workload=workload,
        precision=precision,
        software=software,
        calibration=calibration,
        profile=profile,
        notes=tuple(notes),
    )


def _in_words(factors: ProfileFactors | None) -> str:
    """Return the factors on a profile in words."""
    if factors is None:
        return ""
    return (
        f": compared with the profile, ops take {factors.ops:.2f} times as long, messages {factors.messages:.2f}, "
        f"gaps between ops {factors.gaps:.2f}, the end of a step {factors.step:.2f}"
    )
