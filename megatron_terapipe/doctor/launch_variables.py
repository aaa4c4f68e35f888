"""The variables that a rank will see: those of its host, and those that DeepSpeed's launcher hands on."""

from collections.abc import Mapping, Sequence

from megatron_terapipe.doctor.facts import Launching

SHELL_STAYS = ("slurm",)
"""Launchers by which ranks see all variables of the launching shell: srun --export=ALL."""

BY_HAND = ("ssh",)
"""Launchers that are started on each host, in a shell that is not known here."""

HANDED_ON = ("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW")
"""Beginnings of the names of those that the launcher hands on (EXPORT_ENVS of deepspeed/launcher/runner.py, 0.19.8)."""


def variables_of_rank(launching: Launching, of_host: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank, as far as torch, CUDA and the network read them.

    Args:
        of_host: what a command over ssh finds on the host.
    """
    if launching.hostfile is None or launching.launcher in BY_HAND:
        return dict(of_host)
    if launching.launcher in SHELL_STAYS:
        return {**of_host, **launching.variables, **written(launching.environment_file or ())}
    handed = {name: value for name, value in launching.variables.items() if name.startswith(HANDED_ON)}
    return {**of_host, **handed, **written(launching.environment_file or ())}


def written(lines: Sequence[str]) -> dict[str, str]:
    """Return the variables of .deepspeed_env, as the launcher reads its lines."""
    parts = (line.rstrip("\n").partition("=") for line in lines)
    return {name.strip(): value for name, sign, value in parts if sign}
