"""Whether the variables of ranks are good, and the same on all hosts."""

import re
from collections.abc import Iterator

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.cuda_environment import HARDWARE_QUEUES, check_cuda_environment
from megatron_terapipe.doctor.addresses import GLOO, NCCL, is_chosen
from megatron_terapipe.doctor.checks.devices import num_ranks, uses_devices
from megatron_terapipe.doctor.facts import Examined
from megatron_terapipe.doctor.findings import Finding, Level, counted, error, ok, same, warning
from megatron_terapipe.doctor.launch_variables import BY_HAND, variables_of_rank

MAY_DIFFER = (
    *("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "CUDA_HOME", "CUDA_PATH"),
    *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
)
"""Beginnings of variables that the launcher sets itself, or that hosts with other cards have otherwise."""

LOCKING = ("NCCL_", HARDWARE_QUEUES)
"""Beginnings of those that lock or end a run where two ranks have different ones."""


def cuda(examined: Examined) -> Iterator[Finding]:
    """Yield whether the variables of CUDA let a pipeline run."""
    ranks = sum(num_ranks(host, facts) for host, facts in examined.reached)
    for host, facts in examined.reached:
        if not uses_devices(examined, host, facts):
            continue
        variables = variables_of_rank(examined.launching, facts.variables)
        try:
            lines = check_cuda_environment(variables, num_pipeline_ranks=ranks)
        except UserError as fault:
            found, _, remedy = str(fault).rpartition(": ")
            yield error("variables", host.name, found, "", remedy)
            continue
        for line in lines:
            found, _, remedy = line.rpartition(": ")
            yield warning("variables", host.name, found, "", remedy)
        if not lines:
            yield ok("variables", host.name, "CUDA's variables are good, or set by the trainer")


def threads(examined: Examined) -> Iterator[Finding]:
    """Yield whether the threads of all ranks of a host fit its cores."""
    for host, facts in examined.reached:
        told = variables_of_rank(examined.launching, facts.variables).get("OMP_NUM_THREADS")
        ranks, cores = num_ranks(host, facts), facts.resources.cores
        listed = f"OMP_NUM_THREADS={told} for {counted(ranks, 'rank')} on {counted(cores, 'core')}"
        if told is None:
            yield ok("threads", host.name, "OMP_NUM_THREADS is not set: the trainer gives each rank its share of cores")
        elif not re.fullmatch(r"\d+(,\d+)*", told) or int(told.split(",")[0]) == 0:
            yield error("threads", host.name, f"OMP_NUM_THREADS={told}", "must be a whole number from 1", "unset it")
        elif int(told.split(",")[0]) * ranks > max(cores, ranks):
            yield warning(
                "threads",
                host.name,
                listed,
                "threads that share a core wait for each other",
                f"set {max(1, cores // ranks)}, or unset it",
            )
        else:
            yield ok(
                "threads", host.name, f"OMP_NUM_THREADS={told} for {counted(ranks, 'rank')} on {counted(cores, 'core')}"
            )


def differences(examined: Examined) -> Iterator[Finding]:
    """Yield whether ranks see the same variables on all hosts."""
    of_host = {host.name: variables_of_rank(examined.launching, facts.variables) for host, facts in examined.reached}
    found = {name for variables in of_host.values() for name in variables}
    names = sorted(name for name in found if not name.startswith(MAY_DIFFER))
    for name in names:
        values = {host: _said(name, variables.get(name)) for host, variables in of_host.items()}
        remedy = f"write {name} into .deepspeed_env, which the launcher hands to all hosts, or unset it everywhere"
        level = Level.ERROR if name.startswith(LOCKING) else Level.WARNING
        yield from same("variables", "variable", values, remedy, level)


def interfaces(examined: Examined) -> Iterator[Finding]:
    """Yield whether the interfaces that NCCL and gloo are told to use exist."""
    for host, facts in examined.reached:
        variables = variables_of_rank(examined.launching, facts.variables)
        up = [each.name for each in facts.interfaces if each.is_up]
        for name in (NCCL, GLOO):
            if name not in variables:
                continue
            value = variables[name]
            wanted = [word.strip() for word in value.split(",")]
            missing = (
                [word for word in wanted if word not in up]
                if name == GLOO
                else [value] * (not any(is_chosen(value, each) for each in up))
            )
            if missing:
                yield error(
                    "interfaces",
                    host.name,
                    f"{name}={value}",
                    f"no such interface is up; there are {', '.join(up)}",
                    f"set one of them, or unset {name}",
                )
            else:
                yield ok("interfaces", host.name, f"{name}={value}")


def not_handed_on(examined: Examined) -> Iterator[Finding]:
    """Yield whether variables of this shell reach the ranks, which start on other hosts with others."""
    launching = examined.launching
    if len(examined.hosts) < 2 or launching.launcher in BY_HAND:
        return
    lost = []
    for name, value in launching.variables.items():
        reaching = [variables_of_rank(launching, facts.variables).get(name) for _, facts in examined.reached]
        if not name.startswith(MAY_DIFFER) and any(each != value for each in reaching):
            lost.append(f"{name}={value}")
    if lost:
        yield warning(
            "variables",
            None,
            f"{', '.join(lost)} of this shell",
            "DeepSpeed's launcher does not hand these on",
            "write them into .deepspeed_env, if ranks need them",
        )
    else:
        yield ok("variables", None, "every variable of this shell that matters reaches the ranks")


def environment_file(examined: Examined) -> Iterator[Finding]:
    """Yield whether the launcher can read the lines of .deepspeed_env."""
    lines = examined.launching.environment_file
    if lines is None or len(examined.hosts) < 2:
        return
    wrong = [number for number, line in enumerate(lines, start=1) if not re.match(r"[A-Za-z_]\w*=", line)]
    if wrong:
        yield error(
            "deepspeed_env",
            None,
            f"line {wrong[0]} of .deepspeed_env is not NAME=VALUE",
            "the launcher ends at an empty line, a comment or any other",
            "remove it",
        )
    else:
        yield ok("deepspeed_env", None, f"{len(lines)} lines of .deepspeed_env")


def _said(name: str, value: str | None) -> str:
    return f"{name} unset" if value is None else f"{name}={value}"
