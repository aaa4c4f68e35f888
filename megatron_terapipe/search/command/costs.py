"""Sources of prices that the flags of a command name."""

import argparse

from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.search.software.description import Software
from megatron_terapipe.search.software.terapipe import TERAPIPE
from megatron_terapipe.search.trials.costs import Costs as Costs
from megatron_terapipe.search.trials.costs import read_costs


def costs_of(
    options: argparse.Namespace,
    workload: Workload,
    cluster: Cluster,
    precision: str,
    software: Software = TERAPIPE,
) -> Costs:
    """Return the sources that the flags name; their files are read.

    Raises:
        ConfigError: if a file cannot be read, or says nothing of this cluster.
    """
    return read_costs(
        workload,
        cluster,
        precision,
        profile_path=options.profile,
        calibration_path=options.calibrate or options.calibration,
        software=software,
    )
