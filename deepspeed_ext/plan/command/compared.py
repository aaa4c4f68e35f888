"""Shows measured steps and their simulation, figure by figure."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, astuple
from statistics import median
from typing import Any

from deepspeed_ext.plan.command.request import Memory, memory_of
from deepspeed_ext.plan.command.simulated import (
    NAME_WIDTH,
    lines,
    row_unit,
    timeline_figures,
    write_files,
)
from deepspeed_ext.plan.draw import render_text
from deepspeed_ext.plan.draw.elements import KIND_NAMES, rank_name, with_unit
from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.measured import Comparison, StepRecord, read_comparison

_ONLY_SIMULATED = (
    *("schedule", "stages", "model_chunks", "placement", "micro_batches", "token_slices", "costs"),
    *("attention_share", "head_share", "solve_slices", "memory_limit", "seq_length", "min_token_slice", "effort"),
    *("offload", "host_bandwidth", "host_bytes"),
)
_SHOWN_DIFFERENCES = 5
_LINES_OF_DRAWING = 3
_COLUMN = 13


def show_measured(options: argparse.Namespace) -> int:
    """Show the steps of `--timeline`. Returns the exit code."""
    for name in _ONLY_SIMULATED:
        if getattr(options, name) not in (None, False):
            raise UserError(
                f"--{name.replace('_', '-')} contradicts --timeline, which shows a step that has run: drop one"
            )
    title, steps, comparison = read_comparison(options.timeline)
    memory = memory_of(options, comparison.shape, steps[0].token_slices)
    panels = [(f"{title}: measured", comparison.measured), ("simulated", comparison.simulated)]
    if write_files(options, panels, memory, title, lambda: _figures(comparison, steps, memory)):
        print(_report(comparison))
    return 0


def _report(comparison: Comparison) -> str:
    parts = [
        f"{name}\n{render_text(timeline, max_bands=_LINES_OF_DRAWING)}"
        for name, timeline in (("measured", comparison.measured), ("simulated", comparison.simulated))
    ]
    return "\n\n".join([*parts, _figures_beside(comparison), _time_by_rank(comparison), _differences(comparison)])


def _figures_beside(comparison: Comparison) -> str:
    measured, simulated = comparison.measured, comparison.simulated

    def time(value: float) -> str:
        return _time(value, measured.unit)

    rows = [_row("", "measured", "simulated", "difference")]
    rows.append(_row("makespan", *_beside(time, measured.makespan, simulated.makespan)))
    points = 100 * (simulated.bubble_ratio - measured.bubble_ratio)
    ratios = (f"{timeline.bubble_ratio:.2%}" for timeline in (measured, simulated))
    rows.append(_row("bubble ratio", *ratios, f"{points:+.2f} points"))
    for kind, (mean, expected) in comparison.mean_times().items():
        rows.append(_row(f"mean {KIND_NAMES[kind]}", *_beside(time, mean, expected)))
    peaks = " ".join(map(str, measured.peak_live_token_slices))
    own, with_gaps = comparison.simulated_with_own_times.makespan, comparison.simulated_with_gaps.makespan

    def of_measured(makespan: float) -> str:
        return f"{time(makespan)}, {makespan / measured.makespan if measured.makespan else 1.0:.4f} of the measured"

    rows += [
        lines(
            [
                ("eta", f"{comparison.efficiency:.4f} (simulated / measured makespan)"),
                ("estimated transfer", f"{time(comparison.transfer)} from the end of an op until a waiting one starts"),
                ("estimated overhead", f"{time(comparison.host_overhead)} of the host between ops that need not wait"),
                ("simulated with both", of_measured(with_gaps)),
                ("if ops take their own", f"{of_measured(own)}; the rest of it are transfers and the host"),
                ("peak live token slices", f"{peaks}  {row_unit(measured)}"),
                *_steps(comparison),
            ]
        )
    ]
    return "\n".join(rows)


def _steps(comparison: Comparison) -> list[tuple[str, str]]:
    if len(comparison.steps) == 1:
        return []
    makespans = sorted(step.makespan for step in comparison.steps)
    first, last = (_time(makespan, comparison.measured.unit) for makespan in (makespans[0], makespans[-1]))
    each = comparison.step_efficiencies
    return [
        ("measured steps", f"{len(makespans)}, of {first} to {last}; the median one is shown"),
        ("eta by step", f"{median(each):.4f} ({min(each):.4f} to {max(each):.4f}), with mean op times of each step"),
    ]


def _time_by_rank(comparison: Comparison) -> str:
    """How each rank spent the time of the measured step."""
    unit = comparison.measured.unit
    rows = [_row("measured time by rank", "in ops", "waits for ops", "transfers", "overhead")]
    for rank, spent in enumerate(comparison.rank_times):
        rows.append(_row(f"  {rank_name(comparison.shape, rank)}", *(_time(each, unit) for each in astuple(spent))))
    return "\n".join(rows)


def _differences(comparison: Comparison) -> str:
    unit = comparison.measured.unit
    largest = [each for each in comparison.differences() if each.size][:_SHOWN_DIFFERENCES]
    if not largest:
        return "largest differences      none"
    rows = [_row("largest differences", "op took", "began late")]
    rows += [_row(f"  {each.op}", _signed(each.duration, unit), _signed(each.late, unit)) for each in largest]
    return "\n".join(rows)


def _figures(comparison: Comparison, steps: list[StepRecord], memory: Memory) -> dict[str, Any]:
    """The figures, and all that `Timeline.from_json` reads of the measured step that is shown."""
    measured, simulated, costs = comparison.measured, comparison.simulated, comparison.costs
    shown = next(step for step in steps if step.timeline is measured)
    return {
        "schedule": shown.schedule,
        "iteration": shown.iteration,
        "makespan": measured.makespan,
        "eta": comparison.efficiency,
        "simulated": {
            "makespan": simulated.makespan,
            "bubble_ratio": simulated.bubble_ratio,
            "makespan_with_transfer_and_overhead": comparison.simulated_with_gaps.makespan,
            "makespan_with_own_op_times": comparison.simulated_with_own_times.makespan,
            "spans": json.loads(simulated.to_json())["spans"],
        },
        "costs": {
            "forward": costs.forward,
            "backward": costs.backward,
            **({} if costs.weight_gradient is None else {"weight_gradient": costs.weight_gradient}),
            "transfer": comparison.transfer,
        },
        "host_overhead": comparison.host_overhead,
        "steps": [
            {"iteration": one.iteration, "makespan": one.timeline.makespan, "bubble_ratio": one.timeline.bubble_ratio}
            for one in steps
        ],
        "mean_times": {
            KIND_NAMES[kind]: {"measured": mean, "simulated": expected}
            for kind, (mean, expected) in comparison.mean_times().items()
        },
        "time_by_rank": [asdict(spent) for spent in comparison.rank_times],
        "largest_differences": [
            {"op": str(each.op), "duration": each.duration, "late": each.late}
            for each in comparison.differences()[:_SHOWN_DIFFERENCES]
        ],
        **timeline_figures(measured, shown.token_slices, memory),
    }


def _beside(shown: Callable[[float], str], measured: float, simulated: float) -> tuple[str, str, str]:
    difference = f"{simulated / measured - 1:+.2%}" if measured else ""
    return shown(measured), shown(simulated), difference


def _row(name: str, *cells: str) -> str:
    return (f"{name:<{NAME_WIDTH}}" + "".join(f"{cell:<{_COLUMN + 2}}" for cell in cells)).rstrip()


def _time(value: float, unit: str) -> str:
    """A time; parts of a second as milliseconds, since ops are short."""
    return f"{value * 1000:.4g} ms" if unit == "s" and abs(value) < 1 else with_unit(value, unit, digits=6)


def _signed(value: float, unit: str) -> str:
    return ("+" if value >= 0 else "") + _time(value, unit)
