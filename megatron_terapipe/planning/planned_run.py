"""A configuration on so many ranks: all rules that hold without files, devices or other ranks."""

from dataclasses import dataclass
from typing import Any

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.programs.planned_ops import check_num_ops
from deepspeed_ext.plan.schedules import OPTIMISED
from megatron_terapipe.config.config import Config
from megatron_terapipe.config.model.model import ModelConfig
from megatron_terapipe.config.parallel.parallel import AUTO
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning.pipeline_plan import check_schedule, pipeline_schedule, with_found_token_slices
from megatron_terapipe.strategy import Strategy


@dataclass(frozen=True)
class PlannedRun:
    """A configuration for a known number of ranks, with its layout and its plan."""

    config: Config
    """The configuration, with token slices and stages found."""
    layout: ParallelLayout
    """The parallel axes over the ranks."""
    found_token_slices: bool = False
    """Whether the token slices were found by a search, and not given."""
    found_stages: bool = False
    """Whether the layers of the stages were found by a search, too."""

    @property
    def numbers_of_micro_batches(self) -> set[int]:
        """Micro-batches of an iteration: the number at the start of the run, and the one at its end."""
        sizes = self.config.batch.sizes(self.layout.data_parallel_size)
        sequences = self.config.batch.micro_batch_size * self.layout.data_parallel_size
        return {sizes.start // sequences, sizes.final // sequences}


def plan_run(config: Config, world_size: int) -> PlannedRun:
    """Lay a configuration over ranks, and find the token slices that it leaves open.

    Args:
        config: the configuration; where token slices are to be found, its vocabulary size is known.

    Raises:
        ConfigError: if sizes do not multiply to the world size, or the batch cannot be dealt to the replicas.
    """
    layout = config.parallel.layout(world_size)
    # An error in it is said before anything is searched.
    micro_batches = config.num_micro_batches(layout.data_parallel_size)
    _check_num_ops(config, micro_batches)
    if config.parallel.token_slices != AUTO:
        return PlannedRun(config, layout)
    finds_stages = config.parallel.stage_partition == AUTO
    config = with_found_token_slices(config, layout.data_parallel_size)
    return PlannedRun(config, config.parallel.layout(world_size), found_token_slices=True, found_stages=finds_stages)


def _check_num_ops(config: Config, micro_batches: int) -> None:
    try:
        check_num_ops(config.parallel.pipeline(micro_batches))
    except PlanError as error:
        raise ConfigError(str(error)) from None


def check_trainable(strategy: Strategy, model: ModelConfig, **more: Any) -> None:
    """Check all that the trainer checks of a strategy without files, devices or other ranks.

    The order of the ops is checked, too. An `optimised` schedule is not searched: if all else is right, there is one.

    Args:
        **more: sections that are not to be the defaults, by their names in `Config`.

    Raises:
        UserError: if it could not be trained; one line with what is wrong and the remedy.
    """
    planned = plan_run(strategy.config(model, **more), strategy.world_size)
    if strategy.schedule != OPTIMISED:
        schedule = pipeline_schedule(planned.config, strategy.data_parallel_size)
        check_schedule(schedule, planned.config, planned.numbers_of_micro_batches)
