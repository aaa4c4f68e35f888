"""How many FLOP/s a device can do at most, which utilization is a part of."""

from deepspeed.accelerator import get_accelerator
from torch import cuda

# Dense products in fp16 and bf16, TFLOP/s, from the makers' data sheets; the first name found in the device's counts.
_PEAK_TFLOPS = (
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.0),
    ("H100", 989.4),
    ("H800", 989.4),
    ("A100", 311.9),
    ("A800", 311.9),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    ("L40S", 362.1),
    ("L40", 181.1),
    ("L4", 121.0),
    ("V100", 125.0),
    ("MI300X", 1307.4),
    ("MI250X", 383.0),
)


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Peak of a device by its name, None if it is not in the table.

    Args:
        device_name: as the driver says it, such as `NVIDIA A100-SXM4-80GB`.
        dtype: `fp32`, `fp16` or `bf16`. In fp32 it depends on how torch multiplies, so it is not known.
    """
    if dtype == "fp32":
        return None
    return next((peak for name, peak in _PEAK_TFLOPS if name.lower() in device_name.lower()), None)


def peak_tflops_here(dtype: str) -> float | None:
    """Peak of this rank's device, None on a CPU."""
    if get_accelerator().device_name() != "cuda":
        return None
    return peak_tflops(cuda.get_device_name(), dtype)
