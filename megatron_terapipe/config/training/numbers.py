"""The section that says what is checked of the numbers of a run, and what follows if they are wrong."""

from dataclasses import dataclass
from typing import Literal

from megatron_terapipe.config.fields.options import check_bounds, check_choices, option


@dataclass(frozen=True, kw_only=True, slots=True)
class NumbersConfig:
    """Numbers: what follows if a loss, a gradient or a weight is NaN or infinite, if a loss jumps, or if copies differ.

    Raises:
        ConfigError: if a value is out of range.
    """

    bad_numbers: Literal["stop", "skip", "ignore"] = option(
        "stop",
        shorthands={
            "--check-for-nan-in-loss-and-grad": "stop",
            "--no-check-for-nan-in-loss-and-grad": "ignore",
        },
    )
    """What follows if the loss or the gradient of an iteration is NaN or infinite; its update never reaches the
    weights. `stop` saves the iteration before and ends the run; `skip` goes on with the next batch. Both name rank,
    layer, micro-batch and token slice in which it began. `ignore` says nothing. In fp16 with an adaptive loss scale
    this is for overflows that the scale cannot cure: those before lower it, as usual."""

    max_bad_numbers_in_a_row: int = option(10, least=0, most=10**9)
    """Iterations in a row that `--bad-numbers skip` leaves out before it ends the run."""

    spiky_loss: Literal["note", "stop", "ignore"] = option("note", shorthands={"--check-for-spiky-loss": "note"})
    """What follows if the loss of an iteration is above its median over the last 100 by more than 7 times their spread,
    and by more than 7 %: `note` says so in the log and in `--metrics-file`, `stop` also ends the run."""

    large_grads: Literal["note", "stop", "ignore"] = option("ignore", shorthands={"--check-for-large-grads": "note"})
    """What follows if the norm of the gradient is above its median over the last 100 iterations by more than 7 times
    their spread, and more than three times the median; as for `--spiky-loss`."""

    check_consistency: int | None = option(
        None, metavar="N", aliases=("--check-weight-hash-across-dp-replicas-interval",), least=1, most=10**9
    )
    """Compare copies every N iterations, by a hash: weights of replicas, and their optimizer states where each has
    all; tied weights; weights and states that tensor parallelism does not cut. Copies that differ end the run, and
    nothing is saved from then on."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_choices(self)
        check_bounds(self)
