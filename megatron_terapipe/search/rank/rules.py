"""Named rules over grids of strategies, and the legal strategies of a space, layout by layout.

    TRAINER_RULES     refusals of the trainer           DUPLICATES        strategies that equal others
    legal_grids       grids with a mask of the strategies that keep all rules; SearchCounts counts each rejection

They mirror the checks of the trainer (`megatron_terapipe/config`), without building its configuration for each of a
million strategies; tests compare both.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import KEEPING_ALL, OPTIMISED, SCHEDULES
from megatron_terapipe.dimensions import Dimension, Tried
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.rank.space import AXES, ON_AXIS, Axis, Choices, Row, SearchProblem, StrategyGrid
from megatron_terapipe.strategy import DIMENSIONS, SOLVED, Strategy

Holds = NDArray[np.bool_]


@dataclass(frozen=True)
class Rule:
    """A rule that strategies must keep to be tried."""

    name: str
    """For the table of rejections."""
    holds: Callable[[StrategyGrid, SearchProblem], Holds]
    """Which strategies of a grid keep it, as an array that broadcasts over the grid."""
    error: Callable[..., str | None] | None = None
    """Reason why a strategy breaks it, or None; called with a grid, the problem, and a value of each of `axes`.
    None for a rule that leaves out strategies that equal another one or are worse."""
    axes: tuple[Axis, ...] = ()

    def reason(self, grid: StrategyGrid, problem: SearchProblem) -> str | None:
        """Return why the one strategy of a grid [1, 1, 1, 1, 1, 1, 1] breaks the rule; None if it keeps it."""
        return self.error and self.error(grid, problem, *(getattr(grid, axis)[0] for axis in self.axes))


def _by_values(name: str, error: Callable[..., str | None], *axes: Axis) -> Rule:
    """Return the rule that there is no error with any value of up to two axes, in the order of `AXES`."""

    def holds(grid: StrategyGrid, problem: SearchProblem) -> Holds:
        values = itertools.product(*(getattr(grid, axis) for axis in axes))
        return grid.along(axes, np.array([error(grid, problem, *each) is None for each in values], dtype=bool))

    return Rule(name, holds, error, axes)


def _devices(grid: StrategyGrid, problem: SearchProblem) -> str | None:
    if grid.world_size <= problem.cluster.num_devices:
        return None
    return (
        f"data x sequence x tensor x pipeline parallel size = {grid.world_size} ranks, but the cluster has "
        f"{problem.cluster.num_devices} devices"
    )


def _expert_shares(grid: StrategyGrid, problem: SearchProblem) -> str | None:
    size, ranks = grid.shared.get("expert_parallel_size", 1), grid.world_size // grid.shared["pipeline_parallel_size"]
    if size == 1:
        return None
    if ranks % size:
        return f"the {ranks} ranks of a stage cannot be put into groups of {size} expert-parallel ranks"
    number = 0 if problem.workload.experts is None else problem.workload.experts.number
    if number and number % size == 0:
        return None
    return f"{number or 'no'} experts cannot be shared by {size} expert-parallel ranks"


def _tokens_of_experts(grid: StrategyGrid, problem: SearchProblem, sequence_parallel: bool) -> str | None:
    if sequence_parallel or grid.layout.tensor_parallel_size == 1 or problem.workload.experts is None:
        return None
    return (
        "tensor-parallel ranks of a model with experts route a part of the tokens each: set sequence_parallel to true"
    )


def _shared_numbers(problem: SearchProblem) -> dict[str, set[int]]:
    """Return the numbers that tensor-parallel ranks must divide, by their unit."""
    units = ("attention heads", "key and value heads", "groups of a recurrence", "columns")
    shared: dict[str, set[int]] = {unit: set() for unit in units}
    for layer in {id(each): each for each in problem.workload.layers}.values():
        if layer.attention is not None:
            shared["attention heads"].add(layer.attention.query_heads)
            shared["key and value heads"].add(layer.attention.key_value_heads)
        if layer.recurrence is not None:
            shared["groups of a recurrence"].add(layer.recurrence.num_groups)
        if layer.kind == "head":
            continue  # the vocabulary is padded
        for product in layer.products:
            if product.parallel != "none":
                shared["columns"].add(product.outputs if product.parallel == "column" else product.inputs)
    return shared


def _tensor_shares(grid: StrategyGrid, problem: SearchProblem) -> str | None:
    size = grid.layout.tensor_parallel_size
    for name, numbers in _shared_numbers(problem).items():
        for number in sorted(numbers):
            if number % size:
                words = f"{number} {name}" if name != "columns" else f"a matrix of {number} columns"
                return f"{words} cannot be shared by {size} tensor-parallel ranks"
    return None


def _sequence_shares(grid: StrategyGrid, problem: SearchProblem) -> str | None:
    size, tensor = grid.layout.sequence_parallel_size, grid.layout.tensor_parallel_size
    if size == 1:
        return None
    for layer in {id(each): each for each in problem.workload.layers}.values():
        groups = None if layer.recurrence is None else layer.recurrence.num_groups // tensor
        if groups is not None and groups % size:
            return f"{groups} groups of a recurrence cannot be shared by {size} sequence-parallel ranks"
        if layer.attention is None or problem.software.communication.ring:
            continue
        if layer.attention.separate_window is not None:
            return "sequence-parallel ranks cannot share attention in separate windows"
        heads, keys = layer.attention.query_heads // tensor, layer.attention.key_value_heads // tensor
        if heads % size:
            return f"{heads} attention heads cannot be shared by {size} sequence-parallel ranks"
        if keys % size and size % keys:
            return f"{keys} key and value heads are neither a multiple nor a divisor of {size} sequence-parallel ranks"
    return None


def _layers(grid: StrategyGrid, problem: SearchProblem, order: tuple[str, int]) -> str | None:
    stages = grid.layout.pipeline_parallel_size * order[1]
    # Another rule is for bounds, whose ends may be stages without these layers.
    if stages <= problem.workload.num_dealt_layers or all(isinstance(each, tuple) for each in grid.partition):
        return None
    return f"{stages} stages are more than the {problem.workload.num_dealt_layers} layers"


def _schedule(grid: StrategyGrid, problem: SearchProblem, order: tuple[str, int]) -> str | None:
    return _order_error(grid.layout.pipeline_parallel_size, *order)


@cache
def _order_error(num_ranks: int, schedule: str, model_chunks: int) -> str | None:
    if schedule not in SCHEDULES:
        return f"schedule {schedule!r} is none that can be priced: choose one of {', '.join(SCHEDULES)}"
    shape = PipelineShape(num_ranks * model_chunks, 1, 1, model_chunks)
    try:
        # A schedule raises for pipelines that it has no order for.
        next(SCHEDULES[schedule](shape, 0), None)
    except PlanError as error:
        return str(error)
    return None


def _batch(grid: StrategyGrid, problem: SearchProblem, micro_batch: int) -> str | None:
    if grid.global_batch_size % (micro_batch * grid.layout.data_parallel_size) == 0:
        return None
    return (
        f"global batch size {grid.global_batch_size} is not a multiple of micro-batch size {micro_batch} x "
        f"data-parallel size {grid.layout.data_parallel_size}"
    )


def _can_cut(grid: StrategyGrid, problem: SearchProblem, count: int) -> str | None:
    if count == 1 or problem.workload.can_cut_tokens:
        return None
    return "a layer of the model has other tokens than its neighbours, or reads later ones, so sequences cannot be cut"


def _token_slices(grid: StrategyGrid, problem: SearchProblem, count: int, sequence_parallel: bool) -> str | None:
    seq_length, size = problem.workload.seq_length, grid.granularity(sequence_parallel)
    if count * size > seq_length:
        each = f" of at least {size} tokens, one for each rank that shares them," if size > 1 else ""
        return f"{count} token slices{each} are too many for {seq_length} tokens"
    if grid.lengths is not None and sum(grid.lengths) != seq_length:
        return f"token slices of {sum(grid.lengths)} tokens do not cover sequences of {seq_length}"
    if any(length % size for length in grid.lengths or (seq_length,)):
        return f"each token slice is dealt to {size} ranks, and one is not a multiple of {size} tokens"
    return None


def _partition(
    grid: StrategyGrid, problem: SearchProblem, order: tuple[str, int], partition: str | tuple[int, ...]
) -> str | None:
    if partition in ("uniform", "parameters", SOLVED):
        return None  # there is a layer for each stage: another rule
    try:
        problem.workload.partition(partition, grid.layout.pipeline_parallel_size * order[1])
    except ConfigError as error:
        return str(error).removeprefix("strategy: ")
    return None


def _shards(grid: StrategyGrid, problem: SearchProblem, zero: tuple[int, int | None]) -> str | None:
    (stage, size), copies = zero, grid.layout.num_weight_copies
    if size is None:
        return None
    if stage == 0:
        return f"ZeRO stage 0 divides no states, and zero_shard_size is {size}: use another stage, or null"
    if problem.workload.experts is not None:
        return "groups that divide states are not priced for models with experts: set zero_shard_size to null"
    if copies % size:
        return f"the {copies} ranks with the same weights cannot be put into groups of {size} that divide states"
    return None


def _offload(grid: StrategyGrid, problem: SearchProblem, recompute: tuple[str, bool]) -> str | None:
    mode, offload = recompute
    if not offload or mode == "stage":
        return None
    return (
        f"offload copies the stage inputs of recompute 'stage', and recompute is {mode!r}: set recompute to stage, or "
        "offload off"
    )


def _copied_stages(
    grid: StrategyGrid, problem: SearchProblem, partition: str | tuple[int, ...], recompute: tuple[str, bool]
) -> str | None:
    if not recompute[1] or partition != "parameters":
        return None
    return "offload plans copies by the layers of each stage, which 'parameters' deals when the model is built"


def _loss_scale(grid: StrategyGrid, problem: SearchProblem, zero: tuple[int, int | None]) -> str | None:
    if problem.precision != "fp16" or zero[0] != 0:
        return None
    return "fp16 with ZeRO stage 0 would train on wrongly scaled gradients in DeepSpeed: use stage 1, or bf16"


def _priced(dimension: Dimension) -> Rule:
    """Return the rule that a dimension has a value that can be priced."""
    names = ON_AXIS.get(dimension.axis, ())

    def error(grid: StrategyGrid, problem: SearchProblem, *values: Any) -> str | None:
        value = values[0] if values else grid.shared[dimension.name]
        if len(names) > 1:
            value = value[names.index(dimension.name)]
        if value in dimension.priced or isinstance(value, tuple):
            return None
        return f"{dimension.name} {value!r} is not one of {', '.join(map(str, dimension.priced))}"

    return _by_values(f"{dimension.name} can be priced", error, *(axis for axis in AXES if axis == dimension.axis))


def _runs(names: tuple[str, ...], axes: tuple[Axis, ...]) -> Rule:
    """Return the rule that the trainer can run the values of dimensions, which are all on one axis, or on none."""

    def error(grid: StrategyGrid, problem: SearchProblem, *values: Any) -> str | None:
        software = problem.software
        if not software.runs:
            return None
        found = [grid.shared[name] for name in names] if not axes else values[0] if len(names) > 1 else values
        for name, value in zip(names, found, strict=True):
            if not software.can_run(name, value):
                known = " or ".join(map(str, dict(software.runs)[name]))
                return f"{software.name} cannot run {name} {value}, but {known}"
        return None

    return _by_values(f"the trainer can run this {' and '.join(names)}", error, *axes)


TRAINER_RULES = (
    _by_values("ranks fit the devices", _devices),
    _by_values("expert-parallel ranks are ranks of a stage, and share experts evenly", _expert_shares),
    _by_values("tensor-parallel ranks share heads and widths evenly", _tensor_shares),
    _by_values("sequence-parallel ranks share heads evenly", _sequence_shares),
    _runs(("sequence_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"), ()),
    _runs(("key_value_gradients", "latent_kept"), ()),
    *(_runs(ON_AXIS[axis], (axis,)) for axis in AXES),
    _by_values("a layer for each stage", _layers, "order"),
    _by_values("the schedule takes so many model chunks", _schedule, "order"),
    _by_values("the batch is dealt evenly", _batch, "micro_batch"),
    _by_values("layers let sequences be cut", _can_cut, "token_slices"),
    _by_values("tensor-parallel ranks share the tokens of experts", _tokens_of_experts, "sequence_parallel"),
    _by_values("ranks with the same weights divide states evenly", _shards, "zero"),
    _by_values("ZeRO stage goes with the precision", _loss_scale, "zero"),
    _by_values("offload goes with the recomputation of stages", _offload, "recompute"),
    *(_priced(each) for each in DIMENSIONS if each.priced and each.axis != "order"),
    _by_values("tokens for each token slice and rank", _token_slices, "token_slices", "sequence_parallel"),
    _by_values("the stage partition fits model and stages", _partition, "order", "partition"),
    _by_values("offload goes with a known stage partition", _copied_stages, "partition", "recompute"),
)
"""The refusals of the trainer, in the order in which rejections are counted: rules about at most one axis first."""


def _other_schedules(grid: StrategyGrid, problem: SearchProblem) -> Holds:
    """Interleaved with one model chunk is 1f1b; gpipe with several has interleaved's bubble and keeps more.

    Breadth-first with one model chunk is gpipe; with several it also keeps more, unless token slices are offloaded.
    """
    plain = {model_chunks for schedule, model_chunks in grid.order if schedule == "1f1b"}
    interleaved = {model_chunks for schedule, model_chunks in grid.order if schedule == "interleaved"}
    gpipe = {model_chunks for schedule, model_chunks in grid.order if schedule == "gpipe"}

    def wanted(schedule: str, model_chunks: int) -> bool:
        if schedule == "interleaved":
            return model_chunks > 1 or 1 not in plain
        if schedule == "breadth-first" and model_chunks == 1:
            return 1 not in gpipe
        return model_chunks == 1 or model_chunks not in interleaved

    holds = grid.along("order", [wanted(*order) for order in grid.order])
    idle = [schedule == "breadth-first" and model_chunks > 1 for schedule, model_chunks in grid.order]
    if any(idle):
        waits = grid.along("recompute", [offload for _, offload in grid.recompute])
        holds = holds | (grid.along("order", idle) & waits)
    return np.asarray(holds)


def _one_rank(grid: StrategyGrid, problem: SearchProblem) -> Holds:
    """Without a pipeline all schedules equal the first one, or keep more."""
    first = grid.order[0] if grid.order else None
    return grid.along("order", [grid.layout.pipeline_parallel_size > 1 or order == first for order in grid.order])


def _one_micro_batch(grid: StrategyGrid, problem: SearchProblem) -> Holds:
    """With one micro-batch gpipe and breadth-first run the ops of 1f1b, or of interleaved, in the same order."""
    alternating = {model_chunks for schedule, model_chunks in grid.order if schedule in ("1f1b", "interleaved")}
    # Without a pipeline another rule keeps one schedule, which may be one of these.
    again = [
        grid.layout.pipeline_parallel_size > 1 and schedule in KEEPING_ALL and model_chunks in alternating
        for schedule, model_chunks in grid.order
    ]
    return np.asarray(~(grid.along("order", again) & (grid.num_micro_batches == 1)))


def _one_replica(grid: StrategyGrid, problem: SearchProblem) -> Holds:
    """On one data-parallel rank there is no optimizer state to spread."""
    alone = grid.layout.data_parallel_size == 1 and any(stage == 1 for stage, _ in grid.zero)
    return grid.along("zero", [not alone or stage == 1 for stage, _ in grid.zero])


def _node_shards(grid: StrategyGrid, problem: SearchProblem) -> Holds:
    """Of groups that divide states only those that fill a node are worth it, where all ranks can divide them."""
    all_divide = any(size is None for _, size in grid.zero)
    devices = problem.cluster.nodes[0].num_devices
    node = devices // grid.layout.tensor_parallel_size
    wanted = {None} if node >= grid.layout.num_weight_copies else {None, node}
    return grid.along("zero", [not all_divide or size in wanted for _, size in grid.zero])


def _one_tensor_rank(grid: StrategyGrid, problem: SearchProblem) -> Holds:
    """On one tensor-parallel rank there is no other to share tokens with."""
    alone = grid.layout.tensor_parallel_size == 1 and False in grid.sequence_parallel
    return grid.along("sequence_parallel", [not (alone and on) for on in grid.sequence_parallel])


def _same_stages(grid: StrategyGrid, problem: SearchProblem) -> Holds:
    """Rules that deal the layers as one before them does."""
    kept = np.ones((len(grid.order), len(grid.partition)), dtype=bool)
    for row, (_, model_chunks) in enumerate(grid.order):
        num_stages = grid.layout.pipeline_parallel_size * model_chunks
        seen: set[tuple[int, ...]] = set()
        for column, partition in enumerate(grid.partition):
            if partition == SOLVED:
                # One stage, or one layer on each, can be dealt but one way.
                kept[row, column] = num_stages not in (1, problem.workload.num_dealt_layers) or not seen
            elif partition == "parameters" and problem.has_equal_layers and "uniform" in grid.partition:
                kept[row, column] = False
            else:
                # Bounds of a flag may not fit these stages: the trainer's rules check that.
                bounds = partition
                if isinstance(bounds, str):
                    bounds = problem.partition(bounds, num_stages).bounds
                kept[row, column] = bounds not in seen
                seen.add(bounds)
    return grid.along(("order", "partition"), kept)


def _proven(grid: StrategyGrid, problem: SearchProblem) -> Holds:
    """Interleaved model chunks with token slices are predicted fast, and were slower than 1F1B where published.

    That is on GPUs, in three of four comparisons of the authors of arXiv 2406.03488; breadth-first was not measured.
    """
    cut = grid.along("token_slices", [count > 1 for count in grid.token_slices])
    return np.asarray((grid.model_chunks == 1) | ~cut | problem.may_interleave_slices)


UNPROVEN = "several model chunks with token slices only where trials or flags have both"

SAME_STAGES = "not the same stages as another partition"

DUPLICATES = (
    Rule("not the same as another schedule", _other_schedules),
    Rule("a pipeline, where schedules differ", _one_rank),
    Rule("several micro-batches, where schedules differ", _one_micro_batch),
    Rule("data-parallel ranks, where ZeRO stages differ", _one_replica),
    Rule("states that the ranks of a node divide, or all", _node_shards),
    Rule("tensor-parallel ranks to share tokens", _one_tensor_rank),
    Rule(SAME_STAGES, _same_stages),
    Rule(UNPROVEN, _proven),
)
"""Strategies that equal another one of the grid, are worse, or doubtful, in the order in which they are counted. They
follow the trainer's rules. The only value that a flag allows is never left out."""


@dataclass
class SearchCounts:
    """Counts of the strategies of a search: how many there are, and how many each step rejects or prices."""

    total: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """How many each rule was the first to reject, by its name."""
    priced: int = 0
    """Strategies that kept all rules: priced in closed form, unless states are too large for all of a grid."""
    variants: Counter[Row] = field(default_factory=Counter)
    """How many of each row can run, in closed form."""
    simulated: int = 0
    """Strategies that were priced on their schedule."""

    def expect(self, names: Iterable[str]) -> None:
        """Fix the order in which rules are listed."""
        for name in names:
            self.rejected.setdefault(name, 0)

    def reject(self, name: str, number: int) -> None:
        """Count strategies that a rule rejects."""
        if number:
            self.rejected[name] += number

    @property
    def num_rejected(self) -> int:
        """Number of strategies that were rejected."""
        return sum(self.rejected.values())

    def lines(self) -> list[tuple[str, int]]:
        """Return the lines to print: a label and a count each."""
        return [
            ("strategies of the space", self.total),
            *((f"rejected by the rule: {name}", -number) for name, number in self.rejected.items() if number),
            ("feasible", self.total - self.num_rejected),
            ("priced on their schedule", self.simulated),
        ]


RULES = (*TRAINER_RULES, *DUPLICATES)

ProgressCallback = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and the phase."""


def no_progress(done: int, total: int, phase: str) -> None:
    """Show no progress."""


USES_DEVICES = "parallel sizes multiply to the devices"


@dataclass(frozen=True)
class LegalGrid:
    """A grid of strategies, and which of them keep all rules."""

    grid: StrategyGrid
    """The grid; values that no strategy can have are gone from its axes."""
    legal: NDArray[np.bool_]
    """[grid] whether a strategy keeps the rules."""


def layouts(choices: Choices, num_devices: int) -> tuple[list[dict[str, int]], int]:
    """Return the values, by name, of the dimensions that are on no axis of a grid, and how many do not use all devices.

    They are all combinations with as many ranks as devices.
    """
    searched = [each for each in DIMENSIONS if each.tried is not None and not each.axis]
    (rest,) = [each.name for each in searched if each.tried is Tried.REST_OF_DEVICES]
    others = [each for each in searched if each.name != rest]
    found: list[dict[str, int]] = [{rest: num_devices}]
    for each in others:
        found = [
            {**sizes, rest: sizes[rest] // (value if each.ranks else 1), each.name: value}
            for sizes in found
            for value in choices[each.name]
            if not each.ranks or sizes[rest] % value == 0
        ]
    if (wanted := choices.values[rest]) is not None:
        return [sizes for sizes in found if sizes[rest] in wanted], 0
    return found, prod(len(choices[each.name]) for each in others) - len(found)


def legal_grids(
    problem: SearchProblem, choices: Choices, counts: SearchCounts, progress: ProgressCallback = no_progress
) -> Iterator[LegalGrid]:
    """Yield the strategies of the space that keep all rules, a grid for each layout: [axes of `StrategyGrid`]."""
    counts.expect((USES_DEVICES, *(rule.name for rule in RULES)))
    found_layouts, unusable = layouts(choices, problem.cluster.num_devices)
    counts.total += choices.per_layout * (len(found_layouts) + unusable)
    counts.reject(USES_DEVICES, choices.per_layout * unusable)
    for number, sizes in enumerate(found_layouts):
        progress(number, len(found_layouts), "closed form")
        found = _legal(StrategyGrid.of_choices(choices, sizes, problem.global_batch_size), problem, counts)
        if found is not None:
            yield found


def _legal(grid: StrategyGrid, problem: SearchProblem, counts: SearchCounts) -> LegalGrid | None:
    """Return the legal strategies of a grid; None if there are none."""
    legal: Holds | None = None
    left = grid.size
    for rule in RULES:
        holds = rule.holds(grid, problem)
        if holds.all():
            continue
        axes = [axis for axis, length in enumerate(holds.shape) if length > 1] or [0]
        for axis in axes:
            # Values that no strategy can have are dropped, so that the next rules have a smaller grid.
            kept = np.broadcast_to(holds.any(axis=tuple({*range(len(AXES))} - {axis})), grid.shape[axis])
            if not kept.all():
                grid = grid.keep(AXES[axis], kept)
                holds = holds.compress(kept, axis) if holds.shape[axis] > 1 else holds
                legal = None if legal is None else legal.compress(kept, axis)
        if legal is not None or len(axes) > 1:
            legal = np.broadcast_to(holds if legal is None else legal & holds, grid.shape)
        counts.reject(rule.name, left - (left := grid.size if legal is None else int(np.count_nonzero(legal))))
        if not left:
            return None
    return LegalGrid(grid, np.ones(grid.shape, dtype=bool) if legal is None else legal)


def broken_rule(strategy: Strategy, problem: SearchProblem) -> str | None:
    """Return why a strategy cannot be run; None if it can."""
    if strategy.schedule == OPTIMISED:
        if not problem.software.can_run("schedule", OPTIMISED):
            return f"{problem.software.name} cannot run schedule {OPTIMISED}"
        # An order is found for any pipeline that a schedule by name takes.
        by_name = "interleaved" if strategy.num_model_chunks > 1 else "1f1b"
        strategy = replace(strategy, schedule=by_name, vocabulary_stages=False)
    elif strategy.vocabulary_stages:
        return f"vocabulary stages are priced only with an order that is found for them: write schedule {OPTIMISED!r}"
    grid = StrategyGrid.of_strategy(strategy)
    return next((reason for rule in TRAINER_RULES if (reason := rule.reason(grid, problem)) is not None), None)
