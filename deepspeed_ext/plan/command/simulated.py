"""Shows a schedule: simulated, checked, drawn; its figures in words and as JSON."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from deepspeed_ext.plan.command.request import Memory, Request, host_copies_of, memory_of, request_of
from deepspeed_ext.plan.draw import Panel, render_chrome_trace, render_comparison, render_html, render_svg, render_text
from deepspeed_ext.plan.draw.elements import with_unit
from deepspeed_ext.plan.errors import PlanError, ScheduleDeadlock
from deepspeed_ext.plan.memory import StepFunction, peak, peak_activation
from deepspeed_ext.plan.programs.device import DeviceModel, ExpertExchange
from deepspeed_ext.plan.programs.lowering import ProvenSchedule, lowering_costs
from deepspeed_ext.plan.schedule_file import write_schedule
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES, closed_form, fixed, interleaved
from deepspeed_ext.plan.simulate import simulate, simulate_with_host_copies
from deepspeed_ext.plan.terminal import STANDARD_OUTPUT, write_json
from deepspeed_ext.plan.text_files import write_text
from deepspeed_ext.plan.timeline import Timeline, critical_path, executed_order


def write_files(
    options: argparse.Namespace,
    panels: Sequence[tuple[str, Timeline]],
    memory: Memory,
    title: str,
    figures: Callable[[], dict[str, Any]],
) -> bool:
    """Write each file of the options, and return whether text is to be printed; most files show the first panel."""
    timeline = panels[0][1]
    if options.write_schedule is not None:
        write_text(options.write_schedule, write_schedule(executed_order(timeline)))
    if options.svg is not None:
        write_text(options.svg, render_svg(timeline, title) if len(panels) == 1 else render_comparison(panels))
    if options.trace is not None:
        write_text(options.trace, render_chrome_trace(timeline, memory.curves(timeline), memory.host_curves(timeline)))
    if options.html is not None:
        pages = [Panel(name, each, memory.curves(each), memory.unit, memory.host_curves(each)) for name, each in panels]
        write_text(options.html, render_html(pages, title))
    if options.json is not None:
        write_json(options.json, json.dumps(figures()))
    return bool(options.json != STANDARD_OUTPUT)


NAME_WIDTH = 25


def summary(timeline: Timeline, request: Request, memory: Memory) -> str:
    """Return the figures in lines of name and value."""
    bubble_ratio = f"{timeline.bubble_ratio:.2%}"
    known = closed_form(request.schedule, request.shape, request.costs)
    if known is not None:
        bubble_ratio += f" (closed form {known.formula}: {known.bubble_ratio:.2%})"
    by = row_unit(timeline)

    def listed(values: Iterable[float], unit: str = "") -> str:
        return " ".join(f"{value:.4g}" for value in values) + f"  {by}{unit}"

    def mib(curves: Sequence[StepFunction]) -> str:
        return listed((peak(curve) / 2**20 for curve in curves), ", in MiB")

    rows = [
        ("makespan", with_unit(timeline.makespan, timeline.unit, digits=6)),
        ("bubble ratio", bubble_ratio),
        ("peak live token slices", listed(timeline.peak_live_token_slices)),
        ("peak activation", listed(peak_activation(timeline, request.lengths or None), ", in micro-batches")),
    ]
    if timeline.reductions:
        exposed = timeline.duration - timeline.makespan
        after = f"{with_unit(exposed, timeline.unit, digits=6)} after" if exposed > 0 else "before"
        rows.insert(1, ("gradients are reduced", f"{after} the last op{'' if exposed > 0 else ' ends'}"))
    if memory.token_bytes is not None:
        rows.append(("peak memory", mib(memory.curves(timeline))))
        if timeline.host_copies:
            rows.append(("without copies to hosts", mib(memory.curves(replace(timeline, host_copies=())))))
            rows.append(("peak on the hosts", mib(memory.host_curves(timeline))))
    if request.lower_bound is not None:
        above = max(timeline.makespan / request.lower_bound - 1, 0.0) if request.lower_bound else 0.0  # rounding
        bound = f"{request.lower_bound:.6g} (the makespan is {above:.2%} above it)"
        rows.insert(1, ("lower bound", bound))
    if request.shape.num_model_chunks > 1:
        placed = f"{request.shape.num_model_chunks} on each rank, placement {request.shape.placement.value}"
        rows.append(("model chunks", placed))
    if len(set(request.lengths)) > 1:
        rows.append(("token slices", ",".join(f"{length:.4g}" for length in request.lengths)))
    if request.partition is not None:
        counts = (len(request.partition.layers(stage)) for stage in range(request.partition.num_stages))
        rows.append(("layers", " ".join(map(str, counts)) + "  (by stage)"))
    return lines(rows)


def figures(timeline: Timeline, request: Request, memory: Memory) -> dict[str, Any]:
    """Return the figures, and all that `Timeline.from_json` reads, so that `--timeline` shows it again."""
    return {
        "schedule": request.schedule,
        "makespan": timeline.makespan,
        **({"duration": timeline.duration} if timeline.reductions else {}),
        **({} if request.lower_bound is None else {"lower_bound": request.lower_bound}),
        **({} if request.partition is None else {"stage_partition": list(request.partition.bounds)}),
        **timeline_figures(timeline, request.lengths, memory),
    }


def timeline_figures(timeline: Timeline, lengths: Sequence[float], memory: Memory) -> dict[str, Any]:
    """Return the figures that a simulated and a measured timeline have."""
    found: dict[str, Any] = {
        "bubble_ratio": timeline.bubble_ratio,
        "peak_live_token_slices": list(timeline.peak_live_token_slices),
        "peak_activation": list(peak_activation(timeline, lengths or None)),
    }
    if memory.token_bytes is not None:
        curves = memory.curves(timeline)
        found |= {"peak_memory_bytes": [peak(curve) for curve in curves], "memory_bytes": curves}
        if timeline.host_copies:
            on_host = memory.host_curves(timeline)
            found |= {"peak_host_memory_bytes": [peak(curve) for curve in on_host], "host_memory_bytes": on_host}
    return found | {
        "deadlock_free": True,
        "token_slices": list(lengths),
        "critical_path": [str(op) for op in critical_path(timeline).ops],
        "orders": [[str(op) for op in order] for order in executed_order(timeline)],
        **json.loads(timeline.to_json()),
    }


def row_unit(timeline: Timeline) -> str:
    """Return the unit that each number of a row is for."""
    return "(by rank)" if timeline.shape.num_model_chunks > 1 else "(by stage)"


def lines(rows: Sequence[tuple[str, str]]) -> str:
    """Return names and values, aligned."""
    return "\n".join(f"{name:<{NAME_WIDTH}}{value}" for name, value in rows)


_TOLERANCE = 1e-9
"""Tolerance of a memory limit: shares of tokens add up to it with rounding."""


def show_simulated(options: argparse.Namespace) -> int:
    """Simulate the schedule of the options. Returns the exit code."""
    request: Request | None = None
    if (options.schedule == OPTIMISED or options.solve_slices) and sys.stderr.isatty():
        print("searching: this takes some seconds, and less with --effort 0.1", file=sys.stderr)
    try:
        request = request_of(options)
        memory = memory_of(options, request.shape, request.lengths)
        copies = host_copies_of(options, request, memory)
        if copies is None:
            timeline = simulate(request.orders, request.shape, request.costs)
        else:
            timeline = simulate_with_host_copies(request.orders, request.shape, request.costs, copies)
        # The order may be sound, and its transfers still lock.
        costs = lowering_costs if copies is None else (lambda _: request.costs)
        exchange = ExpertExchange(options.moe_token_dispatcher_type or "none")
        device = DeviceModel(hardware_queues=options.hardware_queues, exchange=exchange)
        proof = ProvenSchedule(fixed(request.orders), device, copies, costs).proof(request.shape)
    except ScheduleDeadlock as deadlock:
        _show_deadlock(options, deadlock, request)
        return 1
    if not isfinite(timeline.makespan):
        raise PlanError("the times of the ops add up to more than a number can hold: give them in a larger unit")
    if options.memory_limit is not None:
        _check_memory(timeline, request, options.memory_limit)
    panels, name = [(request.schedule, timeline)], request.schedule
    if write_files(options, panels, memory, name, lambda: figures(timeline, request, memory)):
        print(f"{render_text(timeline)}\n\n{summary(timeline, request, memory)}")
        assumption = ", if no two streams of a rank share a hardware queue"
        print("deadlock free            yes" + assumption * proof.assumes_queues)
        if (waits := proof.waits(exchange)) is not None:
            print(f"exchanges of experts     {waits}")
        if SCHEDULES.get(request.schedule) is interleaved and request.shape.num_model_chunks == 1:
            print("note: with one stage on each rank, interleaved is 1f1b: add --model-chunks 2")
    return 0


def _show_deadlock(options: argparse.Namespace, deadlock: ScheduleDeadlock, request: Request | None) -> None:
    if options.json != STANDARD_OUTPUT:
        print(f"deadlock free            no: {deadlock}")
    if options.json is None:
        return
    known = {"schedule": options.schedule, "deadlock_free": False, "reason": str(deadlock)}
    if request is not None:
        known |= request.shape.to_fields() | {"orders": [[str(op) for op in order] for order in request.orders]}
    write_json(options.json, json.dumps(known))


def _check_memory(timeline: Timeline, request: Request, limit: float) -> None:
    peaks = peak_activation(timeline, request.lengths or None)
    highest = max(peaks)
    if highest > limit * (1 + _TOLERANCE):
        remedy = "raise the limit" if request.schedule == OPTIMISED else f"raise it, or choose --schedule {OPTIMISED}"
        raise PlanError(
            f"schedule {request.schedule!r} holds {highest:.4g} activations of a micro-batch on rank "
            f"{peaks.index(highest)}, and --memory-limit is {limit:g}: {remedy}"
        )
