"""Llama-3 with long sequences on H100: our best strategy beside ZeRO-3 with Ulysses, all predicted.

python -m benchmarks.long_sequence_table [--model NAME] [--rows FILE.jsonl] [--document FILE.md]

For each model, length and number of devices the search ranks strategies for one sequence a step, or for the smallest
power of two of them with which a strategy fits. The rival gets the same sequences. Where it cannot use all devices with
so few, a second line has as many as it needs. Rows are appended to a file, and an interrupted run goes on after the
last. The tables are printed, and written into a document between its markers.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, product
from pathlib import Path

from megatron_terapipe.search.answer.advice import RivalAdvice, compare_rival, why_it_does_not_fit
from megatron_terapipe.search.answer.figures import GIGABYTE, bytes_text, flops_utilization, strategy_text, time_text
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.strategy_batch import StrategyBatch
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.search.price.workload_files import read_workload
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.rivals import best_rival
from megatron_terapipe.search.rank.search import SearchResult, search
from megatron_terapipe.search.rank.space import MEMORY_HEADROOM, SearchProblem, all_choices
from megatron_terapipe.strategy import Strategy

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks" / "long-sequences_202611.md"
MODELS = ("llama3-8b", "llama3-70b")
LENGTHS = tuple(1024 * thousands for thousands in (128, 512, 1024, 2048))
DEVICES = (8, 32, 64, 256)
USUAL = ("dp 1", "micro-batch 1", "ZeRO 1")
"""Parts of a strategy that the table leaves out."""
MOST_DOUBLINGS = 3
"""How often the sequences of a step are doubled until something fits."""


@dataclass(frozen=True, kw_only=True)
class Ours:
    """Our best strategy."""

    strategy: str
    simulated_s: float
    """Seconds of an iteration on its schedule."""
    closed_form_s: float
    """The same in closed form."""
    device_bytes: float
    host_bytes: float
    """Of the fullest host, for copies; 0 = none."""
    mfu_causal: float
    """Without the scores that causal attention never computes."""
    could_save: float
    """Share of the time that a strategy which was not simulated could save at most."""


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """The rival."""

    num_ranks: int
    ranks_of_sequence: int
    """Those that share a sequence."""
    on_host: tuple[str, ...]
    time_s: float
    """Seconds of an iteration."""
    device_bytes: float
    host_bytes: float
    mfu_causal: float
    """Of the devices in use."""
    why_not: str | None
    """Why it does not fit; None = it fits."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a table: one model, length and cluster."""

    model: str
    seq_length: int
    num_devices: int
    least_sequences: int
    global_batch_size: int
    ours: Ours | None
    theirs: Theirs | None

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What it is about."""
        return self.model, self.seq_length, self.num_devices, self.least_sequences

    @property
    def sequences_for_all_devices(self) -> int:
        """Sequences of a step with which the rival uses all devices."""
        if self.theirs is None:
            return self.global_batch_size
        return self.global_batch_size * self.num_devices // self.theirs.num_ranks

    @classmethod
    def read(cls, line: str) -> "Row":
        """Return the row of a line of JSON."""
        values = json.loads(line)
        for name, kind in (("ours", Ours), ("theirs", Theirs)):
            values[name] = None if values[name] is None else kind(**values[name])
        return cls(**values)


def cluster_of(num_devices: int) -> Cluster:
    """Return so many H100 with 80 GB, eight on a node."""
    return parse_cluster({"nodes": [{"machine": "dgx-h100", "count": num_devices // 8}]}, "table")[0]


def found(workload: Workload, cluster: Cluster, global_batch_size: int) -> tuple[Pricing, SearchResult]:
    """Return what priced the strategies, and the best of them."""
    problem = SearchProblem(workload=workload, cluster=cluster, global_batch_size=global_batch_size)
    pricing = Pricing(workload, cluster)
    return pricing, search(problem, all_choices(problem), lambda nodes: Pricing(workload, nodes), top=3)


def row_of(model: str, seq_length: int, num_devices: int, least_sequences: int) -> Row:
    """Return one line of a table; it takes some seconds.

    Args:
        least_sequences: sequences of a step, which are doubled until something fits.
    """
    workload, cluster = read_workload(model, {"seq_length": seq_length}), cluster_of(num_devices)
    global_batch_size, winner, could_save = least_sequences, None, 0.0
    for sequences in (least_sequences * 2**doublings for doublings in range(MOST_DOUBLINGS + 1)):
        pricing, result = found(workload, cluster, sequences)
        winner, could_save = next(iter(result.entries), None), result.could_save
        if winner is not None:
            global_batch_size = sequences
            break
    rival = best_rival(pricing, global_batch_size, headroom=MEMORY_HEADROOM)
    theirs = None if rival is None else _theirs(compare_rival(rival, winner, workload, cluster))
    return Row(
        model=model,
        seq_length=seq_length,
        num_devices=num_devices,
        least_sequences=least_sequences,
        global_batch_size=global_batch_size,
        ours=None if winner is None else _ours(winner, pricing, could_save),
        theirs=theirs,
    )


def _ours(winner: Ranked, pricing: Pricing, could_save: float) -> Ours:
    assert winner.prediction is not None
    batch = StrategyBatch.of([pricing.cost_model], [winner.strategy])
    simulated_s = winner.prediction.iteration_time_s
    return Ours(
        strategy=strategy_text(winner.strategy),
        simulated_s=simulated_s,
        closed_form_s=float(batch.times(pricing.cost_model.efficiency)[0]),
        device_bytes=winner.prediction.peak_memory_bytes,
        host_bytes=host_bytes(winner.strategy, pricing),
        mfu_causal=flops_utilization(
            winner.strategy, pricing.workload, pricing.cluster, simulated_s, "bf16", causal=True
        ),
        could_save=could_save,
    )


def host_bytes(strategy: Strategy, pricing: Pricing) -> float:
    """Return the bytes that wait on the fullest host at most, each rank at the moment when it has the most there."""
    plan = pricing.host_copies(strategy)
    if plan is None:
        return 0.0
    of_rank = []
    for copies in plan.ranks:
        changes = sorted(
            (place, size) for copy in copies for place, size in ((copy.offload, copy.size), (copy.reader, -copy.size))
        )
        of_rank.append(max(accumulate((size for _, size in changes), initial=0.0)))
    of_host: Counter[int] = Counter()
    for rank, node in enumerate(pricing.cluster.node_of_device):
        of_host[node] += of_rank[rank * strategy.pipeline_parallel_size // strategy.world_size]
    return max(of_host.values())


def _theirs(advice: RivalAdvice) -> Theirs:
    rival, settings = advice.rival, advice.rival.settings
    assert advice.mfu_causal is not None
    return Theirs(
        num_ranks=settings.num_ranks,
        ranks_of_sequence=settings.sequence_parallel_size,
        on_host=settings.on_host,
        time_s=rival.time.total_s,
        device_bytes=rival.memory.device,
        host_bytes=rival.memory.host,
        mfu_causal=advice.mfu_causal,
        why_not=why_it_does_not_fit(rival),
    )


def rows_of(models: Sequence[str], path: Path | None) -> Iterator[Row]:
    """Yield all lines; those that a file has are read, the others appended to it.

    Args:
        path: of the file; None = nothing is kept.
    """
    known = {}
    if path is not None and path.exists():
        known = {row.key: row for row in map(Row.read, path.read_text(encoding="utf-8").splitlines())}

    def row(model: str, seq_length: int, num_devices: int, least_sequences: int) -> Row:
        """Return a line that is known, or find it and keep it."""
        key = model, seq_length, num_devices, least_sequences
        if key not in known:
            known[key] = row_of(*key)
            if path is not None:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(known[key])) + "\n")
        print(f"{key}: {cells(known[key])}", file=sys.stderr)
        return known[key]

    for model, seq_length, num_devices in product(models, LENGTHS, DEVICES):
        first = row(model, seq_length, num_devices, 1)
        yield first
        if first.sequences_for_all_devices > first.global_batch_size:
            yield row(model, seq_length, num_devices, first.sequences_for_all_devices)


HEAD = (
    "tokens",
    "H100",
    "batch",
    "ours",
    "time",
    "closed form",
    "device",
    "host",
    "causal MFU",
    "ZeRO-3 with Ulysses: ranks",
    "time",
    "device",
    "host",
    "causal MFU",
    "its time / ours",
)


def cells(row: Row) -> list[str]:
    """Return the cells of a line, as many as the head has."""
    return [
        f"{row.seq_length // 1024} K",
        str(row.num_devices),
        str(row.global_batch_size),
        *_of_ours(row),
        *_of_theirs(row),
    ]


def _of_ours(row: Row) -> list[str]:
    if row.ours is None:
        return ["nothing fits", *[""] * 5]
    ours = row.ours
    return [
        " · ".join(part for part in ours.strategy.split(" · ") if part not in USUAL),
        time_text(ours.simulated_s),
        time_text(ours.closed_form_s),
        f"{ours.device_bytes / GIGABYTE:.0f} GB",
        bytes_text(ours.host_bytes) if ours.host_bytes else "-",
        f"{ours.mfu_causal:.0%}",
    ]


def _of_theirs(row: Row) -> list[str]:
    if row.theirs is None:
        return [""] * 6
    theirs = row.theirs
    ranks = str(theirs.num_ranks)
    if theirs.ranks_of_sequence < theirs.num_ranks:
        ranks += f", {theirs.ranks_of_sequence} a sequence"
    memory = [f"{theirs.device_bytes / GIGABYTE:.0f} GB", bytes_text(theirs.host_bytes) if theirs.on_host else "-"]
    if theirs.why_not is not None:
        return [f"{ranks}: does not fit", "", *memory, "", ""]
    ratio = "" if row.ours is None else f"{theirs.time_s / row.ours.simulated_s:.2f}"
    return [ranks, time_text(theirs.time_s), *memory, f"{theirs.mfu_causal:.0%}", ratio]


def table(rows: Sequence[Row]) -> str:
    """Return lines of one model as a table in Markdown."""
    lines = [HEAD, ["---"] * len(HEAD), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def written_into(text: str, model: str, new: str) -> str:
    """Return a document with another table between the markers of a model.

    Raises:
        SystemExit: if the document has no such markers.
    """
    begin, end = f"<!-- begin {model} -->", f"<!-- end {model} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"the document has no lines {begin} and {end}: write them where the table belongs")
    between = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    return between.sub(lambda _: f"{begin}\n{new}\n{end}", text)


def main() -> None:
    """Print the tables, and write them into the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="only this one (default: all)")
    parser.add_argument("--rows", type=Path, metavar="FILE.jsonl", help="file of rows to go on with")
    parser.add_argument(
        "--document", type=Path, default=DOCUMENT, metavar="FILE.md", help="where the tables are written"
    )
    options = parser.parse_args()
    rows = list(rows_of((options.model,) if options.model else MODELS, options.rows))
    text = options.document.read_text(encoding="utf-8") if options.document.exists() else ""
    for model in dict.fromkeys(row.model for row in rows):
        made = table([row for row in rows if row.model == model])
        print(f"\n{model}\n\n{made}")
        if text:
            text = written_into(text, model, made)
    if text:
        options.document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
