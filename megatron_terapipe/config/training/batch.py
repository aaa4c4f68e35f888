"""The section that says how many sequences go into a step."""

from dataclasses import dataclass

from megatron_terapipe.config.fields.options import check_bounds, option
from megatron_terapipe.config.training.batch_sizes import BatchSizes
from megatron_terapipe.errors import ConfigError

MOST_SEQUENCES = 10**9
"""Sequences of one optimizer step at most."""

MOST_INCREMENTS = 10_000
"""Increments of a ramp at most; what a run consumes on it is computed increment by increment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Batch: sequences per optimizer step.

    Raises:
        ConfigError: if a size is not positive, or one not a multiple of the other.
    """

    micro_batch_size: int = option(least=1, most=1_000_000)
    """Sequences that pass through the pipeline together."""

    global_batch_size: int | None = option(None, least=1, most=MOST_SEQUENCES)
    """Sequences of one optimizer step, over all data-parallel ranks. Default: one micro-batch on each."""

    gradient_accumulation_steps: int | None = option(None, least=1, most=10**9)
    """Micro-batches of each data-parallel rank in one optimizer step, instead of `--global-batch-size`."""

    rampup_batch_size: tuple[int, ...] | None = option(None, metavar="N", most=10**13)
    """Three numbers: the first global batch size, the increment, and the samples until it reaches
    `--global-batch-size`, as in `--rampup-batch-size 16 8 300000`."""

    def __post_init__(self) -> None:
        """Check the sizes and the ramp between them."""
        check_bounds(self)
        if self.global_batch_size is not None and self.gradient_accumulation_steps is not None:
            raise ConfigError(
                f"--global-batch-size {self.global_batch_size} and --gradient-accumulation-steps "
                f"{self.gradient_accumulation_steps} both say how large a step is: drop one of them"
            )
        self._check_ramp()
        self._check_multiples(self.micro_batch_size, f"--micro-batch-size {self.micro_batch_size}")

    def num_micro_batches(self, data_parallel_size: int) -> int:
        """Micro-batches of one data-parallel rank in one optimizer step, the last on a ramp.

        Raises:
            ConfigError: if the global batch cannot be dealt evenly.
        """
        return self.sizes(data_parallel_size).final // (self.micro_batch_size * data_parallel_size)

    def sizes(self, data_parallel_size: int) -> BatchSizes:
        """Global batch sizes of the run.

        Raises:
            ConfigError: if one of them cannot be dealt evenly.
        """
        sequences = self.micro_batch_size * data_parallel_size
        self._check_multiples(
            sequences,
            f"--micro-batch-size {self.micro_batch_size} x data-parallel size {data_parallel_size} = {sequences}",
        )
        if self.rampup_batch_size is None:
            return BatchSizes.constant(self.global_batch_size or sequences * (self.gradient_accumulation_steps or 1))
        assert self.global_batch_size is not None
        start, increment, ramp_samples = self.rampup_batch_size
        return BatchSizes(final=self.global_batch_size, start=start, increment=increment, ramp_samples=ramp_samples)

    def _check_ramp(self) -> None:
        if self.rampup_batch_size is None:
            return
        words = f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))}"
        if len(self.rampup_batch_size) != 3 or min(self.rampup_batch_size) < 1:
            raise ConfigError(
                f"{words} is not three numbers above 0: give START INCREMENT SAMPLES, such as 16 8 300000"
            )
        if self.global_batch_size is None:
            raise ConfigError(f"{words} does not say where the ramp ends: add --global-batch-size")
        start, increment, _ = self.rampup_batch_size
        rise = self.global_batch_size - start
        if rise <= 0 or rise % increment:
            raise ConfigError(
                f"{words} does not rise to --global-batch-size {self.global_batch_size} in steps of {increment}: give "
                f"{start + max(1, -(-rise // increment)) * increment}, or another start or increment"
            )

        if rise // increment > MOST_INCREMENTS:
            raise ConfigError(
                f"{words} rises in {rise // increment:,} increments, more than {MOST_INCREMENTS:,}: give larger ones"
            )

    def _check_multiples(self, of: int, described: str) -> None:
        sizes = [("--global-batch-size", self.global_batch_size)]
        if self.rampup_batch_size is not None:
            sizes += zip(
                ("--rampup-batch-size START", "--rampup-batch-size INCREMENT"), self.rampup_batch_size, strict=False
            )
        for name, size in sizes:
            if size is not None and size % of:
                raise ConfigError(
                    f"{name} {size} is not a multiple of {described}: give a multiple, such as {-(-size // of) * of}"
                )
