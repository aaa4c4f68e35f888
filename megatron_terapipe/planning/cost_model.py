"""The cost model of a run: that of the search, on the machine and with the profile that flags name.

It follows from the flags and the files that they name, and from no device of this process. So all ranks, a dry run on
a login node and the commands of the search give the same answer for the same run (docs/adr/0029).
"""

from typing import TYPE_CHECKING

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.text.text_files import read_text
from megatron_terapipe.config.config import Config
from megatron_terapipe.config.fields.options import flag
from megatron_terapipe.errors import ConfigError

if TYPE_CHECKING:  # It loads numpy, and not every run asks for prices.
    from megatron_terapipe.search.cost.cost_model import CostModel
    from megatron_terapipe.search.inputs.cluster import Cluster
    from megatron_terapipe.search.trials.costs import Costs

DEVICE = "A100-SXM4-80GB"
"""Device of the nodes that are assumed where no flag names a cluster: that of the defaults of `HardwareEfficiency`."""

DEVICES_OF_A_NODE = 8


def cost_model_of(config: Config, world_size: int) -> "CostModel":
    """Return the cost model that prices the ops of a run.

    Raises:
        ConfigError: if a file that flags name cannot be read, or the cluster is too small.
    """
    cluster = named_cluster(config.parallel.cluster, world_size)
    return costs_of_run(config, cluster).pricing_on(cluster).cost_model


def costs_of_run(config: Config, cluster: "Cluster") -> "Costs":
    """Return the sources of prices that the flags of a run name.

    Raises:
        ConfigError: if a file that `--op-profile` or `--op-calibration` names cannot be read.
    """
    from megatron_terapipe.search.inputs.gpt_workload import gpt_workload
    from megatron_terapipe.search.trials.costs import read_costs

    parallel = config.parallel
    try:
        return read_costs(
            gpt_workload(config.model),
            cluster,
            config.precision.dtype,
            profile_path=parallel.op_profile,
            calibration_path=parallel.op_calibration,
        )
    except UserError as error:
        flags = [flag(name) for name in ("op_profile", "op_calibration") if getattr(parallel, name) is not None]
        raise ConfigError(f"{', '.join(flags)}: {error}") from None


def machine_in_words(config: Config) -> str:
    """Return what the ops of a run are priced for, in words for messages."""
    sources = sources_in_words(config)
    if config.parallel.cluster is None:
        return f"nodes of {DEVICES_OF_A_NODE} {DEVICE}, since no --cluster is given{sources}"
    return f"the cluster {config.parallel.cluster}{sources}"


def sources_in_words(config: Config) -> str:
    """Return what was measured of the machine, in words that follow its name."""
    parallel = config.parallel
    profile = "" if parallel.op_profile is None else f" with the profile {parallel.op_profile}"
    return profile + ("" if parallel.op_calibration is None else f", calibrated on {parallel.op_calibration}")


def named_cluster(path: str | None, world_size: int) -> "Cluster":
    """Return the cluster that `--cluster` names, or the default one with room for all ranks.

    Args:
        path: value of the flag; None = it is not given.

    Raises:
        ConfigError: if the file cannot be read, or the cluster is too small.
    """
    from megatron_terapipe.search.inputs.cluster_files import parse_cluster, read_cluster
    from megatron_terapipe.search.inputs.hostfile import is_hostfile

    if path is None:
        nodes = {"device": DEVICE, "devices": DEVICES_OF_A_NODE, "count": -(-world_size // DEVICES_OF_A_NODE)}
        return parse_cluster({"nodes": [nodes]}, "default")[0]
    names_devices = not is_hostfile(read_text(path, "--cluster"), path)
    try:
        cluster = read_cluster(path, device=None if names_devices else DEVICE)
    except ConfigError as error:
        raise ConfigError(f"--cluster: {error}") from None
    if cluster.num_devices < world_size:
        raise ConfigError(
            f"--cluster {path} has {cluster.num_devices} devices, fewer than the {world_size} ranks of this run: name "
            "a cluster with as many"
        )
    return cluster
