"""How far a run has come."""

from hypothesis import given
from hypothesis import strategies as draw

from megatron_terapipe.training.records import Progress


@given(draw.lists(draw.tuples(draw.integers(1, 64), draw.booleans())))
def test_skipped_iterations_count_as_done_but_do_not_move_the_schedule(steps: list[tuple[int, bool]]) -> None:
    """Megatron counts their iteration and samples, and steps its scheduler only after an update."""
    progress = Progress()
    for batch_size, skipped in steps:
        progress = progress.after(batch_size, skipped=skipped)
    assert progress.iteration == len(steps)
    assert progress.consumed_samples == sum(size for size, _ in steps)
    assert progress.skipped_iterations == sum(skipped for _, skipped in steps)
    assert progress.schedule_step("iters") == sum(not skipped for _, skipped in steps)
    assert progress.schedule_step("samples") == sum(size for size, skipped in steps if not skipped)
