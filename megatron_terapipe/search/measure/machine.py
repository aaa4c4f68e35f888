"""Measures a model on this machine, all its ranks at once, within a budget of time."""

import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from megatron_terapipe.search.measure.ranks import run_on_ranks
from megatron_terapipe.search.measure.sizes import MeasuredRun, MeasuredSizes
from megatron_terapipe.search.profile.profile import OpPoint, Profile, ProfiledEngine, ProfiledLayer, ProfiledLink
from megatron_terapipe.search.profile.shapes import Shape

TIMEOUT = timedelta(minutes=5)


class Progress(NamedTuple):
    """How far it is.

    Attributes:
        share: of the whole, 0 to 1.
        doing: in words.
    """

    share: float
    doing: str


def measure_machine(sizes: MeasuredSizes) -> Iterator[Progress | Profile]:
    """Measure, and yield how far it is; the profile comes last.

    Raises:
        ConfigError: if a rank fails.
    """
    begun = time.perf_counter()
    yield Progress(0.0, "the engine")
    # Every rank alone, so that no message is in its times; and all at once, as in a run.
    (engine,) = run_on_ranks(_measure_engine, sizes.num_processes, sizes, together=False)
    left = sizes.budget_s - (time.perf_counter() - begun)
    yield from run_on_ranks(_measure, sizes.num_processes, sizes, left, engine)


def on_cpu() -> bool:
    """Whether DeepSpeed trains on CPUs here."""
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().device_name() == "cpu")


def default_num_processes() -> int:
    """Devices of this machine, or on a CPU two ranks where there are cores for them."""
    from deepspeed.accelerator import get_accelerator

    return min(2, len(os.sched_getaffinity(0))) if on_cpu() else int(get_accelerator().device_count())


def _measure_engine(tell: Callable[[Any], None], sizes: MeasuredSizes) -> None:
    """On one rank, a run of its own."""
    from megatron_terapipe.search.measure.engine import measure_engine

    _join(sizes)
    tell(measure_engine(sizes.model, sizes.precision, min(4, max(sizes.nums_token_slices))))


def _measure(tell: Callable[[Any], None], sizes: MeasuredSizes, budget_s: float, engine: ProfiledEngine) -> None:
    """On one rank among all."""
    import torch
    import torch.distributed as dist

    from megatron_terapipe.search.measure.layers import LayerTimer, PartAlone, build_layers, merged
    from megatron_terapipe.search.measure.links import measure_links

    begun = time.perf_counter()
    device = _join(sizes)
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[sizes.precision]
    tell(Progress(0.1, "links"))
    links = measure_links(device)
    rank = dist.get_rank()
    alone = [dist.new_group([each]) for each in range(sizes.num_processes)][rank]
    points: dict[tuple[Shape, int, str], list[OpPoint]] = {}
    runs = list(sizes.runs())
    for number, run in enumerate(runs):
        share = max(number / len(runs), (time.perf_counter() - begun) / max(budget_s, 1.0))
        tell(Progress(min(0.1 + 0.9 * share, 1.0), _in_words(run)))
        size = run.tensor_parallel_size
        ranks = PartAlone(rank % size, size, alone) if size > 1 else PartAlone()
        timer = LayerTimer(sizes.model, ranks, dtype, device)
        for layers in build_layers(sizes.model, ranks, dtype, device, recompute=run.recompute):
            key = layers.shape, size, run.recompute
            points.setdefault(key, []).extend(timer.points(layers, run))
        if _is_over(begun + budget_s, device):
            break
    profiled = tuple(
        ProfiledLayer(
            shape=shape,
            tensor_parallel_size=size,
            recompute=recompute,  # type: ignore[arg-type]
            points=merged(found, by_place=shape[0] == "block"),
        )
        for (shape, size, recompute), found in points.items()
    )
    tell(_profile(sizes, profiled, tuple(links), engine))


def _join(sizes: MeasuredSizes) -> Any:
    """Take this rank's device or cores, join the others, and return the device."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from deepspeed_ext.runtime.initialize import init_distributed
    from megatron_terapipe.training.cpu_affinity import settle_on_cores

    accelerator, local_rank = get_accelerator(), int(os.environ["LOCAL_RANK"])
    # DeepSpeed calls collectives by names that torch has renamed; nobody who measures can do anything about it.
    warnings.filterwarnings("ignore", category=FutureWarning)
    if on_cpu():
        settle_on_cores(local_rank, sizes.num_processes)
    else:
        accelerator.set_device(local_rank)
    init_distributed(dist_backend=accelerator.communication_backend_name(), timeout=TIMEOUT, verbose=False)
    return torch.device(accelerator.current_device_name())


def _is_over(deadline: float, device: Any) -> bool:
    """Whether the first rank's time is over: all must agree."""
    import torch
    import torch.distributed as dist

    over = torch.tensor([float(time.perf_counter() > deadline)], device=device)
    dist.broadcast(over, 0)
    return bool(over.item())


def _profile(
    sizes: MeasuredSizes, layers: tuple[ProfiledLayer, ...], links: tuple[ProfiledLink, ...], engine: ProfiledEngine
) -> Profile:
    from deepspeed.accelerator import get_accelerator

    name = get_accelerator().device_name()
    return Profile(
        device=_processor() if name == "cpu" else _device_name(),
        accelerator=name,
        num_devices=sizes.num_processes,
        precision=sizes.precision,
        software=tuple((package, version(package)) for package in ("torch", "deepspeed", "numpy")),
        layers=layers,
        links=links,
        engine=engine,
    )


def _device_name() -> str:
    import torch

    return str(torch.cuda.get_device_name())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _in_words(run: MeasuredRun) -> str:
    recompute = ", recomputing" if run.recompute != "none" else ""
    return (
        f"{run.micro_batch_size} sequences in {run.num_token_slices} token slices, tensor-parallel size "
        f"{run.tensor_parallel_size}{recompute}"
    )
