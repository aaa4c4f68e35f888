"""The question of a search: as the flags of a command ask it, and with changes."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_terapipe.devices import EIGHT_BITS
from megatron_terapipe.dimensions import ordered_for
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.answer.flags import CHANGES, FROM_FLAGS, TERAPIPE
from megatron_terapipe.search.learn.costs import Costs, read_costs
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.cluster_files import read_cluster_with_notes
from megatron_terapipe.search.machine.library import needs_fp16
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.trainer_files import find_software
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.profile import read_profile
from megatron_terapipe.search.price.workload import Workload, gpt_workload
from megatron_terapipe.search.price.workload_files import parse_workload, read_workload
from megatron_terapipe.search.rank.rules import ProgressCallback, no_progress
from megatron_terapipe.search.rank.search import SearchResult, search
from megatron_terapipe.search.rank.space import MEMORY_HEADROOM, Choices, SearchProblem, all_choices, check_runnable
from megatron_terapipe.strategy import DIMENSIONS

EFFORT = 0.1  # effort of a second search


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question of a search."""

    problem: SearchProblem
    constraints: Mapping[str, tuple[Any, ...]]
    """Values that flags allow for dimensions, by name."""
    costs: Costs

    def changed(self, constraints: Mapping[str, tuple[Any, ...]] | None = None, **changes: Any) -> "Question":
        """Return the question with other constraints, or other fields of its problem."""
        problem = replace(self.problem, **changes)
        # A profile was measured with one trainer.
        profile = self.costs.profile if problem.software == self.problem.software else None
        return Question(
            problem=problem,
            constraints=self.constraints if constraints is None else constraints,
            costs=replace(self.costs, workload=problem.workload, software=problem.software, profile=profile),
        )

    @cached_property
    def choices(self) -> Choices:
        """The values of each dimension that are searched."""
        return all_choices(self.problem).constrained(self.constraints)

    @cached_property
    def pricing(self) -> Pricing:
        """Prices on the cluster in the order of its hostfile."""
        return self.costs.pricing_on(self.problem.cluster)

    def search(self, *, effort: float = EFFORT, progress: ProgressCallback = no_progress) -> SearchResult:
        """Return the best strategy, without solvers."""
        return search(
            self.problem, self.choices, self.costs.pricing_on, top=1, effort=effort, refine=False, progress=progress
        )


def question_of(options: argparse.Namespace, num_sequences: int | None = None) -> tuple[Question, tuple[str, ...]]:
    """Return the question that flags ask, its files read, and notes on assumptions about the machine.

    Args:
        num_sequences: in an optimizer step; None = the number of the flag, else 1.
    """
    workload = model_of(options)
    cluster, notes = cluster_of(options)
    problem = SearchProblem(
        workload=workload,
        cluster=cluster,
        global_batch_size=num_sequences or options.global_batch_size or 1,
        precision=precision_of(options, cluster),
        software=find_software(getattr(options, "software", TERAPIPE)),
        memory_headroom=getattr(options, "memory_headroom", MEMORY_HEADROOM),
    )
    check_precision(problem.precision, problem.software, cluster)
    constraints = constraints_of(options)
    check_runnable(constraints, problem.software)
    costs = read_costs(
        problem.workload,
        problem.cluster,
        problem.precision,
        profile=read_profile(options.profile) if options.profile else None,
        calibration_path=options.calibrate or options.calibration,
        software=problem.software,
    )
    question = Question(problem=costs.problem_with(problem, constraints), constraints=constraints, costs=costs)
    return question, notes


def constraints_of(options: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    """Return the values that flags, if there are any, allow for dimensions; `token_slices`: the lengths of one cut."""
    given = {each: getattr(options, each.name, None) for each, _ in ordered_for(DIMENSIONS, "flag_help")}
    return {each.name: each.parse(text) for each, text in given.items() if text is not None}


def model_of(options: argparse.Namespace) -> Workload:
    """Return the model that the flags name."""
    changes: dict[str, Any] = {name: value for name in CHANGES if (value := getattr(options, name, None)) is not None}
    if options.model == FROM_FLAGS:
        workload = parse_workload({}, "MODEL -", changes)
    else:
        workload = read_workload(options.model, changes)
    factor = options.expert_imbalance
    if factor is None:
        return workload
    number = 0 if workload.experts is None else workload.experts.number
    if not 1 <= factor <= number:
        raise ConfigError(
            f"--expert-imbalance {factor:g} is not from 1, where all ranks have as many tokens, to the number of "
            f"experts, and {options.model} has {number or 'no'} experts: correct it, or drop it"
        )
    assert workload.config is not None, "only a GPT has experts"
    return gpt_workload(workload.config, workload.name, imbalance=factor)


def cluster_of(options: argparse.Namespace) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster that the flags name, and notes on assumptions about it."""
    cluster, notes = read_cluster_with_notes(options.cluster, device=options.device)
    most = options.devices_at_most
    if most is None or most >= cluster.num_devices:
        return cluster, notes
    part = cluster.at_most(most)
    names = [node.name for node in part.nodes]
    listed = ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])
    used = f"{part.num_devices} of the {cluster.num_devices} devices of {options.cluster} are used: {listed}"
    return part, (*notes, used)


def check_precision(precision: str, software: Software, cluster: Cluster) -> None:
    """Raise a `ConfigError` where the trainer or a device does not compute in a precision."""
    known = dict.fromkeys(each.precision for each in software.states)
    if precision not in known:
        others = "; --software megatron-core prices a trainer that does" if precision in EIGHT_BITS else ""
        raise ConfigError(
            f"--precision {precision} does not run in {software.name}, whose products are in {', '.join(known)}: "
            f"give one of these{others}"
        )
    for node in cluster.nodes:
        if not node.device.has_products(precision):
            raise ConfigError(f"--precision {precision} is not in the products of a {node.device.name}: give bf16")


def precision_of(options: argparse.Namespace, cluster: Cluster) -> str:
    """Return the precision of the flag, or the best one that all devices have."""
    if options.precision is not None:
        return str(options.precision)
    devices = {node.device for node in cluster.nodes}
    if any(not device.is_gpu for device in devices):
        return "fp32"
    return "fp16" if any(needs_fp16(device.name) for device in devices) else "bf16"
