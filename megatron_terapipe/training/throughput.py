"""Speed of an iteration: tokens, FLOP/s, and the share of the devices' peak."""

from dataclasses import dataclass

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.model.flops import iteration_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Throughput of one iteration.

    Attributes:
        tokens_per_second: tokens per second of all ranks together.
        tflops_per_device: model FLOPs, so that recomputation does not look like speed.
        mfu: model FLOPs utilization in [0, 1]; None if the peak is unknown.
    """

    tokens_per_second: float
    tflops_per_device: float
    mfu: float | None

    @classmethod
    def of(
        cls, model: ModelConfig, *, num_sequences: int, seconds: float, world_size: int, peak_tflops: float | None
    ) -> "Throughput":
        """Compute it from the time an iteration took.

        Args:
            model: shape of the model.
            num_sequences: global batch size.
            seconds: time of the iteration.
            world_size: number of devices.
            peak_tflops: peak of one device, in TFLOP/s.
        """
        tflops = iteration_flops(model, num_sequences) / seconds / world_size / 1e12
        return cls(
            tokens_per_second=num_sequences * model.seq_length / seconds,
            tflops_per_device=tflops,
            mfu=None if peak_tflops is None else tflops / peak_tflops,
        )
