"""Speed of the strategy search.

python -m benchmarks.search_speed [--only closed-form|search|amp|large] [--runs N]

Closed form: every strategy of a space that keeps the rules gets its memory and, if it may fit, its time and a bound;
`priced` counts those that keep the rules, `timed` those that also got a time. Search: from the question to the ranking,
token slices included. Seconds are those that one core computed for, so a busy machine does not count; the first run on
a machine also compiles kernels. Large: the whole command `rank` in a process of its own, for 1,024 to 800,000 devices,
with its peak memory, the least of some runs.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.measuring.command import Parser
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.cluster_files import read_cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.workload_files import read_workload
from megatron_terapipe.search.rank.grid_prices import price_space
from megatron_terapipe.search.rank.node_orders import node_orders
from megatron_terapipe.search.rank.rules import SearchCounts
from megatron_terapipe.search.rank.search import SearchResult, search
from megatron_terapipe.search.rank.space import SearchProblem, all_choices

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


class LargeCase(NamedTuple):
    """A model on very many H100, eight on a node."""

    model: str
    seq_length: int
    num_devices: int
    global_batch_size: int
    flags: tuple[str, ...] = ()


LARGE_CASES = (
    LargeCase("gpt3-175b", 2048, 1024, 1024),
    LargeCase("llama3-405b", 8192, 16_384, 2048),
    LargeCase("llama3-8b", 8192, 16_384, 2048),
    LargeCase("llama3-8b", 8192, 16_384, 16_384),
    LargeCase("gpt3-1.3b", 2048, 16_384, 2048),
    LargeCase("gpt3-1.3b", 2048, 16_384, 16_384),
    LargeCase("gpt3-175b", 2048, 16_384, 2048),
    LargeCase("llama3-8b", 8192, 100_000, 100_000),
    LargeCase("llama3-8b", 8192, 100_000, 100_000, ("--tensor-parallel-size", "8", "--schedule", "1f1b")),
    LargeCase("llama3-8b", 8192, 800_000, 800_000, ("--tensor-parallel-size", "8", "--schedule", "1f1b")),
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
    parser = Parser(description=__doc__)
    parser.add_argument("--only", choices=("closed-form", "search", "amp", "large"), help="one of the tables")
    parser.add_argument("--runs", type=int, default=3, help="runs of each large case, of which the least counts")
    options = parser.parse_args(argv)
    tables = {"closed-form": closed_form, "search": searches, "amp": amp_like, "large": lambda: large(options.runs)}
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
        result, seconds = searched(case)
        print(
            f"{case.model:>10} {case.cluster:>16} {case.global_batch_size:>6} {result.counts.total:>12,} "
            f"{result.counts.simulated:>9} {seconds:>6.2f} {result.could_save:>10.1%}"
        )


def searched(case: Case) -> tuple[SearchResult, float]:
    """Return the result of a search of the whole space, and its CPU seconds."""
    problem = case.problem
    start = time.process_time()
    result = search(problem, all_choices(problem), lambda order: _pricing(problem, order))
    return result, time.process_time() - start


def searched_as_amp() -> tuple[SearchResult, float]:
    """Return the result in the dimensions of AMP's homogeneous experiment, and its CPU seconds.

    That is a GPT-2 with batch 32 on 16 GPUs; all strategies are simulated.
    """
    problem = Case("gpt2-medium", "a100-64.json", 32).problem
    problem = SearchProblem(
        workload=problem.workload,
        cluster=Cluster(nodes=problem.cluster.nodes[:2]),
        global_batch_size=32,
    )
    choices = all_choices(problem).constrained(AMP_CONSTRAINTS)
    start = time.process_time()
    result = search(problem, choices, lambda order: _pricing(problem, order), top=200, refine=False, effort=10)
    return result, time.process_time() - start


def amp_like() -> None:
    """Search as AMP does."""
    result, seconds = searched_as_amp()
    print(f"AMP's dimensions: {result.counts.simulated} strategies simulated and ranked in {seconds:.2f} s")


def large(runs: int) -> None:
    """Run whole commands on large clusters."""
    print(f"{'model':>11} {'devices':>8} {'batch':>7} {'CPU s':>6} {'MB':>5}  answer")
    with tempfile.TemporaryDirectory() as folder:
        for case in LARGE_CASES:
            cluster = Path(folder, "cluster.json")
            node = {"name": "node", "count": case.num_devices // 8, "machine": "dgx-h100"}
            cluster.write_text(json.dumps({"nodes": [node]}), encoding="utf-8")
            words = [case.model, str(cluster), "--seq-length", case.seq_length]
            words += ["--global-batch-size", case.global_batch_size, *case.flags]
            done = [_command(list(map(str, words)), Path(folder)) for _ in range(runs)]
            seconds, megabytes = min(each[0] for each in done), min(each[1] for each in done)
            print(
                f"{case.model:>11} {case.num_devices:>8,} {case.global_batch_size:>7,} {seconds:>6.1f} "
                f"{megabytes:>5.0f}  {done[0][2]} {' '.join(case.flags)}",
                flush=True,
            )


def _command(words: Sequence[str], folder: Path) -> tuple[float, float, str]:
    """Run `rank`; return its CPU seconds, its peak memory in MB, and its answer."""
    command = [sys.executable, "-m", "megatron_terapipe.search", "rank", *words, "--no-progress"]
    output = folder / "output.txt"
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        _, _, used = os.wait4(process.pid, 0)
    lines = output.read_text(encoding="utf-8").splitlines()
    said = [line for line in lines if " a step, " in line or "error:" in line]
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, said[0] if said else "no answer"


def _pricing(problem: SearchProblem, cluster: Cluster) -> Pricing:
    return Pricing(problem.workload, cluster, precision=problem.precision)


if __name__ == "__main__":
    main()
