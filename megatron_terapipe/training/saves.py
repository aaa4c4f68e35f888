"""The checkpoints of a run: when one is begun, when it is whole, and what follows if it cannot be saved."""

import math
import time
from collections.abc import Callable
from pathlib import Path

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from megatron_terapipe.checkpoint.agreement import from_first_rank
from megatron_terapipe.checkpoint.saving.background import BackgroundSaves
from megatron_terapipe.checkpoint.saving.room import bytes_to_save, check_room, room_warning
from megatron_terapipe.checkpoint.saving.save import begin_save
from megatron_terapipe.errors import SaveError
from megatron_terapipe.training.guards.states import refuse_bad_states
from megatron_terapipe.training.records.events import Saved
from megatron_terapipe.training.records.progress import Progress
from megatron_terapipe.training.reporting.reporter import Reporter
from megatron_terapipe.training.start.run import Run


class Saves:
    """Saves the checkpoints of a run, at once or in the background; every rank must call each method.

    Raises:
        SaveError: if the disk has no room for one checkpoint.
    """

    def __init__(self, run: Run, engine: TokenSlicePipelineEngine, reporter: Reporter) -> None:
        self._run, self._engine, self._reporter, self._config = run, engine, reporter, run.config.checkpoint
        # A run that starts has saved nothing, not even its initial weights.
        self._saved_iteration = run.start.iteration or None
        self._background = BackgroundSaves(engine.device) if self._config.async_save else None
        if self._config.save is not None and not run.config.training.skip_train:
            self._look_ahead(Path(self._config.save))

    def save(self, progress: Progress, *, last: bool = False) -> None:
        """Save a checkpoint, unless there is one of this iteration.

        Args:
            last: whether no more will follow: then its failure ends the run in any case.

        Raises:
            SaveError: if it cannot be saved, nor the one before, and training does not go on without.
        """
        if self._config.save is None or progress.iteration == self._saved_iteration:
            return
        start = time.perf_counter()
        # One at a time.
        self._tell(self._finish_background, last=False)
        refuse_bad_states(
            self._engine,
            f"the model after iteration {progress.iteration}",
            "nothing was saved; go on from a checkpoint before it",
        )
        info = self._run.checkpoint_info(progress)

        def begin() -> list[str]:
            unfinished = begin_save(
                self._engine,
                str(self._config.save),
                info,
                keep_last=self._config.keep_last_n_checkpoints,
                in_memory=self._background is not None,
            )
            if self._background is None:
                return unfinished.finish()
            self._background.start(unfinished)
            return [f" saving checkpoint {unfinished.directory} in the background"]

        if self._tell(begin, last=last):
            self._saved_iteration = progress.iteration
            self._reporter.event(Saved(iteration=progress.iteration, seconds=time.perf_counter() - start))

    def after_iteration(self) -> None:
        """See whether a save in the background is done, without waiting for it.

        Raises:
            SaveError: if it failed, and training does not go on without.
        """
        if self._background is not None and self._background.is_done():
            self._tell(self._finish_background, last=False)

    def finish(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            SaveError: if it cannot be saved.
        """
        self._tell(self._finish_background, last=True)

    def _finish_background(self) -> list[str]:
        return [] if self._background is None else self._background.finish()

    def _tell(self, action: Callable[[], list[str]], *, last: bool) -> bool:
        """Do something and tell what came of it; return whether it succeeded."""
        try:
            with self._engine.ledger.phase("saving"):
                lines = action()
        except SaveError as error:
            if last or not self._config.train_on_if_save_fails:
                raise
            self._reporter.note(f" warning: {error}; training goes on")
            return False
        for line in lines:
            self._reporter.note(line)
        return True

    def _look_ahead(self, save: Path) -> None:
        """Find out now that the disk is too small, and not when days of training are to be saved."""
        optimizer = self._run.config.optimizer.optimizer
        size = bytes_to_save(self._engine, None if self._config.no_save_optim else optimizer)

        def look() -> str | None:
            there = next(each for each in (save, *save.absolute().parents) if each.exists())
            check_room(there, size)
            return room_warning(there, size, self._num_new(), self._config.keep_last_n_checkpoints)

        if line := from_first_rank(look, error=SaveError):
            self._reporter.note(line)

    def _num_new(self) -> int:
        """Checkpoints that this run will save, its last one included."""
        interval, ahead = self._config.save_interval, self._run.train_iters - self._run.start.iteration
        regular = 0 if interval is None else math.ceil(ahead / interval)
        return max(regular, 1) + len(self._config.extra_save_iterations or ())
