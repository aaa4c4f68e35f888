"""The plan that a run found before it started: printed, saved, and the same on every rank."""

from hashlib import sha256
from pathlib import Path

import torch.distributed as dist

from deepspeed_ext.plan.found_schedule import FoundSchedule
from deepspeed_ext.plan.schedule_file import write_schedule
from deepspeed_ext.plan.schedules import rank_orders
from megatron_terapipe.config.parallel.parallel import AUTO
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning.cost_model import machine_in_words
from megatron_terapipe.training.start.run import Run

SCHEDULE_FILE = "schedule.csv"
"""File in the directory of the checkpoints, which `--pipeline-schedule` takes again."""


def check_agreement(run: Run) -> None:
    """See that all ranks found the same; every rank must call it at the same time.

    They compute the same from the same flags. But if one had other flags, or another release of a package, they would
    wait for each other for ever.

    Raises:
        ConfigError: on every rank, if two differ.
    """
    parallel = run.config.parallel
    if not (run.found_token_slices or isinstance(run.schedule, FoundSchedule) or parallel.strategy == AUTO):
        return
    order = write_schedule(rank_orders(run.schedule, run.pipeline))
    text = f"{run.layout}\n{run.config.batch}\n{parallel.token_slices}\n{parallel.stage_partition}\n{order}"
    mine = sha256(text.encode()).hexdigest()
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if len(set(found)) > 1:
        other = next(rank for rank, theirs in enumerate(found) if theirs != found[0])
        raise ConfigError(
            f"rank {other} found another strategy, other token slices or another schedule than rank 0: install the "
            "same releases of numpy, numba and scipy everywhere, and the same files for --cluster, --op-profile and "
            "--load, or give --strategy a file, --token-slices a list and --pipeline-schedule a file"
        )


def notes(run: Run) -> list[str]:
    """Return lines for the log: the token slices and the schedule that were found, for which machine."""
    lines, machine = [], machine_in_words(run.config)
    if run.found_token_slices:
        lines.append(f" found token slices {run.config.parallel.token_slices} for {machine}")
        if run.found_stages:
            lines.append(f" found stages with the layers {run.config.parallel.stage_partition}")
    if isinstance(run.schedule, FoundSchedule):
        found = run.schedule.found(run.pipeline)
        # A bubble is 1 - work / (ranks x makespan), and no makespan is below the bound.
        least = 1 - (1 - found.bubble_ratio) * found.makespan / found.lower_bound
        lines.append(
            f" found a schedule for {machine}: a predicted bubble of {found.bubble_ratio:.1%}, where no order has less "
            f"than {max(least, 0.0):.1%}, and at most {max(found.peak_activation):.3g} activations of a micro-batch"
        )
    return lines


def keep_schedule(run: Run) -> None:
    """Write a schedule that was found beside the checkpoints, on the first rank, so that it can be run again."""
    if run.config.checkpoint.save is not None and isinstance(run.schedule, FoundSchedule) and run.launch.rank == 0:
        directory = Path(run.config.checkpoint.save)
        directory.mkdir(parents=True, exist_ok=True)
        token_slices = f"# for --token-slices {run.config.token_slices()}\n"
        (directory / SCHEDULE_FILE).write_text(token_slices + write_schedule(rank_orders(run.schedule, run.pipeline)))
