"""The order of a run's ops, as flags name it or as it is found, and the token slices that are found with it.

All of this follows from the configuration and the number of micro-batches, so every rank finds the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.partition import StagePartition
from deepspeed_ext.plan.programs.device import Device
from deepspeed_ext.plan.programs.lowering import check_lowering
from deepspeed_ext.plan.programs.simulated_schedule import SimulatedSchedule
from deepspeed_ext.plan.schedule_file import schedule_from_file
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES, Schedule
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config.balance import granularity_of
from megatron_terapipe.config.config import Config
from megatron_terapipe.config.parallel import AUTO, ParallelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning.op_costs import op_costs, stage_terms

if TYPE_CHECKING:  # The solvers compile their kernels, and not every run needs one.
    from deepspeed_ext.plan.optimise import OptimisedSchedule

EFFORT = 0.2
"""Of the solvers, before a run starts: some seconds of one core, on every rank at once."""

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of token slices that are tried where no flag says one."""


def pipeline_schedule(config: Config) -> Schedule:
    """The schedule that `--pipeline-schedule` names; one to be found is found when its first op is asked for.

    Raises:
        UserError: if it is a file that cannot be read, or holds no schedule.
    """
    name = config.parallel.pipeline_schedule
    if name == OPTIMISED:
        return FoundSchedule(config)
    return SCHEDULES[name] if name in SCHEDULES else schedule_from_file(name)


def check_schedule(
    schedule: Schedule, config: Config, micro_batches: Iterable[int], hardware_queues: int | None = None
) -> None:
    """See that a schedule ends for every number of micro-batches that a run has.

    Args:
        schedule: order of the ops.
        config: the configuration.
        micro_batches: numbers of micro-batches of a step.
        hardware_queues: hardware queues of the accelerator; None for as many as there are streams.

    Raises:
        ConfigError: if it is for another pipeline, or would leave ranks waiting for each other.
    """
    simulated, device = SimulatedSchedule.of(schedule), Device(hardware_queues=hardware_queues)
    for number in micro_batches:
        try:
            check_lowering(simulated, config.parallel.pipeline(number), device)
        except PlanError as error:
            raise ConfigError(f"--pipeline-schedule {config.parallel.pipeline_schedule}: {error}") from None


class FoundSchedule:
    """A schedule that is found for each number of micro-batches when it is first asked for.

    Args:
        config: the configuration, its token slices known.
    """

    def __init__(self, config: Config) -> None:
        self._costs = op_costs(config)
        self._token_slices = config.token_slices()
        self._memory_limit = config.parallel.schedule_memory_limit
        self._found: dict[PipelineShape, OptimisedSchedule] = {}

    def __call__(self, shape: PipelineShape, rank: int) -> Iterator[Op]:
        """The ops of a rank in order, as `plan.schedules.Schedule` says."""
        return iter(self.found(shape).orders[rank])

    def costs(self, shape: PipelineShape) -> OpCosts:
        """The costs that it is found for, whatever the number of micro-batches."""
        return self._costs

    def found(self, shape: PipelineShape) -> "OptimisedSchedule":
        """The whole of it, with its makespan."""
        from deepspeed_ext.plan.optimise import optimise

        if shape not in self._found:
            limit = self._memory_limit or memory_of_1f1b(shape, self._token_slices)
            lengths = self._token_slices.lengths
            self._found[shape] = optimise(shape, self._costs, memory_limit=limit, lengths=lengths, effort=EFFORT)
        return self._found[shape]


def memory_of_1f1b(shape: PipelineShape, token_slices: TokenSlices) -> float:
    """Activations that 1f1b keeps on the first rank, counted in those of one whole micro-batch on it.

    1f1b keeps P - 1 + S token slices in a row, from the first of a micro-batch on, or all that there are.

    Args:
        shape: sizes of the pipeline.
        token_slices: lengths of the token slices.
    """
    whole, rest = divmod(shape.num_ranks - 1 + len(token_slices), len(token_slices))
    return min(shape.num_micro_batches, whole + token_slices.prefix_len(rest) / token_slices.seq_length)


def with_found_token_slices(config: Config, num_micro_batches: int) -> Config:
    """Return the configuration with the token slices that `--token-slices auto` asks for; any other as it is.

    With `--stage-partition auto` the layers of the stages are found at the same time. Without `--num-token-slices`
    numbers are tried upwards, as long as the step gets shorter.

    Args:
        config: the configuration.
        num_micro_batches: micro-batches of a step.

    Raises:
        ConfigError: if the sequence is too short for the number asked for.
    """
    if config.parallel.token_slices != AUTO:
        return config
    wanted = config.parallel.num_token_slices
    best: _Found | None = None
    for count in (wanted,) if wanted else COUNTS:
        found = _found_cut(config, count, num_micro_batches)
        if best is not None and (found is None or found.makespan >= best.makespan):
            break
        best = found
    if best is None:
        raise ConfigError(
            f"--token-slices auto: {wanted or 1} token slices of {config.model.seq_length} tokens, each a multiple of "
            f"{config.token_granularity}: give fewer"
        )
    return replace(config, parallel=best.set_in(config.parallel))


class _Found(NamedTuple):
    """Token slices and stages that make a step short, and the makespan of that step."""

    makespan: float
    cut: TokenSlices
    partition: StagePartition | None

    def set_in(self, parallel: ParallelConfig) -> ParallelConfig:
        """The section with it as a user would write it."""
        partition = parallel.stage_partition if self.partition is None else str(self.partition)
        return replace(parallel, token_slices=str(self.cut), num_token_slices=len(self.cut), stage_partition=partition)


def _found_cut(config: Config, num_token_slices: int, num_micro_batches: int) -> _Found | None:
    """The best cut into so many token slices; None if so many do not fit."""
    import numpy as np

    from deepspeed_ext.plan.solve import PolynomialCosts, solve_stages, solve_token_slices

    seq_length, parallel = config.model.seq_length, config.parallel
    granularity = granularity_of(seq_length, num_token_slices, config.token_granularity)
    if num_token_slices * granularity > seq_length:
        return None
    shape = replace(parallel.pipeline(num_micro_batches), num_token_slices=num_token_slices)
    optimised = parallel.pipeline_schedule == OPTIMISED
    uniform = TokenSlices.uniform(seq_length, num_token_slices)
    limit = parallel.schedule_memory_limit or memory_of_1f1b(shape, uniform) if optimised else None
    settings: dict[str, Any] = {
        "schedule": None if optimised else SCHEDULES[parallel.pipeline_schedule],
        "memory_limit": limit,
        "granularity": granularity,
        "min_length": granularity,
        "effort": EFFORT,
    }

    def costs(parallel: ParallelConfig) -> PolynomialCosts:
        terms = stage_terms(replace(config, parallel=parallel))
        return PolynomialCosts(np.array(terms).swapaxes(0, 1))

    def costs_of_layers(layers: Sequence[int]) -> PolynomialCosts:
        bounds = accumulate(map(int, layers), initial=0)
        return costs(replace(parallel, stage_partition=str(StagePartition(tuple(bounds)))))

    if parallel.stage_partition == AUTO:
        stages = solve_stages(shape, config.model.num_layers, seq_length, costs_of_layers, **settings)
        return _Found(stages.makespan, stages.cut, stages.partition)
    solved = solve_token_slices(shape, seq_length, costs(parallel), **settings)
    return _Found(solved.makespan, solved.cut, None)
