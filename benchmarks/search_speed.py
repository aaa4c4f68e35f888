"""Speed of the strategy search.

python -m benchmarks.search_speed [--only closed-form|search|amp]

Closed form: every strategy of a space that keeps the rules gets its memory and, if it may fit, its time and a bound;
`priced` counts those that keep the rules, `timed` those that also got a time. Search: from the question to the ranking,
token slices included. Seconds are those that one core computed for, so a busy machine does not count; the first run on
a machine also compiles kernels.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_terapipe.search.cost.pricing import Pricing
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.cluster_files import read_cluster
from megatron_terapipe.search.inputs.workload_files import read_workload
from megatron_terapipe.search.rank.grid_prices import price_space
from megatron_terapipe.search.rank.placement import node_orders
from megatron_terapipe.search.rank.search import search
from megatron_terapipe.search.space.choices import all_choices
from megatron_terapipe.search.space.legal_grids import SearchCounts
from megatron_terapipe.search.space.problem import SearchProblem

CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"


class Case(NamedTuple):
    """A model on a cluster."""

    model: str
    cluster: str
    global_batch_size: int
    precision: str = "bf16"

    @property
    def problem(self) -> SearchProblem:
        """As the search takes it."""
        return SearchProblem(
            workload=read_workload(self.model, {}),
            cluster=read_cluster(str(CLUSTERS / self.cluster)),
            global_batch_size=self.global_batch_size,
            precision=self.precision,
        )


CASES = (
    Case("gpt3-13b", "a100-64.json", 1536),
    Case("gpt3-175b", "a100-64.json", 64),
    Case("gpt3-175b", "a100-64.json", 1536),
    Case("gpt3-175b", "mixed-1024.yaml", 1024, "fp16"),
)

AMP_CONSTRAINTS = {
    "num_token_slices": (1,),
    "num_model_chunks": (1,),
    "schedule": ("1f1b",),
    "recompute": ("none",),
    "zero_stage": (0,),
    "sequence_parallel": (False,),
    "stage_partition": ("solved",),
}
"""The dimensions that AMP does not search (Li et al., NeurIPS 2022); dp, tp, pp, micro-batch and layers are left."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("closed-form", "search", "amp"), help="one of the tables")
    options = parser.parse_args(argv)
    tables = {"closed-form": closed_form, "search": searches, "amp": amp_like}
    for name, table in tables.items():
        if options.only in (None, name):
            table()


def closed_form() -> None:
    """Price spaces in closed form."""
    names = f"{'model':>10} {'cluster':>16} {'batch':>6}"
    print(f"{names} {'orders':>6} {'priced':>10} {'timed':>10} {'s':>6} {'priced/s':>10}")
    for case in CASES:
        problem = case.problem
        orders = node_orders(problem.cluster)
        best = float("inf")
        for _ in range(3):
            pricings = [_pricing(problem, order) for order in orders]
            counts = SearchCounts()
            start = time.process_time()
            timed = sum(len(grid.places) for grid in price_space(problem, all_choices(problem), pricings, counts))
            best = min(best, time.process_time() - start)
        priced = counts.priced * len(orders)
        print(
            f"{case.model:>10} {case.cluster:>16} {case.global_batch_size:>6} {len(orders):>6} {priced:>10,} "
            f"{timed:>10,} {best:>6.2f} {priced / best:>10,.0f}"
        )


def searches() -> None:
    """Search whole spaces."""
    print(f"{'model':>10} {'cluster':>16} {'batch':>6} {'space':>12} {'simulated':>9} {'s':>6} {'could save':>10}")
    for case in CASES:
        problem = case.problem
        start = time.process_time()
        result = search(problem, all_choices(problem), lambda order, problem=problem: _pricing(problem, order))
        seconds = time.process_time() - start
        print(
            f"{case.model:>10} {case.cluster:>16} {case.global_batch_size:>6} {result.counts.total:>12,} "
            f"{result.counts.simulated:>9} {seconds:>6.2f} {result.could_save:>10.1%}"
        )


def amp_like() -> None:
    """Search the dimensions of AMP's homogeneous experiment, a GPT-2 with batch 32 on 16 GPUs, and simulate all."""
    problem = Case("gpt2-medium", "a100-64.json", 32).problem
    problem = SearchProblem(
        workload=problem.workload,
        cluster=Cluster(nodes=problem.cluster.nodes[:2]),
        global_batch_size=32,
    )
    choices = all_choices(problem).constrained(AMP_CONSTRAINTS)
    start = time.process_time()
    result = search(problem, choices, lambda order: _pricing(problem, order), top=200, refine=False, effort=10)
    seconds = time.process_time() - start
    print(f"AMP's dimensions: {result.counts.simulated} strategies simulated and ranked in {seconds:.2f} s")


def _pricing(problem: SearchProblem, cluster: Cluster) -> Pricing:
    return Pricing(problem.workload, cluster, precision=problem.precision)


if __name__ == "__main__":
    main()
