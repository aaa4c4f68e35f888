"""Peak FLOP/s of this rank's device, which utilization is a part of."""

from deepspeed.accelerator import get_accelerator
from torch import cuda

from megatron_terapipe.devices import device_in


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
