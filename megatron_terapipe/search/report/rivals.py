"""What a ranking says of a rival: whether it would be faster, and whether it would fit; in words, and as JSON."""

from dataclasses import asdict, dataclass

from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.library import is_guess
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.report.figures import bytes_text, model_flops, time_text
from megatron_terapipe.search.report.schema.advice_schema import RivalPart
from megatron_terapipe.search.rivals.best import Rival

NAME = "ZeRO-3 with Ulysses"
TRAINER = "DeepSpeed's ALST"

FASTER = 0.98
"""Seconds of a rival in those of the winner up to which a note advises it: predictions are not exact."""


@dataclass(frozen=True, kw_only=True)
class RivalAdvice:
    """A rival beside our best strategy."""

    rival: Rival
    """The rival."""
    num_devices: int
    """Devices of the cluster, of which it may use a part."""
    time_ratio: float | None
    """Its seconds in those of our best strategy; None = nothing of ours fits."""
    mfu_causal: float | None
    """FLOPs of the model over the peak of the devices in use, without the scores that causal attention never computes;
    None where the peak is a guess."""


def compare_rival(rival: Rival, winner: Ranked | None, workload: Workload, cluster: Cluster) -> RivalAdvice:
    """Return a rival beside our best strategy.

    Args:
        winner: our best strategy; None = nothing fits.
    """
    ratio = None
    if winner is not None and winner.prediction is not None:
        ratio = rival.time.total_s / winner.prediction.iteration_time_s
    return RivalAdvice(
        rival=rival,
        num_devices=cluster.num_devices,
        time_ratio=ratio,
        mfu_causal=_utilization(rival, workload, cluster),
    )


def _utilization(rival: Rival, workload: Workload, cluster: Cluster) -> float | None:
    if any(is_guess(node.device.name) for node in cluster.nodes):
        return None
    peaks = [node.device.peak_flops("bf16") for node in cluster.nodes for _ in range(node.num_devices)]
    flops = model_flops(workload, causal=True) * rival.settings.num_sequences
    return flops / (rival.time.total_s * sum(peaks[: rival.settings.num_ranks]))


def rival_note(advice: RivalAdvice) -> str:
    """Return one line on a rival: how long it takes, whether it fits, and which of the two to run."""
    rival, settings = advice.rival, advice.rival.settings
    over = f"{settings.num_ranks} ranks"
    if settings.num_ranks < advice.num_devices:
        over = f"{settings.num_ranks} of the {advice.num_devices} devices"
    if settings.data_parallel_size > 1:
        over += f", {settings.sequence_parallel_size} to a sequence"
    offloaded = f"; on the host: {', '.join(settings.on_host)}" if settings.on_host else ""
    compared = "" if advice.time_ratio is None else f", {advice.time_ratio:.3g} times as long as rank 1"
    line = f"{NAME} over {over} ({TRAINER}{offloaded}) would take {time_text(rival.time.total_s)} (predicted){compared}"
    why_not = why_it_does_not_fit(rival)
    if why_not is not None:
        return f"{line}; it does not fit, because {why_not}"
    held = f"{bytes_text(rival.memory.device)} of a device"
    if settings.on_host:
        held += f" and {bytes_text(rival.memory.host)} of a host"
    better = advice.time_ratio is None or advice.time_ratio <= FASTER
    return f"{line}; it fits, with {held}{': train this model without a pipeline' if better else ''}"


def why_it_does_not_fit(rival: Rival) -> str | None:
    """Return what is too small for a rival, in words; None if it fits."""
    memory, limits = rival.memory, rival.limits
    missing = []
    if memory.device > limits.device:
        missing.append(f"it needs {bytes_text(memory.device)} of a device, of {bytes_text(limits.device)}")
    if memory.host > limits.host:
        missing.append(f"it needs {bytes_text(memory.host)} of a host, of {bytes_text(limits.host)}")
    return " and ".join(missing) or None


def rival_part(advice: RivalAdvice) -> RivalPart:
    """Return what a document says of a rival."""
    rival, settings = advice.rival, advice.rival.settings
    return RivalPart(
        name=NAME,
        trainer=TRAINER,
        sequence_parallel_size=settings.sequence_parallel_size,
        data_parallel_size=settings.data_parallel_size,
        micro_batch_size=settings.micro_batch_size,
        on_host=list(settings.on_host),
        iteration_time_s=rival.time.total_s,
        breakdown=asdict(rival.time),
        time_ratio=advice.time_ratio,
        mfu_causal=advice.mfu_causal,
        device_bytes=rival.memory.device,
        host_bytes=rival.memory.host,
        why_not=why_it_does_not_fit(rival),
    )
