"""The order of a run's ops, as flags name it or as it is found, and the token slices that are found with it.

All of this follows from the configuration, the number of ranks and the files that flags name, so every rank finds the
same. What ops cost is the business of the search's cost model (`planning.cost_model`), and token slices are found by
the function that its commands call.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from deepspeed_ext.plan.closed_forms import memory_of_1f1b
from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.found_schedule import EFFORT, FoundSchedule
from deepspeed_ext.plan.ops import Placement
from deepspeed_ext.plan.partition import StagePartition
from deepspeed_ext.plan.programs.device import Device
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.lowering import check_lowering
from deepspeed_ext.plan.programs.simulated_schedule import SimulatedSchedule
from deepspeed_ext.plan.schedule_file import schedule_from_file
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES, Schedule
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config.config import Config
from megatron_terapipe.config.parallel.parallel import AUTO
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning.cost_model import cost_model_of
from megatron_terapipe.strategy import Strategy

if TYPE_CHECKING:  # The solvers compile their kernels, and not every run needs one.
    from megatron_terapipe.search.cost.cost_model import CostModel
    from megatron_terapipe.search.rank.token_slice_tables import TabulatedCosts


def pipeline_schedule(config: Config, data_parallel_size: int) -> Schedule:
    """Return the schedule that `--pipeline-schedule` names; one to be found is found when its first op is asked for.

    Args:
        data_parallel_size: ranks that share the batch.

    Raises:
        UserError: if a file that flags name cannot be read, or holds no schedule.
    """
    name = config.parallel.pipeline_schedule
    if name == OPTIMISED:
        return _found_schedule(config, data_parallel_size)
    return SCHEDULES[name] if name in SCHEDULES else schedule_from_file(name)


def simulated_schedule(schedule: Schedule, config: Config, data_parallel_size: int) -> SimulatedSchedule:
    """Return a schedule with its simulated timelines: in seconds where its ops are priced.

    Args:
        data_parallel_size: ranks that share the batch.
    """
    if isinstance(schedule, FoundSchedule):
        return SimulatedSchedule(schedule, costs=schedule.costs)
    if config.training.offload_token_slices:
        # How long a copy takes beside the ops is what decides whether it is made.
        costs = _priced_ops(config, data_parallel_size)
        return SimulatedSchedule(schedule, costs=lambda _: costs)
    return SimulatedSchedule.of(schedule)


def host_copies(config: Config, data_parallel_size: int) -> HostCopySettings | None:
    """Return what waits on the host, by the timelines of `simulated_schedule`; None where nothing does.

    Args:
        data_parallel_size: ranks that share the batch.

    Raises:
        ConfigError: if the stages are not known.
    """
    if not config.training.offload_token_slices:
        return None
    if config.parallel.stage_partition == "parameters":
        raise ConfigError(
            "--offload-token-slices plans copies by the layers of each stage, and --stage-partition parameters deals "
            "them when the model is built: give a list, or uniform"
        )
    strategy = Strategy.of_config(config, data_parallel_size)
    model = cost_model_of(config, strategy.world_size)
    settings = model.host_copy_settings(model.placed(strategy))
    # How many token slices a window reaches depends on their lengths, which differ where documents cut them.
    return replace(settings, windows=()) if config.document_cuts() else settings


def check_schedule(
    schedule: Schedule,
    config: Config,
    micro_batches: Iterable[int],
    hardware_queues: int | None = None,
    copies: HostCopySettings | None = None,
) -> None:
    """See that a schedule ends for every number of micro-batches that a run has.

    Args:
        hardware_queues: hardware queues of the accelerator; None for as many as there are streams.
        copies: what waits on the host; None for nothing.

    Raises:
        ConfigError: if it is for another pipeline, or would leave ranks waiting for each other.
    """
    simulated, device = SimulatedSchedule.of(schedule), Device(hardware_queues=hardware_queues)
    for number in micro_batches:
        try:
            check_lowering(simulated, config.parallel.pipeline(number), device, copies)
        except PlanError as error:
            raise ConfigError(f"--pipeline-schedule {config.parallel.pipeline_schedule}: {error}") from None


def _found_schedule(config: Config, data_parallel_size: int) -> FoundSchedule:
    """Return the schedule that is found for a configuration, its token slices known."""
    costs = _priced_ops(config, data_parallel_size)
    return FoundSchedule(lambda _: costs, config.token_slices(), config.parallel.schedule_memory_limit)


def _priced_ops(config: Config, data_parallel_size: int) -> OpCosts:
    """Return the seconds of a run's ops, whatever the number of micro-batches."""
    strategy = Strategy.of_config(config, data_parallel_size)
    return cost_model_of(config, strategy.world_size).pipeline_costs(strategy)


def with_found_token_slices(config: Config, data_parallel_size: int) -> Config:
    """Return the configuration with the token slices that `--token-slices auto` asks for; any other as it is.

    They are those that the search's command `slices` finds for this strategy on this cluster. With
    `--stage-partition auto` the layers of the stages are found first.

    Args:
        data_parallel_size: ranks that share the batch.

    Raises:
        ConfigError: if the sequence is too short for the number asked for, or a file cannot be read.
    """
    parallel = config.parallel
    if parallel.token_slices != AUTO:
        return config
    from megatron_terapipe.search.rank.token_slices import solve_cut

    count = parallel.num_token_slices
    if (count or 1) * config.token_granularity > config.model.seq_length:
        raise ConfigError(
            f"--token-slices auto: {count or 1} token slices of {config.model.seq_length} tokens, each a multiple of "
            f"{config.token_granularity}: give fewer"
        )
    strategy = Strategy.of_config(config, data_parallel_size)
    cost_model = cost_model_of(config, strategy.world_size)

    def solved_lengths(strategy: Strategy, counts: Sequence[int] | None) -> tuple[int, ...]:
        return solve_cut(
            cost_model,
            strategy,
            counts=counts,
            memory_limit=parallel.schedule_memory_limit,
            model_chunk_placement=Placement(parallel.model_chunk_placement),
        ).token_slices

    counts, stages = None if count is None else (count,), parallel.stage_partition
    if stages == AUTO:
        # How many token slices are best hardly depends on where a few layers are.
        counts = counts or (len(solved_lengths(strategy, None)),)
        partition = _solved_stages(config, cost_model, strategy, counts[0])
        stages, strategy = str(partition), replace(strategy, stage_partition=partition.bounds)
    cut = TokenSlices(solved_lengths(strategy, counts))
    found = replace(parallel, token_slices=str(cut), num_token_slices=len(cut), stage_partition=stages)
    return replace(config, parallel=found)


def _solved_stages(config: Config, cost_model: "CostModel", strategy: Strategy, count: int) -> StagePartition:
    """Return the layers of each stage with which a step of so many token slices is short."""
    from deepspeed_ext.plan.solve import solve_stages
    from megatron_terapipe.search.rank.token_slice_tables import TabulatedCosts
    from megatron_terapipe.search.rank.token_slices import places_to_cut, whole_messages

    parallel, seq_length = config.parallel, config.model.seq_length
    shape = replace(parallel.pipeline(strategy.num_micro_batches), num_token_slices=count)
    grid = places_to_cut(seq_length, strategy, count)
    optimised = parallel.pipeline_schedule == OPTIMISED
    even = TokenSlices.uniform(seq_length, count)

    def costs_of_layers(layers: Sequence[int]) -> "TabulatedCosts":
        bounds = tuple(accumulate(map(int, layers), initial=0))
        return TabulatedCosts.of(cost_model, replace(strategy, stage_partition=bounds), grid)

    solved = solve_stages(
        shape,
        config.model.num_layers,
        seq_length,
        costs_of_layers,
        schedule=None if optimised else SCHEDULES[parallel.pipeline_schedule],
        memory_limit=parallel.schedule_memory_limit or memory_of_1f1b(shape, even) if optimised else None,
        granularity=grid.granularity,
        min_length=grid.min_length,
        transfer=whole_messages(cost_model, strategy),
        effort=EFFORT,
    )
    return solved.partition
