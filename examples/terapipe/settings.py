"""TeraPipe's ten settings and its sweep of sequence lengths, predicted: the gain of token slices, and their lengths.

    python examples/terapipe/settings.py [--setting 5,8] [--curves] [--joint] [--json [FILE]]

Without token slices every micro-batch is a whole sequence, in gpipe order, as the authors ran it; with them
micro-batches are of one sequence too, and our solver finds the lengths in multiples of 8 tokens. --curves adds
token slices of equal length in the numbers that the paper shows. --joint also runs TeraPipe's joint program, which may
put several sequences into a micro-batch. Predictions use the data sheets of a V100 and the four figures in `hardware`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# A script has its own folder on the path, not the one that holds `examples`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.solve.cuts import CutGrid
from examples.terapipe.hardware import cost_model_of, strategy_of
from examples.terapipe.joint_program import TerapipeCut, TerapipeProblem
from examples.terapipe.published import EQUAL_TOKEN_SLICES, SETTINGS, SWEEP, Setting
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.rank.token_slices import TabulatedCosts, solve_cut
from megatron_terapipe.strategy import Strategy

GRANULARITY = 8
"""Tokens that lengths are multiples of, as in TeraPipe."""

SIZES = (1, 2, 4, 8)
"""Micro-batches that the joint program may choose among."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = _parser().parse_args(arguments)
    wanted = None if options.setting is None else options.setting.split(",")
    chosen = [one for one in (*SETTINGS, *SWEEP) if wanted is None or str(one.name) in wanted]
    if not chosen:
        known = ", ".join(str(one.name) for one in (*SETTINGS, *SWEEP))
        print(f"error: --setting {options.setting} is none of {known}", file=sys.stderr)
        return 2
    try:
        entries = [predicted(setting, curves=options.curves, joint=options.joint) for setting in chosen]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json is None:
        show(entries)
    elif options.json == "-":
        print(json.dumps(entries, indent=1))
    else:
        Path(options.json).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    return 0


def predicted(setting: Setting, *, curves: bool = False, joint: bool = False) -> dict[str, Any]:
    """Predict one setting; the JSON object of it.

    Args:
        curves: whether to add token slices of equal length, where the paper has them.
        joint: whether to add the result of TeraPipe's joint program.
    """
    cost_model, strategy = cost_model_of(setting), strategy_of(setting)
    solved = solve_cut(cost_model, strategy, granularity=GRANULARITY)
    without_s = cost_model.predict_time(strategy).iteration_time_s
    known = setting.published
    entry: dict[str, Any] = {
        "setting": setting.name,
        "model": setting.model,
        "seq_length": setting.seq_length,
        "without_s": without_s,
        "with_s": solved.iteration_time_s,
        "speedup": without_s / solved.iteration_time_s,
        "token_slices": list(solved.token_slices),
        "published": None
        if known is None
        else {
            "without_s": known.without_s,
            "with_s": known.with_s,
            "speedup": known.without_s / known.with_s,
            "token_slices": None if known.token_slices is None else list(known.token_slices),
        },
    }
    if known is not None and known.token_slices is not None:
        cut = replace(strategy, num_token_slices=len(known.token_slices), token_slices=known.token_slices)
        entry["published_token_slices_s"] = cost_model.predict_time(cut).iteration_time_s
    if curves and setting.name in EQUAL_TOKEN_SLICES:
        entry["equal_token_slices"] = [
            {
                "num_token_slices": count,
                "iteration_time_s": cost_model.predict_time(replace(strategy, num_token_slices=count)).iteration_time_s,
                "published_s": published_s,
            }
            for count, published_s in EQUAL_TOKEN_SLICES[int(setting.name)].items()
        ]
    if joint:
        per_pipeline = strategy.num_micro_batches
        sizes = [size for size in SIZES if per_pipeline % size == 0]
        found = solve_batch(cost_model, strategy, sizes=sizes, granularity=GRANULARITY)
        entry["joint"] = [
            {"micro_batch_size": size, "token_slices": list(cut.lengths)} for size, cut in found.micro_batches
        ]
    return entry


def solve_batch(
    cost_model: CostModel, strategy: Strategy, *, sizes: Sequence[int], equal_sizes: bool = False, granularity: int = 8
) -> TerapipeCut:
    """Run TeraPipe's joint program: micro-batches and token slices of one pipeline's batch, for gpipe.

    Args:
        granularity: lengths are multiples of this.
    """
    grid = CutGrid(cost_model.workload.seq_length, granularity, granularity)
    ranks = strategy.pipeline_parallel_size
    costs = {}
    for size in sizes:
        of_size = replace(strategy, micro_batch_size=size, global_batch_size=None)
        costs[size] = TabulatedCosts.of(cost_model, of_size, grid).busiest_and_others(ranks)
    batch_size = strategy.num_micro_batches * strategy.micro_batch_size
    return TerapipeProblem.of(costs, grid, batch_size, 2, ranks - 1).solve(equal_sizes=equal_sizes)


def show(entries: list[dict[str, Any]]) -> None:
    """Print tables."""
    import rich.box
    import rich.console
    import rich.table

    console = rich.console.Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = rich.console.Console(highlight=False, markup=False, width=150)
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("setting", "without s", "with s", "speed-up", "published", "speed-up", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("token slices")
    for entry in entries:
        known = entry["published"]
        theirs = ("", "", "")
        if known is not None:
            error = entry["speedup"] / known["speedup"] - 1
            theirs = (f"{known['without_s']:.3f} {known['with_s']:.3f}", f"{known['speedup']:.2f}", f"{error:+.1%}")
        ours = (f"{entry[name]:.3f}" for name in ("without_s", "with_s"))
        table.add_row(str(entry["setting"]), *ours, f"{entry['speedup']:.2f}", *theirs, in_short(entry["token_slices"]))
    console.print(table)
    for entry in entries:
        for row in entry.get("equal_token_slices", ()):
            time_s, published_s = row["iteration_time_s"], row["published_s"]
            print(
                f"setting {entry['setting']}, {row['num_token_slices']:3} equal token slices: {time_s:.3f} s, "
                f"published {published_s:.3f} ({time_s / published_s - 1:+.1%})"
            )
        if "joint" in entry:
            parts = [f"{one['micro_batch_size']} x ({in_short(one['token_slices'])})" for one in entry["joint"]]
            print(f"setting {entry['setting']}, joint program: {', '.join(dict.fromkeys(parts))}")


def in_short(lengths: list[int]) -> str:
    """Lengths, equal ones in a row as one: `120x4 64`."""
    runs: list[list[int]] = []
    for length in lengths:
        if runs and runs[-1][0] == length:
            runs[-1][1] += 1
        else:
            runs.append([length, 1])
    return " ".join(f"{length}x{count}" if count > 1 else str(length) for length, count in runs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--setting", metavar="N,N", help="settings to predict, such as 5,8,gpt3-13b-4096 (default: all)"
    )
    parser.add_argument("--curves", action="store_true", help="add token slices of equal length")
    parser.add_argument("--joint", action="store_true", help="add the result of TeraPipe's joint program")
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="print JSON, or write it into FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
