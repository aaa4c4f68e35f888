"""The section that says how many sequences go into a step."""

from dataclasses import dataclass

from megatron_terapipe.config.options import check_positive
from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Batch: sequences per optimizer step.

    Raises:
        ConfigError: if a size is not positive, or one not a multiple of the other.
    """

    micro_batch_size: int
    """Sequences that go through the pipeline together."""

    global_batch_size: int | None = None
    """Sequences of one optimizer step, over all data-parallel ranks. Left out, one micro-batch on each."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        check_positive(self, "micro_batch_size", "global_batch_size")
        self._check_multiple(self.micro_batch_size, f"--micro-batch-size {self.micro_batch_size}")

    def num_micro_batches(self, data_parallel_size: int) -> int:
        """Micro-batches of one data-parallel rank in one optimizer step.

        Raises:
            ConfigError: if the global batch cannot be dealt evenly.
        """
        sequences = self.micro_batch_size * data_parallel_size
        self._check_multiple(
            sequences,
            f"--micro-batch-size {self.micro_batch_size} x data-parallel size {data_parallel_size} = {sequences}",
        )
        return (self.global_batch_size or sequences) // sequences

    def _check_multiple(self, of: int, described: str) -> None:
        if self.global_batch_size is not None and self.global_batch_size % of:
            raise ConfigError(
                f"--global-batch-size {self.global_batch_size} is not a multiple of {described}: "
                f"give a multiple, such as {-(-self.global_batch_size // of) * of}"
            )
