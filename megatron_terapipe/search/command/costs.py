"""What prices strategies, as the flags of `inputs.add_cost_flags` say: data sheets, a profile, trials."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from megatron_terapipe.search.calibrate.calibration import Calibration, no_calibration
from megatron_terapipe.search.calibrate.files import calibrated
from megatron_terapipe.search.calibrate.sensitivities import strategy_sensitivities
from megatron_terapipe.search.cluster import Cluster
from megatron_terapipe.search.command.inputs import precision_of
from megatron_terapipe.search.pricing import Pricing
from megatron_terapipe.search.profile import MeasuredProfile, measured_physics, read_profile
from megatron_terapipe.search.workload import Workload
from megatron_terapipe.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Where prices come from.

    Attributes:
        pricing_on: prices strategies on a cluster, or on the same nodes in another order.
        precision: of matrix products.
        notes: what was used, a line each.
    """

    pricing_on: Callable[[Cluster], Pricing]
    precision: str
    notes: tuple[str, ...]
