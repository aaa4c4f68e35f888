"""Measures a model within a budget of time: here with a new process for each rank, or on one rank of many machines."""

import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.cuda_environment import expect_cpu
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.launch.launcher import free_ports
from megatron_terapipe.search.measure.sizes import MeasuredRun, MeasuredSizes
from megatron_terapipe.search.price.profile import Profile, ProfiledEngine
from megatron_terapipe.strategy import Strategy


def run_on_ranks(
    work: Callable[..., None], num_processes: int, *arguments: Any, together: bool = True
) -> Iterator[Any]:
    """Run `work(report, *arguments)` on as many new processes, and yield the reports of the first as they arrive."""
    context = multiprocessing.get_context("spawn")
    ports = free_ports(1 if together else num_processes)
    pipes: list[Connection] = []
    processes = []
    try:
        for rank in range(num_processes):
            here, there = context.Pipe(duplex=False)
            variables = {
                "RANK": rank if together else 0,
                "WORLD_SIZE": num_processes if together else 1,
                "LOCAL_RANK": rank,
                "LOCAL_SIZE": num_processes,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": ports[0 if together else rank],
            }
            process = context.Process(target=_rank, args=(there, variables, work, arguments), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        yield from _received(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _received(pipes: list[Connection]) -> Iterator[Any]:
    running = list(pipes)
    while running:
        for pipe in wait(running):
            assert isinstance(pipe, Connection)
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "failed", "it ended without a message"
            if kind == "failed":
                raise ConfigError(f"rank {pipes.index(pipe)} could not measure ({value}): see the lines above")
            if kind == "done":
                running.remove(pipe)
            elif pipe is pipes[0]:
                yield value


def _rank(
    pipe: Connection, variables: dict[str, object], work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    # Ctrl-C goes to all; the first process ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        work(lambda value: pipe.send(("report", value)), *arguments)
        pipe.send(("done", None))
    except UserError as error:
        pipe.send(("failed", str(error)))
    except Exception as error:
        traceback.print_exc()
        with suppress(OSError):
            pipe.send(("failed", f"{type(error).__name__}: {error}"))
    # Until the parent ends it: others may still be using the store of the first.
    signal.pause()


TIMEOUT = timedelta(minutes=5)

ENGINE_SHARE, LINKS_SHARE = 0.2, 0.2
"""Shares of the time: a slow link or a slow model must leave enough for layers."""


class Progress(NamedTuple):
    """How far it is."""

    share: float
    doing: str


def measure_machine(sizes: MeasuredSizes, num_processes: int) -> Iterator[Progress | Profile]:
    """Measure on ranks of this machine, and yield how far it is; the profile comes last."""
    begun = time.perf_counter()
    yield Progress(0.0, "the engine")
    engine = engine_here(sizes, num_processes)
    left = sizes.budget_s - (time.perf_counter() - begun)
    yield from run_on_ranks(measure_together, num_processes, sizes, left, engine)


def engine_here(sizes: MeasuredSizes, num_processes: int) -> ProfiledEngine:
    """Return the time of the engine on this machine."""
    (engine,) = run_on_ranks(_measure_engine, num_processes, sizes, together=False)
    assert isinstance(engine, ProfiledEngine)
    return engine


def on_cpu() -> bool:
    """Whether DeepSpeed trains on CPUs here."""
    expect_cpu()
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().device_name() == "cpu")


def default_num_processes() -> int:
    """Devices of this machine, or on a CPU two ranks where there are cores for them."""
    from deepspeed.accelerator import get_accelerator

    return min(2, len(os.sched_getaffinity(0))) if on_cpu() else int(get_accelerator().device_count())


def _measure_engine(report: Callable[[Any], None], sizes: MeasuredSizes) -> None:
    from megatron_terapipe.search.measure.layers import measure_engine

    _join()
    budget_s = ENGINE_SHARE * sizes.budget_s
    report(measure_engine(sizes.model, sizes.precision, min(4, max(sizes.nums_token_slices)), budget_s))


def measure_together(
    report: Callable[[Any], None], sizes: MeasuredSizes, budget_s: float, engine: ProfiledEngine | None
) -> None:
    """Measure links and layers, on one rank among all.

    Args:
        report: callback(progress) and, last, callback(profile); only the first rank's reports count.
        budget_s: seconds after which no further size is begun.
        engine: time of the engine; None on ranks that did not measure it.
    """
    from megatron_terapipe.search.measure.layers import measure_links, measured_layers, nodes_of_ranks, profile_here
    from megatron_terapipe.search.measure.program import model_of_program
    from megatron_terapipe.training.trained_model import TrainedModel

    begun = time.perf_counter()
    device = _join()
    trained, config = TrainedModel(), Strategy().config(sizes.model)
    if sizes.program is not None:
        trained, config = model_of_program(sizes.program)
    nodes = nodes_of_ranks()
    # All ranks must agree on the time for links, and only the first has the time of the engine.
    links = measure_links(device, nodes, lambda words: report(Progress(0.1, words)), LINKS_SHARE * sizes.budget_s)

    def doing(share: float, run: MeasuredRun) -> None:
        report(Progress(min(0.1 + 0.9 * share, 1.0), str(run)))

    layers = measured_layers(sizes, trained, config, device, budget_s - (time.perf_counter() - begun), doing)
    more = {"num_devices": max(map(len, nodes)), "num_nodes": len(nodes), "links": tuple(links), "engine": engine}
    report(profile_here(layers, sizes, **more))


def _join() -> Any:
    """Take this rank's device or cores, join the others, and return the device."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from deepspeed_ext.runtime.initialize import init_distributed
    from megatron_terapipe.training.build_engine import settle_on_cores

    accelerator, local_rank = get_accelerator(), int(os.environ["LOCAL_RANK"])
    # DeepSpeed calls collectives by names that torch has renamed; users cannot change that.
    warnings.filterwarnings("ignore", category=FutureWarning)
    if on_cpu():
        settle_on_cores(local_rank, int(os.environ["LOCAL_SIZE"]))
    else:
        accelerator.set_device(local_rank)
    init_distributed(dist_backend=accelerator.communication_backend_name(), timeout=TIMEOUT, verbose=False)
    return torch.device(accelerator.current_device_name())
