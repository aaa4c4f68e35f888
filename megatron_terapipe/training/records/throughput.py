"""Speed of an iteration: tokens, FLOP/s, and the share of the devices' peak."""

from dataclasses import dataclass

from deepspeed.accelerator import get_accelerator
from torch import cuda

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.model.flops import iteration_flops
from megatron_terapipe.devices import device_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Throughput of one iteration."""

    tokens_per_second: float
    """Tokens per second of all ranks together."""
    tflops_per_device: float
    """Model FLOPs, so that recomputation does not look like speed."""
    mfu: float | None
    """Model FLOPs utilization in [0, 1]; None if the peak is unknown."""

    @classmethod
    def of(
        cls, model: ModelConfig, *, num_sequences: int, seconds: float, world_size: int, peak_tflops: float | None
    ) -> "Throughput":
        """Compute it from the time an iteration took."""
        tflops = iteration_flops(model, num_sequences) / seconds / world_size / 1e12
        return cls(
            tokens_per_second=num_sequences * model.seq_length / seconds,
            tflops_per_device=tflops,
            mfu=None if peak_tflops is None else tflops / peak_tflops,
        )


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Dense peak of a device in TFLOP/s, by its data sheet; None if the device is not known.

    Args:
        device_name: name that the driver prints, such as `NVIDIA A100-SXM4-80GB`.
        dtype: `fp32`, `fp16` or `bf16`. In fp32 it depends on how torch multiplies, so it is not known.
    """
    device = device_in(device_name)
    return None if device is None or dtype == "fp32" else device.half_flops / 1e12


def peak_tflops_here(dtype: str) -> float | None:
    """Dense peak of this rank's device in TFLOP/s, None on a CPU."""
    if get_accelerator().device_name() != "cuda":
        return None
    return peak_tflops(cuda.get_device_name(), dtype)
