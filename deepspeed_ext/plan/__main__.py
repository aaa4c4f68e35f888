"""Command `python -m deepspeed_ext.plan`: simulate a schedule, say how good it is, draw it."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import PlanError, ScheduleDeadlock, UserError
from deepspeed_ext.plan.lowering import lower
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.render import render_chrome_trace, render_svg, render_text
from deepspeed_ext.plan.schedules import SCHEDULES, schedule_named, stage_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import Timeline, executed_order

_DESCRIPTION = """\
Simulate a pipeline schedule with token slices, print its timeline, and say how much of it is idle.

Every stage starts an op as soon as it is free and the op's inputs have arrived. F0.1 is the forward of token slice 1
of micro-batch 0, B its backward, a dot idle time."""

_EPILOG = """\
costs.json
  {
    "forward":         [[1.0, 1.2], [1.0, 1.2]],    time of a forward: a row per stage, a time per token slice
    "backward":        [[2.0, 2.4], [2.0, 2.4]],    time of a backward
    "weight_gradient": [[0.0, 0.0], [0.0, 0.0]],    optional: time of weight gradients, where backward leaves them out
    "transfer":        0.1                          optional: time of a transfer between neighbouring stages
  }
  Times are in one unit of your choice. Without --costs every op takes 1 and transfers take 0.

examples
  python -m deepspeed_ext.plan --schedule 1f1b --stages 4 --micro-batches 4 --token-slices 4
  python -m deepspeed_ext.plan --schedule gpipe --stages 2 --micro-batches 1 --token-slices 2 --costs costs.json --json
  python -m deepspeed_ext.plan --timeline measured.json --svg measured.svg --trace measured.trace.json

exit code: 0, or 1 if the schedule deadlocks, or 2 for bad input."""


class _Parser(argparse.ArgumentParser):
    """Reports bad input as every command of ours does."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        options = _parser().parse_args(argv)
        if options.timeline is not None:
            return _show_measured(options)
        return _show_simulated(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m deepspeed_ext.plan",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what to simulate")
    what.add_argument("--schedule", metavar="NAME", help=f"one of {', '.join(SCHEDULES)}")
    what.add_argument("--stages", type=int, metavar="P", help="pipeline stages")
    what.add_argument("--micro-batches", type=int, metavar="M", help="micro-batches of an optimizer step")
    what.add_argument("--token-slices", type=int, metavar="S", help="token slices of a micro-batch (default: 1)")
    what.add_argument("--costs", type=Path, metavar="FILE", help="times of ops and transfers, in the form below")
    what.add_argument(
        "--timeline", type=Path, metavar="FILE", help="show this timeline, measured or written by --json, instead"
    )
    out = parser.add_argument_group("what to write")
    out.add_argument("--json", action="store_true", help="print the figures, the op orders and the timeline as JSON")
    out.add_argument("--svg", type=Path, metavar="FILE", help="write a drawing")
    out.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace, which Perfetto opens")
    return parser


def _show_simulated(options: argparse.Namespace) -> int:
    for name in ("schedule", "stages", "micro_batches"):
        if getattr(options, name) is None:
            raise UserError(f"--{name.replace('_', '-')} is missing: give it, or a --timeline to show")
    schedule = schedule_named(options.schedule)
    num_token_slices = 1 if options.token_slices is None else options.token_slices
    shape = PipelineShape(options.stages, options.micro_batches, num_token_slices)
    costs = OpCosts.uniform(shape) if options.costs is None else OpCosts.from_json(_read(options.costs), shape)
    orders = stage_orders(schedule, shape)
    try:
        timeline = simulate(orders, shape, costs)
        lower(schedule, shape)  # the order may be sound, and its transfers still lock
    except ScheduleDeadlock as deadlock:
        if options.json:
            figures = {"schedule": options.schedule, **_shape_fields(shape), "deadlock_free": False}
            print(json.dumps(figures | {"reason": str(deadlock), "orders": _order_texts(orders)}))
        else:
            print(f"deadlock free            no: {deadlock}")
        return 1
    _write_drawings(options, timeline, options.schedule)
    if options.json:
        print(_json(timeline, options.schedule))
    else:
        bound = _closed_form_bubble_ratio(shape) if _is_uniform(costs) else None
        print(f"{render_text(timeline)}\n\n{_summary(timeline, bound)}\ndeadlock free            yes")
    return 0


def _show_measured(options: argparse.Namespace) -> int:
    for name in ("schedule", "stages", "micro_batches", "token_slices", "costs"):
        if getattr(options, name) is not None:
            raise UserError(f"--timeline already says what ran, so --{name.replace('_', '-')} has no use: drop one")
    try:
        timeline = Timeline.from_json(_read(options.timeline))
    except PlanError as error:
        raise PlanError(f"{options.timeline}: {error}") from None
    _write_drawings(options, timeline, options.timeline.stem)
    print(_json(timeline, None) if options.json else f"{render_text(timeline)}\n\n{_summary(timeline, None)}")
    return 0


def _summary(timeline: Timeline, closed_form: float | None) -> str:
    bubble_ratio = f"{timeline.bubble_ratio:.2%}"
    if closed_form is not None:
        bubble_ratio += f" (closed form (P-1)/(MS+P-1): {closed_form:.2%})"
    return "\n".join(
        (
            f"makespan                 {timeline.makespan:.6g}{timeline.unit and ' ' + timeline.unit}",
            f"bubble ratio             {bubble_ratio}",
            f"peak live token slices   {' '.join(map(str, timeline.peak_live_token_slices))}  (by stage)",
        )
    )


def _is_uniform(costs: OpCosts) -> bool:
    tables = (costs.forward, costs.backward)
    return costs.transfer == 0 and all(len({time for row in table for time in row}) == 1 for table in tables)


def _closed_form_bubble_ratio(shape: PipelineShape) -> float:
    """Bubble ratio of `gpipe` and `1f1b` when all ops of a kind cost the same and transfers nothing."""
    warmup = shape.num_stages - 1
    return warmup / (shape.num_micro_batches * shape.num_token_slices + warmup)


def _json(timeline: Timeline, schedule: str | None) -> str:
    """The figures, and all that `Timeline.from_json` reads, so that `--timeline` shows it again."""
    figures: dict[str, Any] = {
        "schedule": schedule,
        "makespan": timeline.makespan,
        "bubble_ratio": timeline.bubble_ratio,
        "peak_live_token_slices": list(timeline.peak_live_token_slices),
        "deadlock_free": True,
        "orders": _order_texts(executed_order(timeline)),
    }
    return json.dumps(figures | json.loads(timeline.to_json()))


def _shape_fields(shape: PipelineShape) -> dict[str, int]:
    return {name: getattr(shape, name) for name in PipelineShape.__slots__}


def _order_texts(orders: Sequence[Sequence[Op]]) -> list[list[str]]:
    return [[str(op) for op in order] for order in orders]


def _write_drawings(options: argparse.Namespace, timeline: Timeline, title: str) -> None:
    if options.svg is not None:
        _write(options.svg, render_svg(timeline, title))
    if options.trace is not None:
        _write(options.trace, render_chrome_trace(timeline))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {_reason(error)}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


if __name__ == "__main__":
    sys.exit(main())
