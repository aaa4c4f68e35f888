"""Two hosts with a slow link between them: the choices of the search, and overlapping reductions.

Whether the search's choices are as much faster over slow links as predicted: two hosts, one core each, run for real.

    python -m benchmarks.slow_links search --output runs/shaped_links

The hosts are network namespaces of this machine, so this needs root. The link between them has a rate and a delay. They
are measured (`measure --hostfile`), strategies are chosen with this profile (`rank`, `slices`) and run in turn (`trial
--rounds`). The factors between their times are then held against the factors that the search predicted.

The iteration with reductions over replicas that overlap the last backwards beside the one without, over a slow link.

    python -m benchmarks.slow_links reductions [--megabits 1000] [--rounds 7] [--json FILE]

Two hosts are network namespaces of this machine, so it needs root and `ip` and `tc` of iproute2. Each has one replica,
a pipeline of two ranks, so that only gradients cross the link, which is shaped to as many Mbit/s each way:

    host 1: rank 0 -> rank 2        (replica 0: stages 0 and 1)
               |         |          <- the link: sums of gradients
    host 2: rank 1 -> rank 3        (replica 1)

Both engines are held by the same ranks and take turns, step by step; medians are compared. They are compared with the
simulator: op times as measured without overlap, reductions as an all-reduce takes that has the link to itself.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measuring.command import Parser, run_named
from benchmarks.measuring.report import Section, publish
from benchmarks.measuring.workload import batches, join, our_engine
from deepspeed_ext.plan.costs import Table
from deepspeed_ext.plan.measured import measured_costs
from deepspeed_ext.plan.schedules import SCHEDULES, rank_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.search.answer.trial_command import explicit
from megatron_terapipe.search.price.workload_files import parse_workload
from megatron_terapipe.strategy import Strategy
from tests.end_to_end.hosts.network import Network, missing, network
from tests.end_to_end.launching import DEEPSPEED, environment

MODEL = {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 1024, "vocab_size": 4096}
LINK = {"bandwidth": "10 Gbit/s", "latency": "10 us"}
"""The link of the cluster file, in place of which measured values are used."""


class Search:
    """The commands of the search, run by a user of the first host."""

    def __init__(self, hosts: Network, folder: Path) -> None:
        self._host, self._folder = hosts.hosts[0], folder

    def __call__(self, command: str, *words: object) -> None:
        """Run a command and show its output."""
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


def search_choices(argv: Sequence[str] | None = None) -> int:
    """Measure, choose, run and compare; returns the exit code."""
    parser = Parser(description=__doc__)
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
    """Return the table of times, and of how much faster the choices are than others: predicted and measured."""
    workload = parse_workload(MODEL, "model.json")
    by_run = {
        explicit(replace(Strategy.from_json(entry["strategy"]), placement=None), workload): entry for entry in entries
    }
    found = {name: by_run[explicit(replace(strategy, placement=None), workload)] for name, strategy in chosen.items()}
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


HOSTS = ("reduction-host-1", "reduction-host-2")
ADDRESSES = ("10.89.7.1", "10.89.7.2")
STAGES = 2
PROBES = 5
"""Number of timed all-reduces."""


@contextmanager
def linked_hosts(megabits: int) -> Iterator[None]:
    """Two network namespaces with one link between them, shaped at both ends."""

    def run(*words: object) -> None:
        subprocess.run([str(word) for word in words], check=True)

    _remove_hosts()  # what a killed run left
    try:
        for host in HOSTS:
            run("ip", "netns", "add", host)
        run("ip", "-n", HOSTS[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            run("ip", "-n", host, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", host, "link", "set", device, "up")
            shape = ("tbf", "rate", f"{megabits}mbit", "burst", "512kb", "latency", "100ms")
            run("ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", "eth0", "root", *shape)
        yield
    finally:
        _remove_hosts()


def _remove_hosts() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "delete", host], capture_output=True, check=False)


def launch(options: argparse.Namespace) -> None:
    """Run this module once on each rank."""
    size = STAGES * len(HOSTS)
    with linked_hosts(options.megabits):
        ranks = []
        for rank in range(size):
            local = {"LOCAL_RANK": str(rank), "LOCAL_SIZE": str(size), "GLOO_SOCKET_IFNAME": "eth0"}
            meeting = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29555"}
            environment = os.environ | local | meeting | {"RANK": str(rank), "WORLD_SIZE": str(size)}
            words = ["ip", "netns", "exec", HOSTS[rank % len(HOSTS)], sys.executable, "-m", "benchmarks.slow_links"]
            ranks.append(subprocess.Popen([*words, *sys.argv[1:]], env=environment))
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def measure(options: argparse.Namespace) -> None:
    """Time both engines in turn, on one rank of each; rank 0 prints."""
    join()
    model = ModelConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=options.hidden // 64,
        seq_length=options.seq_length,
        vocab_size=256,
        untie_embeddings_and_output_weights=True,
    )
    cut = TokenSlices.uniform(options.seq_length, options.token_slices)
    engines = {
        overlap: our_engine(
            model,
            cut,
            options.micro_batches,
            num_stages=STAGES,
            data_parallel_size=len(HOSTS),
            overlap_grad_reduce=overlap,
            schedule=options.schedule,
        )
        for overlap in (False, True)
    }
    data = batches(model, for_deepspeed=False)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(options.rounds + 1):
        for overlap, engine in engines.items():
            dist.barrier()
            start = time.perf_counter()
            engine.train_batch(data)
            dist.barrier()
            if turn:  # the first one warms up
                times[overlap].append(time.perf_counter() - start)
    predicted = simulated(engines[False], data, options)
    if dist.get_rank() == 0:
        report(times, predicted, options)
    dist.destroy_process_group()


def simulated(engine: Any, data: Iterator[Any], options: argparse.Namespace) -> dict[bool, float]:
    """Seconds until the last op and the last reduction end, by whether they overlap."""
    with engine.timeline() as timelines:
        engine.train_batch(data)
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, (engine.stage_id, _bytes_of_layers(engine)))
    second_s = _seconds_per_byte(engine, options.hidden)
    pieces: Table = tuple(tuple(second_s * each for each in num_bytes) for _, num_bytes in sorted(sizes)[:: len(HOSTS)])
    costs, shape = measured_costs(timelines), timelines[0].shape
    orders = rank_orders(SCHEDULES[options.schedule], shape)
    together: Table = tuple((sum(row),) for row in pieces)
    return {
        overlap: simulate(orders, shape, replace(costs, reductions=reductions)).duration
        for overlap, reductions in ((False, together), (True, pieces))
    }


def _bytes_of_layers(engine: Any) -> list[int]:
    """Bytes of the gradients of this rank's layers, last to first."""
    (stage,) = engine.module.pipeline.stages_of(engine.stage_id)
    sizes = [sum(weight.nbytes for weight in weights) for _, weights in engine.module.layer_parameters(stage)]
    return [size for size in reversed(sizes) if size]


def _seconds_per_byte(engine: Any, hidden: int) -> float:
    """Seconds per byte of an all-reduce of one layer on the link, the ranks of one stage after the other's."""
    message, group = torch.zeros(12 * hidden * hidden), engine.grid.get_data_parallel_group()
    seconds = []
    for stage in range(STAGES):
        dist.barrier()
        for _ in range(PROBES if engine.stage_id == stage else 0):
            start = time.perf_counter()
            dist.all_reduce(message, group=group)
            seconds.append(time.perf_counter() - start)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, median(seconds))
    return float(median(everyone)) / message.nbytes


def report(times: dict[bool, list[float]], predicted: dict[bool, float], options: argparse.Namespace) -> None:
    """Print a table, and write it.

    Args:
        times: measured seconds of each round, by whether reductions overlap.
        predicted: simulated seconds, by whether reductions overlap.
    """
    middle = {overlap: median(rounds) for overlap, rounds in times.items()}
    print(
        f"\n{options.schedule}, 2 replicas x {STAGES} stages, {options.micro_batches} micro-batches of "
        f"{options.seq_length} tokens in {options.token_slices} token slices, {options.layers} layers of "
        f"{options.hidden}, fp32, {options.megabits} Mbit/s"
    )
    print(f"{'reductions':24} {'measured s':>11} {'simulated s':>12}")
    for overlap, name in ((False, "after the last op"), (True, "overlapping")):
        print(f"{name:24} {middle[overlap]:>11.3f} {predicted[overlap]:>12.3f}")
    saved = middle[False] - middle[True], predicted[False] - predicted[True]
    print(f"{'saved':24} {saved[0]:>11.3f} {saved[1]:>12.3f}")
    print(f"{'ratio':24} {middle[True] / middle[False]:>11.3f} {predicted[True] / predicted[False]:>12.3f}", flush=True)
    if options.json:
        rounds = {"without_s": times[False], "with_s": times[True]}
        simulation = {"simulated_without_s": predicted[False], "simulated_with_s": predicted[True]}
        Path(options.json).write_text(json.dumps({**vars(options), **rounds, **simulation}, indent=2) + "\n")


def reductions(argv: Sequence[str] | None = None) -> None:
    """Launch the ranks, or be one."""
    parser = Parser(description=__doc__)
    parser.add_argument("--megabits", type=int, default=1000, help="of the link, each way")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--schedule", choices=["gpipe", "1f1b", "zero-bubble"], default="1f1b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=4, metavar="M")
    parser.add_argument("--token-slices", type=int, default=2, metavar="S")
    parser.add_argument("--json", metavar="FILE", help="write the results to a file as well")
    options = parser.parse_args(argv)
    if "RANK" in os.environ:
        measure(options)
    else:
        launch(options)


def main(argv: Sequence[str] | None = None) -> object:
    """Run the named measurement, by default the first."""
    return run_named({"search": search_choices, "reductions": reductions}, argv)


if __name__ == "__main__":
    main()
