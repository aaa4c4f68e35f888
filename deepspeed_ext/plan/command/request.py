"""The simulation of a command line: pipeline, costs of ops, their order, host copies, units of memory."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.command.options import LAYERS_OF_A_RANK, SEQ_LENGTH
from deepspeed_ext.plan.costs import OpCosts, attention_costs
from deepspeed_ext.plan.errors import PlanError, UserError
from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.plan.memory import (
    StepFunction,
    TokenBytes,
    activation_over_time,
    host_memory_over_time,
    memory_over_time,
)
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, Placement, check_num_ops
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.schedule_file import read_schedule
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES, rank_orders, schedule_named
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.terminal import Progress, ProgressLine, part_of
from deepspeed_ext.plan.text_files import parse_file
from deepspeed_ext.plan.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Memory:
    """How memory is counted."""

    lengths: Sequence[float]
    """Tokens of the token slices, or their shares of a sequence; empty for equal ones."""
    token_bytes: TokenBytes | None = None
    """Bytes of a token; None to count activations."""

    @property
    def unit(self) -> str:
        """Unit of the curves."""
        return "activations, in micro-batches on one rank" if self.token_bytes is None else "bytes"

    def curves(self, timeline: Timeline) -> list[StepFunction]:
        """Per rank, its memory over time."""
        if self.token_bytes is None:
            return activation_over_time(timeline, self.lengths or None)
        return memory_over_time(timeline, self.lengths, self.token_bytes)

    def host_curves(self, timeline: Timeline) -> list[StepFunction]:
        """Per rank, the memory of its host over time; empty without host copies."""
        if self.token_bytes is None or not timeline.host_copies:
            return []
        return host_memory_over_time(timeline, self.lengths, self.token_bytes)


def memory_of(options: argparse.Namespace, shape: PipelineShape, lengths: Sequence[float]) -> Memory:
    """Return how to count memory, by the options."""
    if options.token_bytes is None:
        return Memory(lengths)
    if sum(lengths) < 1.5:  # shares of a sequence, or nothing
        raise UserError(
            "--token-bytes needs the tokens of a sequence: add --seq-length, or show a timeline of the trainer's"
        )
    return Memory(lengths, parse_file(options.token_bytes, lambda text: TokenBytes.from_json(text, shape)))


_NAMES = frozenset({*SCHEDULES, OPTIMISED})

_MOST = {
    "stages": 10_000,
    "micro_batches": 1_000_000,
    "model_chunks": 10_000,
    "seq_length": 10**9,
    "min_token_slice": 10**9,
    "layers": 10_000,
    "hardware_queues": 1_000,
    "window": 10**9,
}
"""Largest values of options that count."""

_MOST_TOKEN_SLICES = 16_384

_MOST_OPS = 2**20
"""Ops of a pipeline that is simulated in plain Python and shown: a minute and 2 GB."""


@dataclass(frozen=True, slots=True)
class Request:
    """A pipeline to simulate, with all that the options specify."""

    schedule: str
    """Its name, or the name of its file."""
    shape: PipelineShape
    lengths: tuple[float, ...]
    """Tokens of the token slices, or their shares of a sequence."""
    costs: OpCosts
    orders: Sequence[Sequence[Op]]
    lower_bound: float | None = None
    """Makespan that no schedule can beat; None if no bound was computed."""
    partition: StagePartition | None = None
    """Layers of the stages, if they were looked for; else stages are alike."""


def request_of(options: argparse.Namespace) -> Request:
    """Build the request of the options, and show the progress of searches."""
    if options.schedule is None:
        raise UserError("--schedule is missing: give it, or a --timeline to show")
    _check(options)
    if options.schedule in _NAMES:
        with ProgressLine() as line:
            return _of_name(options, line.part("searching"))
    return _of_file(options)


def _of_name(options: argparse.Namespace, progress: Progress) -> Request:
    for name in ("stages", "micro_batches"):
        if getattr(options, name) is None:
            raise UserError(f"{_flag(name)} is missing: give it, or a --timeline to show")
    # The optimiser may deal stages as it likes: costs that follow from a share are those of any part of a model.
    placed = options.model_chunks is not None or options.placement is not None
    if options.schedule == OPTIMISED and options.attention_share is not None and options.stages > 1 and not placed:
        each = 1 / len(_PLACEMENTS)
        requests = [
            _with_placement(options, *chosen, part_of(progress, number * each, (number + 1) * each))
            for number, chosen in enumerate(_PLACEMENTS)
        ]
        return min(requests, key=lambda request: simulate(request.orders, request.shape, request.costs).makespan)
    placement = Placement(options.placement or Placement.LOOPED)
    return _with_placement(options, options.model_chunks or 1, placement, progress)


_PLACEMENTS = ((1, Placement.LOOPED), (2, Placement.LOOPED), (2, Placement.V))
"""Model chunks and placements that are tried where the options leave them open: whole stages, and halves either way."""


def _with_placement(
    options: argparse.Namespace, model_chunks: int, placement: Placement, progress: Progress
) -> Request:
    num_token_slices, lengths = _token_slices(options.token_slices, options.seq_length)
    shape = PipelineShape(
        options.stages * model_chunks, options.micro_batches, num_token_slices, model_chunks, placement
    )
    check_num_ops(shape, _MOST_OPS)
    if options.solve_slices:
        return _solved(options, shape, progress)
    if options.schedule == OPTIMISED:
        costs = _costs(options, shape, lengths, None)
        return _optimised(options, shape, lengths, costs, progress)
    orders = rank_orders(schedule_named(options.schedule), shape)
    return Request(options.schedule, shape, lengths, _costs(options, shape, lengths, orders), orders)


def _of_file(options: argparse.Namespace) -> Request:
    path = Path(options.schedule)
    if not (path.exists() or path.suffix or len(path.parts) > 1):
        names = ", ".join([*SCHEDULES, OPTIMISED])
        raise PlanError(f"schedule {path.name!r} is not known: choose one of {names}, or the path of a schedule file")
    shape, orders = read_schedule(path)
    num_token_slices, lengths = _token_slices(options.token_slices or str(shape.num_token_slices), options.seq_length)
    of_file = {
        "--stages": (options.stages, shape.num_ranks),
        "--micro-batches": (options.micro_batches, shape.num_micro_batches),
        "--token-slices": (num_token_slices, shape.num_token_slices),
        "--model-chunks": (options.model_chunks, shape.num_model_chunks),
        "--placement": (options.placement, shape.placement.value),
    }
    for flag, (given, written) in of_file.items():
        if given is not None and given != written and (flag != "--placement" or shape.num_model_chunks > 1):
            raise UserError(f"{flag} {given} contradicts {path}, which has {written}: drop it, or change the file")
    if options.solve_slices:
        raise UserError("--solve-slices cuts for a schedule that has a name, not for one of a file: drop it")
    return Request(path.stem, shape, lengths, _costs(options, shape, lengths, orders), orders)


def _check(options: argparse.Namespace) -> None:
    """Check that options are in range and go together."""
    for name, most in _MOST.items():
        _check_count(_flag(name), getattr(options, name), most)
    if options.placement == Placement.V and (options.model_chunks or 1) == 1 and options.schedule in _NAMES:
        raise UserError("--placement v deals several stages to each rank: add --model-chunks 2")
    share, searched = options.attention_share, options.solve_slices
    if share is not None and not 0 <= share <= 1:
        raise UserError(f"--attention-share {share:g} is not a share: give 0 to 1")
    if options.head_share is not None and not 0 <= options.head_share < inf:
        raise UserError(f"--head-share {options.head_share:g} is out of range: give 0 or more")
    for name in ("memory_limit", "effort", "host_bytes"):
        given = getattr(options, name)
        if given is not None and not 0 < given < inf:
            raise UserError(f"{_flag(name)} {given:g} is out of range: give more than 0")
    slices = "is for searches of token slices: add --solve-slices"
    by_share = "needs costs that follow from token slices: add --attention-share"
    copies = "is for copies to the host: add --offload, or drop it"
    for name, goes, remedy in (
        *((name, searched, slices) for name in ("solve_stages", "min_token_slice")),
        ("layers", options.solve_stages, "is for searches of stages: add --solve-stages"),
        ("effort", searched or options.schedule == OPTIMISED, "is for searches: add --solve-slices, or drop it"),
        ("window", not searched, "does not go with --solve-slices, which has no windows: drop one of them"),
        *((name, share is not None, by_share) for name in ("head_share", "window", "solve_slices")),
        ("costs", share is None, "and --attention-share both give the costs of ops: drop one of them"),
        *((name, options.offload, copies) for name in ("host_bandwidth", "host_bytes")),
    ):
        given = getattr(options, name)
        if given not in (None, False) and not goes:
            raise UserError(f"{_flag(name)}{'' if given is True else f' {given}'} {remedy}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_count(flag: str, value: int | None, most: int) -> None:
    if value is not None and value < 1:
        raise UserError(f"{flag} {value} is not a positive whole number: give 1 or more")
    if value is not None and value > most:
        raise UserError(f"{flag} {value} is more than {most:,}: give {most:,} or less")


def _token_slices(text: str | None, seq_length: int | None) -> tuple[int, tuple[float, ...]]:
    """How many token slices, and their lengths: in tokens if they are known, else as shares of a sequence."""
    text = text or "1"
    if "," in text:
        cut = TokenSlices.parse(text)
        return len(cut), (cut if seq_length is None else cut.covering(seq_length)).lengths
    try:
        count = int(text)
    except ValueError:
        raise UserError(f"--token-slices {text} is not a number or a list: write 3, or 704,688,656") from None
    _check_count("--token-slices", count, _MOST_TOKEN_SLICES)
    if seq_length is not None:
        return count, TokenSlices.uniform(seq_length, count).lengths
    return count, (1 / count,) * count


def _costs(
    options: argparse.Namespace,
    shape: PipelineShape,
    lengths: Sequence[float],
    orders: Sequence[Sequence[Op]] | None,
) -> OpCosts:
    """Times of ops: from the file, from the share of attention, or 1 for each."""
    if options.costs is not None:
        return parse_file(options.costs, lambda text: OpCosts.from_json(text, shape))
    if options.attention_share is not None:
        if options.window is not None and sum(lengths) < 2:
            raise UserError(
                f"--window {options.window} counts tokens, and the sequence has no length in tokens: add --seq-length"
            )
        return attention_costs(
            shape, lengths, options.attention_share, head_share=options.head_share or 0.0, window=options.window
        )
    apart = orders is None or any(op.kind is OpKind.WEIGHT_GRADIENT for order in orders for op in order)
    return OpCosts.uniform(shape, weight_gradient=1.0 if apart else None)


def _optimised(
    options: argparse.Namespace,
    shape: PipelineShape,
    lengths: tuple[float, ...],
    costs: OpCosts,
    progress: Progress,
    partition: StagePartition | None = None,
) -> Request:
    # Imported here, as the solvers are: they need numpy and numba, which most commands do without.
    from deepspeed_ext.plan.solve.orders import optimise

    found = optimise(
        shape,
        costs,
        memory_limit=options.memory_limit,
        lengths=lengths,
        effort=1.0 if options.effort is None else options.effort,
        progress=progress,
    )
    return Request(OPTIMISED, shape, lengths, costs, found.orders, found.lower_bound, partition)


def _solved(options: argparse.Namespace, shape: PipelineShape, progress: Progress) -> Request:
    """Find token slices for the schedule, and layers of the stages with --solve-stages, and build their request."""
    from deepspeed_ext.plan.solve import PolynomialCosts, TokenSliceCosts, op_costs, solve_stages, solve_token_slices

    if "," in (options.token_slices or ""):
        raise UserError(
            f"--solve-slices looks for the lengths that --token-slices {options.token_slices} gives: give their number"
        )
    seq_length = options.seq_length or SEQ_LENGTH
    num_layers = options.layers or LAYERS_OF_A_RANK * shape.num_ranks

    def costs_of(layers: Sequence[int]) -> TokenSliceCosts:
        """Costs of stages with so many layers each, normalised: on average, the forward of a rank takes 1."""
        return PolynomialCosts.of_layers(
            layers,
            seq_length,
            options.attention_share,
            layer_time=shape.num_ranks / sum(layers),
            head_time=options.head_share or 0.0,
        )

    schedule = None if options.schedule == OPTIMISED else schedule_named(options.schedule)
    middle = 0.5 if schedule is None else 1.0
    settings: dict[str, Any] = {
        "schedule": schedule,
        "effort": 1.0 if options.effort is None else options.effort,
        "progress": part_of(progress, 0.0, middle),
        "memory_limit": options.memory_limit,
        "min_length": options.min_token_slice or 1,
    }
    if options.solve_stages:
        stages = solve_stages(shape, num_layers, seq_length, costs_of, **settings)
        cut, partition = stages.cut, stages.partition
        costs = op_costs(shape, cut, costs_of([len(partition.layers(stage)) for stage in range(shape.num_stages)]))
    else:
        alike = costs_of([1] * shape.num_stages)
        cut = solve_token_slices(shape, seq_length, alike, **settings).cut
        partition, costs = None, op_costs(shape, cut, alike)
    if schedule is None:
        return _optimised(options, shape, cut.lengths, costs, part_of(progress, middle, 1.0), partition)
    return Request(options.schedule, shape, cut.lengths, costs, rank_orders(schedule, shape), partition=partition)


def host_copies_of(options: argparse.Namespace, request: Request, memory: Memory) -> HostCopySettings | None:
    """Return the settings of host copies; None without them."""
    if not options.offload:
        return None
    if memory.token_bytes is None:
        raise UserError("--offload needs the bytes of keys and values, or of stage inputs: add --token-bytes")
    instant = next((op for order in request.orders for op in order if not request.costs.duration(op)), None)
    if instant is not None:
        raise UserError(f"--offload plans copies by the times of ops, and {instant} takes none: give times above 0")
    to_host, from_host = _bandwidths(options.host_bandwidth)
    return HostCopySettings(
        tuple(int(length) for length in memory.lengths),
        memory.token_bytes.stage_input or (0.0,) * request.shape.num_stages,
        memory.token_bytes.key_value,
        to_host,
        from_host,
        host_bytes=inf if options.host_bytes is None else options.host_bytes,
    )


def _bandwidths(text: str | None) -> tuple[float, float]:
    """Bytes per time to the host and back: one number for both ways, or one for each."""
    if text is None:
        return inf, inf
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        speeds = []
    if len(speeds) not in (1, 2) or not all(speed > 0 and isfinite(speed) for speed in speeds):
        raise UserError(
            f"--host-bandwidth {text} is not a bandwidth: give bytes per time above 0, or two with a comma between them"
        )
    return speeds[0], speeds[-1]
