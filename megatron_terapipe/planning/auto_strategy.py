"""The strategy of a run that asks for `--strategy auto`: the one that the search's command `rank` puts first.

It follows from the flags, the files that they name and the numbers of ranks alone, so every rank finds the same, before
any of them has met another.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_terapipe.config.config import Config
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning.cost_model import DEVICE, costs_of_run, named_cluster, sources_in_words
from megatron_terapipe.strategy import Strategy

if TYPE_CHECKING:  # It loads numpy, and not every run asks for a search.
    from megatron_terapipe.search.inputs.cluster import Cluster

TOP = 10
"""Best strategies for which token slices, stages and nodes are solved: as many as `rank` lists."""

BATCH = "global_batch_size"


class Ranks(NamedTuple):
    """Numbers of ranks of a run."""

    all: int
    on_a_host: int


class BestStrategy(NamedTuple):
    """What a search for a run has found."""

    strategy: Strategy
    iteration_time_s: float
    considered: int
    machine: str
    """For which machine, in words."""

    @property
    def line(self) -> str:
        """What was chosen, for the log."""
        settings = " ".join(
            f"{name.replace('_', '-')} {value}" for name, value in self.strategy.to_json().items() if value is not None
        )
        return (
            f"--strategy auto chose, of {self.considered:,} strategies for {self.machine}, one that is predicted to "
            f"take {self.iteration_time_s:.4g} s an iteration: {settings}"
        )


def best_strategy(config: Config, ranks: Ranks, constraints: Mapping[str, tuple[Any, ...]]) -> BestStrategy:
    """Return the best strategy of a run.

    Args:
        config: the configuration, its vocabulary size known; what it says of layout and batch is not read.
        constraints: values that dimensions may have, by name, the global batch size among them.

    Raises:
        ConfigError: if a file cannot be read, the cluster is not that of the ranks, or no strategy can run.
    """
    from megatron_terapipe.search.inputs.gpt_workload import gpt_workload
    from megatron_terapipe.search.rank.search import search
    from megatron_terapipe.search.space.choices import all_choices
    from megatron_terapipe.search.space.problem import SearchProblem

    cluster, machine = cluster_of_run(config, ranks)
    batch = constraints[BATCH][0]
    problem = SearchProblem(
        workload=gpt_workload(config.model),
        cluster=cluster,
        global_batch_size=batch,
        precision=config.precision.dtype,
    )
    others = {name: values for name, values in constraints.items() if name != BATCH}
    costs = costs_of_run(config, cluster)
    result = search(problem, all_choices(problem).constrained(others), costs.pricing_on, top=TOP)
    # Ranks stand where the launcher has put them.
    here = [entry for entry in result.entries if entry.strategy.placement is None and entry.prediction is not None]
    if not here:
        raise ConfigError(
            f"--strategy auto found no strategy for {machine} that keeps the other flags and fits its memory: `python "
            "-m megatron_terapipe.search rank --explain` with the same model, cluster and batch says why"
        )
    best = here[0]
    assert best.prediction is not None
    return BestStrategy(
        strategy=replace(best.strategy, global_batch_size=batch),
        iteration_time_s=best.prediction.iteration_time_s,
        considered=result.counts.total,
        machine=machine,
    )


def cluster_of_run(config: Config, ranks: Ranks) -> "tuple[Cluster, str]":
    """Return the cluster of a run, and what it is in words: that of `--cluster`, or hosts as the launcher fills them.

    The devices of these are those of the profile, or `DEVICE`.

    Raises:
        ConfigError: if a file cannot be read, or the cluster is not that of the ranks.
    """
    parallel, profile = config.parallel, sources_in_words(config)
    if parallel.cluster is not None:
        cluster = named_cluster(parallel.cluster, ranks.all)
        if cluster.num_devices != ranks.all:
            raise ConfigError(
                f"--cluster {parallel.cluster} has {cluster.num_devices} devices, more than the {ranks.all} ranks of "
                "this run, and --strategy auto uses all of them: name a cluster with as many"
            )
        return cluster, f"the cluster {parallel.cluster}{profile}"
    if ranks.all % ranks.on_a_host:
        raise ConfigError(
            f"--strategy auto: {ranks.all} ranks are not {ranks.on_a_host} on each host: describe the hosts in a file "
            "for --cluster"
        )
    from megatron_terapipe.search.inputs.cluster_files import parse_cluster

    device, count = _device(parallel.op_profile), ranks.all // ranks.on_a_host
    nodes = {"device": device, "devices": ranks.on_a_host, "count": count}
    words = f"{count} {'host' if count == 1 else 'hosts'} of {ranks.on_a_host} {device}"
    assumed = " (assumed: give --cluster or --op-profile)" if parallel.op_profile is None else ""
    return parse_cluster({"nodes": [nodes]}, "--op-profile" if profile else "default")[0], f"{words}{assumed}{profile}"


def _device(op_profile: str | None) -> str:
    """Return the name of the device that was measured, as the library has it; else of the default one."""
    from megatron_terapipe.search.op_times.profile_files import read_profile

    if op_profile is None:
        return DEVICE
    profile = read_profile(op_profile)
    return "cpu-core" if profile.accelerator == "cpu" else profile.device
