"""AMP's three experiments, searched or predicted from AMP's own profiles.

    python examples/amp/run.py EXPERIMENT --amp-repo DIR [--strategies S.jsonl] [--json OUT]

EXPERIMENT is homogeneous, het_cluster or het_model. DIR is a checkout of github.com/DachengLi1/AMP, of which only
`src/known_cost/*.npy` is read. Without --strategies all of AMP's space is searched, each strategy with the stage
partition that our solver finds. With it every line is predicted, in the order of the file. A stage partition counts
AMP's own 30 or 56 pipeline layers; a line without one gets the one that AMP chooses.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

# A script has its own folder on the path, not the one that holds `examples`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import schedule_named
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from examples.amp.experiments import EXPERIMENTS, Experiment
from examples.amp.search import Priced, price, ranked, search, with_partition_of_amp
from examples.amp.strategies import read_strategies


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        experiment = EXPERIMENTS[options.experiment]
        started = time.perf_counter()
        load_player()
        ready = time.perf_counter()
        priced = _priced(experiment, options)
        seconds = ready - started, time.perf_counter() - ready
        if options.json:
            options.json.write_text(json.dumps([each.to_json() for each in priced], indent=1) + "\n")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _print(experiment, priced, seconds, options.top)
    return 0


def load_player() -> None:
    """Numba loads the simulator's compiled code when it first plays: no part of any search."""
    shape = PipelineShape(2, 2)
    CompiledOrders.of_schedule(schedule_named("1f1b"), shape).simulate(OpCosts.uniform(shape))


def _priced(experiment: Experiment, options: argparse.Namespace) -> list[Priced]:
    pricing = experiment.pricing(options.amp_repo)
    if options.strategies is None:
        return search(experiment, pricing)
    lines = read_strategies(options.strategies, experiment.global_batch_size)
    priced = [
        replace(price(pricing, strategy if given else with_partition_of_amp(pricing, strategy)), index=index)
        for index, (strategy, given) in enumerate(lines)
    ]
    return sorted(ranked(priced), key=lambda each: each.index)


def _print(experiment: Experiment, priced: list[Priced], seconds: tuple[float, float], top: int) -> None:
    print(f"{experiment.name}: {len(priced)} strategies in {seconds[1]:.2f} s, after {seconds[0]:.2f} s to start")
    print(f"{'rank':>4} {'mbs':>4} {'tp':>3} {'dp':>3} {'pp':>3} {'seconds':>8} {'bubble':>6} {'GiB':>6}  stages")
    for each in sorted(priced, key=lambda each: each.rank)[:top]:
        strategy = each.strategy
        sizes = (
            f"{strategy.micro_batch_size:>4} {strategy.tensor_parallel_size:>3} {strategy.data_parallel_size:>3} "
            f"{strategy.pipeline_parallel_size:>3}"
        )
        if each.prediction is None:
            print(f"{each.rank:>4} {sizes} {each.reason}")
            continue
        partition = strategy.stage_partition
        stages = partition if isinstance(partition, str) else ",".join(map(str, partition))
        print(
            f"{each.rank:>4} {sizes} {each.prediction.iteration_time_s:8.3f} {each.prediction.bubble_ratio:6.2f} "
            f"{each.prediction.peak_memory_bytes / 2**30:6.1f}  {stages}" + (f"  {each.reason}" if each.reason else "")
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="examples/amp/run.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", metavar="EXPERIMENT", choices=sorted(EXPERIMENTS), help=", ".join(EXPERIMENTS))
    parser.add_argument("--amp-repo", type=Path, required=True, metavar="DIR", help="checkout of AMP's repository")
    parser.add_argument("--strategies", type=Path, metavar="S.jsonl", help="predict these; without: search")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all predictions there")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="rows of the table (10)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
