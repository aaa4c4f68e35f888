"""Refuses weights and optimizer states that are no numbers, or of which copies differ."""

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.numbers.bad_states import bad_states, described
from deepspeed_ext.runtime.numbers.consistency import described as described_differences
from deepspeed_ext.runtime.numbers.consistency import differences
from megatron_terapipe.errors import NumbersError


def refuse_bad_states(engine: TokenSlicePipelineEngine, what: str, remedy: str) -> None:
    """See that weights and optimizer states are numbers, on every rank; every rank must ask.

    Args:
        what: what has them, at the start of the line.

    Raises:
        NumbersError: if some are NaN or infinite.
    """
    if found := bad_states(engine):
        raise NumbersError(f"{what} has NaN or infinity in {described(found)}: {remedy}")


def refuse_different_copies(engine: TokenSlicePipelineEngine, iteration: int, equal_after: int) -> None:
    """See that copies of weights and optimizer states are equal, on every rank; every rank must ask.

    Args:
        equal_after: iterations done when the copies were equal.

    Raises:
        NumbersError: if some differ.
    """
    if found := differences(engine):
        raise NumbersError(
            f"after iteration {iteration} copies are not equal: {described_differences(found)}: go on from the "
            f"checkpoint of iteration {equal_after} or before, and look for a defect of those ranks' devices and links"
        )
