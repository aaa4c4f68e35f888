"""Shows a schedule: simulated, checked, drawn."""

import argparse
import json
import sys
from math import isfinite

from deepspeed_ext.plan.command.drawings import write_drawings
from deepspeed_ext.plan.command.figures import activation, figures, order_texts, summary
from deepspeed_ext.plan.command.host_copies import host_copies_of
from deepspeed_ext.plan.command.request import Request, request_of
from deepspeed_ext.plan.command.sizes import memory_of
from deepspeed_ext.plan.errors import PlanError, ScheduleDeadlock
from deepspeed_ext.plan.programs.device import Device
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.render import render_text
from deepspeed_ext.plan.schedule_file import write_schedule
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES, fixed, interleaved
from deepspeed_ext.plan.simulate import simulate, simulate_with_host_copies
from deepspeed_ext.plan.text.json_flag import STANDARD_OUTPUT, write_json
from deepspeed_ext.plan.text.text_files import write_text
from deepspeed_ext.plan.timeline import Timeline

_TOLERANCE = 1e-9
"""Tolerance of a memory limit: shares of tokens add up to it with rounding."""


def show_simulated(options: argparse.Namespace) -> int:
    """Simulate what the options ask for. Returns the exit code.

    Raises:
        UserError: if the input is bad, or the schedule is above the memory limit.
    """
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
        lower(
            fixed(request.orders),
            request.shape,
            costs=None if copies is None else request.costs,
            device=Device(hardware_queues=options.hardware_queues),
            host_copies=copies,
        )
    except ScheduleDeadlock as deadlock:
        _show_deadlock(options, deadlock, request)
        return 1
    if not isfinite(timeline.makespan):
        raise PlanError("the times of the ops add up to more than a number can hold: give them in a larger unit")
    if options.memory_limit is not None:
        _check_memory(timeline, request, options.memory_limit)
    if options.write_schedule is not None:
        write_text(options.write_schedule, write_schedule(request.orders))
    write_drawings(options, [(request.schedule, timeline)], memory, request.schedule)
    if options.json is not None:
        write_json(options.json, json.dumps(figures(timeline, request, memory)))
    if options.json != STANDARD_OUTPUT:
        print(f"{render_text(timeline)}\n\n{summary(timeline, request, memory)}\ndeadlock free            yes")
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
        known |= request.shape.to_fields() | {"orders": order_texts(request.orders)}
    write_json(options.json, json.dumps(known))


def _check_memory(timeline: Timeline, request: Request, limit: float) -> None:
    peaks = activation(timeline, request.lengths)
    highest = max(peaks)
    if highest > limit * (1 + _TOLERANCE):
        remedy = "raise the limit" if request.schedule == OPTIMISED else f"raise it, or choose --schedule {OPTIMISED}"
        raise PlanError(
            f"schedule {request.schedule!r} holds {highest:.4g} activations of a micro-batch on rank "
            f"{peaks.index(highest)}, and --memory-limit is {limit:g}: {remedy}"
        )
