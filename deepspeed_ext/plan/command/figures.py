"""The figures of a simulated schedule, in words and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deepspeed_ext.plan.closed_forms import closed_form
from deepspeed_ext.plan.command.request import Request
from deepspeed_ext.plan.command.sizes import Memory
from deepspeed_ext.plan.critical_path import critical_path
from deepspeed_ext.plan.memory import peak, peak_activation
from deepspeed_ext.plan.ops import Op
from deepspeed_ext.plan.render.labels import with_unit
from deepspeed_ext.plan.timeline import Timeline, executed_order

_NAME_WIDTH = 25


def summary(timeline: Timeline, request: Request, memory: Memory) -> str:
    """Return the figures in lines of name and value.

    Args:
        memory: bytes of a token, where sizes are known.
    """
    bubble_ratio = f"{timeline.bubble_ratio:.2%}"
    known = closed_form(request.schedule, request.shape, request.costs)
    if known is not None:
        bubble_ratio += f" (closed form {known.formula}: {known.bubble_ratio:.2%})"
    by = by_what(timeline)
    rows = [
        ("makespan", with_unit(timeline.makespan, timeline.unit, digits=6)),
        ("bubble ratio", bubble_ratio),
        ("peak live token slices", f"{_joined(timeline.peak_live_token_slices)}  {by}"),
        ("peak activation", f"{_joined(activation(timeline, request.lengths))}  {by}, in micro-batches"),
    ]
    if timeline.reductions:
        exposed = timeline.duration - timeline.makespan
        after = (
            f"{with_unit(exposed, timeline.unit, digits=6)} after the last op"
            if exposed > 0
            else "before the last op ends"
        )
        rows.insert(1, ("gradients are reduced", after))
    if memory.token_bytes is not None:
        peaks = " ".join(f"{peak(curve) / 2**20:.4g}" for curve in memory.curves(timeline))
        rows.append(("peak memory", f"{peaks}  {by}, in MiB"))
        if timeline.host_copies:
            without = " ".join(f"{peak(curve) / 2**20:.4g}" for curve in memory.curves(without_host_copies(timeline)))
            on_host = " ".join(f"{peak(curve) / 2**20:.4g}" for curve in memory.host_curves(timeline))
            rows.append(("without copies to hosts", f"{without}  {by}, in MiB"))
            rows.append(("peak on the hosts", f"{on_host}  {by}, in MiB"))
    if request.lower_bound is not None:
        above = max(timeline.makespan / request.lower_bound - 1, 0.0) if request.lower_bound else 0.0  # rounding
        rows.insert(1, ("lower bound", f"{request.lower_bound:.6g} (the makespan is {above:.2%} above it)"))
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
    """Return the figures, and all that `Timeline.from_json` reads, so that `--timeline` shows it again.

    Args:
        memory: bytes of a token, where sizes are known.
    """
    bounds = {} if request.lower_bound is None else {"lower_bound": request.lower_bound}
    return {
        "schedule": request.schedule,
        "makespan": timeline.makespan,
        **({"duration": timeline.duration} if timeline.reductions else {}),
        **bounds,
        "bubble_ratio": timeline.bubble_ratio,
        "peak_live_token_slices": list(timeline.peak_live_token_slices),
        "peak_activation": activation(timeline, request.lengths),
        **memory_figures(timeline, memory),
        "deadlock_free": True,
        "token_slices": list(request.lengths),
        **({} if request.partition is None else {"stage_partition": list(request.partition.bounds)}),
        "critical_path": [str(op) for op in critical_path(timeline).ops],
        "orders": order_texts(executed_order(timeline)),
        **json.loads(timeline.to_json()),
    }


def memory_figures(timeline: Timeline, memory: Memory) -> dict[str, Any]:
    """Return peaks and curves of bytes by rank, where sizes are known.

    Args:
        memory: bytes of a token, where sizes are known.
    """
    if memory.token_bytes is None:
        return {}
    curves = memory.curves(timeline)
    found: dict[str, Any] = {"peak_memory_bytes": [peak(curve) for curve in curves], "memory_bytes": curves}
    if timeline.host_copies:
        on_host = memory.host_curves(timeline)
        found |= {"peak_host_memory_bytes": [peak(curve) for curve in on_host], "host_memory_bytes": on_host}
    return found


def without_host_copies(timeline: Timeline) -> Timeline:
    """The same timeline with everything on its device all the time."""
    return replace(timeline, host_copies=())


def activation(timeline: Timeline, lengths: Sequence[float]) -> list[float]:
    """Return the peak activation of each rank, in activations of one micro-batch on one rank.

    Args:
        lengths: tokens of each token slice; None for equal ones.
    """
    return list(peak_activation(timeline, lengths or None))


def order_texts(orders: Sequence[Sequence[Op]]) -> list[list[str]]:
    """Ops in their text form."""
    return [[str(op) for op in order] for order in orders]


def by_what(timeline: Timeline) -> str:
    """Who a row of figures is by."""
    return "(by rank)" if timeline.shape.num_model_chunks > 1 else "(by stage)"


def lines(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values, aligned."""
    return "\n".join(f"{name:<{_NAME_WIDTH}}{value}" for name, value in rows)


def _joined(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4g}" for value in values)
