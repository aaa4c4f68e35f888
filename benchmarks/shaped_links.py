"""Whether the search's choices are as much faster over slow links as it says: two hosts, one core each, run for real.

    python -m benchmarks.shaped_links --output runs/shaped_links

The hosts are network namespaces of this machine, so this needs root. The link between them has a rate and a delay. They
are measured (`measure --hostfile`), strategies are chosen with this profile (`rank`, `slices`) and run in turn (`trial
--rounds`). The factors between their times are then held against the factors that the search predicted.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring.report import Section, publish
from megatron_terapipe.search.answer.trial_runs import explicit, same_run
from megatron_terapipe.search.price.workload_files import parse_workload
from megatron_terapipe.strategy import Strategy
from tests.end_to_end.hosts.network import Network, missing, network
from tests.end_to_end.launching import DEEPSPEED, environment

MODEL = {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 1024, "vocab_size": 4096}
LINK = {"bandwidth": "10 Gbit/s", "latency": "10 us"}
"""What the cluster file says of the link; what is measured counts instead."""


class Search:
    """The commands of the search, run by a user of the first host."""

    def __init__(self, hosts: Network, folder: Path) -> None:
        self._host, self._folder = hosts.hosts[0], folder

    def __call__(self, command: str, *words: object) -> None:
        """Run a command; what it prints is shown."""
        path = f"{DEEPSPEED.parent}:/usr/bin:/bin:/usr/sbin:/sbin"
        subprocess.run(
            self._host.command([sys.executable, "-m", "megatron_terapipe.search", command, *words]),
            cwd=self._folder,
            env=environment(DS_ACCELERATOR="cpu", PATH=path),
            stdout=sys.stderr,
            check=True,
        )

    def answer(self, command: str, *words: object) -> dict[str, Any]:
        """Run a command, and return its answer."""
        self(command, *words, "--json", "answer.json")
        found: dict[str, Any] = json.loads((self._folder / "answer.json").read_text())
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, choose, run and compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, default=5.0, help="of the link, each way")
    parser.add_argument("--rate-mbit", type=float, default=100.0, help="of the link, each way")
    parser.add_argument("--global-batch-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each strategy, in turn")
    parser.add_argument("--iterations", type=int, default=8, help="of each run")
    parser.add_argument("--budget-s", type=float, default=150.0, help="seconds to measure the hosts")
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), help="of the two hosts")
    parser.add_argument("--output", type=Path, default=Path("runs/shaped_links"), help="folder for report.md and files")
    options = parser.parse_args(argv)
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    options.output.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory() as scratch,
        network(2, Path(scratch), cores=options.cores) as hosts,
        hosts.link(delay_ms=options.delay_ms, rate_mbit=options.rate_mbit),
    ):
        chosen, tried = compare(hosts, options)
    section = factors(chosen, tried)
    machine = f"{options.rate_mbit:g} Mbit/s, {options.delay_ms:g} ms, batch {options.global_batch_size}"
    print(publish(f"shaped links: {machine}", {}, [section], options.output))
    return 0


def compare(hosts: Network, options: argparse.Namespace) -> tuple[dict[str, Strategy], list[dict[str, Any]]]:
    """Return the chosen strategies by name, and the entries of their trials."""
    folder, batch = options.output.absolute(), options.global_batch_size
    (folder / "hostfile").write_text(hosts.hostfile())
    (folder / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n")
    (folder / "model.json").write_text(json.dumps(MODEL))
    node = {"hosts": [host.name for host in hosts.hosts], "device": "cpu-core", "devices": 1, "network": LINK}
    (folder / "cluster.json").write_text(json.dumps({"name": "shaped", "nodes": [node]}))
    search, asked = Search(hosts, folder), ("model.json", "cluster.json", "--profile", "profile.json")
    sizes = ("--micro-batch-size", "1,2", "--num-token-slices", "1,2,4,8,16", "--tensor-parallel-size", "1,2")
    search("measure", "model.json", "--hostfile", "hostfile", *sizes, "--budget-s", options.budget_s)
    best = search.answer("rank", *asked, "--global-batch-size", batch, "--top", 1)["entries"][0]["strategy"]
    plain = Strategy(pipeline_parallel_size=2, global_batch_size=batch)
    (folder / "plain.json").write_text(json.dumps(plain.to_json()))
    cut = search.answer("slices", *asked, "--strategy", "plain.json")["best"]["token_slices"]
    _write(folder / "corners.jsonl", corners(batch))
    slowest = max(
        search.answer("predict", *asked, "--strategies", "corners.jsonl")["entries"],
        key=lambda entry: entry["predicted"]["iteration_time_s"] if entry["predicted"] else 0.0,
    )
    chosen = {
        "rank's choice": Strategy.from_json(best),
        "1f1b, token slices `auto`": replace(plain, num_token_slices=len(cut), token_slices=tuple(cut)),
        "1f1b, unsliced": plain,
        "zero-bubble, one micro-batch": replace(plain, schedule="zero-bubble", micro_batch_size=batch),
        "worst of the corners": Strategy.from_json(slowest["strategy"]),
    }
    _write(folder / "strategies.jsonl", chosen.values())
    often = ("--rounds", options.rounds, "--iterations", options.iterations)
    words = ("--global-batch-size", batch, "--strategies", "strategies.jsonl", *often)
    return chosen, search.answer("trial", *asked, *words)["entries"]


def corners(batch: int) -> list[Strategy]:
    """Return the feasible strategies among which the worst is searched: each layout, with few and many token slices."""
    layouts = ({"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}, {"data_parallel_size": 2})
    return [
        Strategy(global_batch_size=batch, num_token_slices=number, recompute=recompute, **layout)
        for layout in layouts
        for number in (1, 4)
        for recompute in ("none", "full")
    ]


def factors(chosen: dict[str, Strategy], entries: Sequence[dict[str, Any]]) -> Section:
    """Return the table of times, and of how much faster the choices are than others: predicted and measured.

    Args:
        entries: their trials, in any order.
    """
    workload = parse_workload(MODEL, "model.json")
    by_run = {same_run(explicit(Strategy.from_json(entry["strategy"]), workload)): entry for entry in entries}
    found = {name: by_run[same_run(explicit(strategy, workload))] for name, strategy in chosen.items()}
    section = Section("Times and factors", ("", "predicted", "measured", "error"))
    times = {
        name: (entry["predicted"]["iteration_time_s"], entry["iteration_time_s"] or float("nan"))
        for name, entry in found.items()
    }
    for name, (predicted, measured) in times.items():
        section.add(name, f"{predicted:.3g} s", f"{measured:.3g} s", f"{predicted / measured - 1:+.1%}")
    best, cut, plain, whole, worst = times
    for fast, slow in ((cut, plain), (best, plain), (best, whole), (best, worst)):
        predicted, measured = (slower / faster for faster, slower in zip(times[fast], times[slow], strict=True))
        section.add(f"{slow} / {fast}", f"{predicted:.2f}", f"{measured:.2f}", f"{predicted / measured - 1:+.1%}")
    section.notes += [f"{name}: {json.dumps(strategy.to_json())}" for name, strategy in chosen.items()]
    return section


def _write(path: Path, strategies: Any) -> None:
    path.write_text("".join(json.dumps(each.to_json()) + "\n" for each in strategies))


if __name__ == "__main__":
    sys.exit(main())
