"""The training loop."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType

import torch

from deepspeed_ext.runtime.attention_kernels import activate_flash_attention_3
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from megatron_terapipe.config import Config
from megatron_terapipe.training.build_reporters import build_reporters
from megatron_terapipe.training.evaluation import Evaluation
from megatron_terapipe.training.exit_conditions import ExitConditions, ExitReason, heard_signal
from megatron_terapipe.training.guards.bad_numbers import BadIteration, RememberedBatches
from megatron_terapipe.training.guards.states import refuse_different_copies
from megatron_terapipe.training.records.events import RunEnd
from megatron_terapipe.training.records.progress import Progress
from megatron_terapipe.training.saves import Saves
from megatron_terapipe.training.start.found_plan import keep_schedule, notes
from megatron_terapipe.training.start.found_strategy import keep_strategy
from megatron_terapipe.training.start.run import Run
from megatron_terapipe.training.step.micro_batches import micro_batches
from megatron_terapipe.training.step.step import TrainingStep


class Trainer:
    """Trains, evaluates, saves and reports, as the run's configuration says.

    Args:
        engine: its engine, at the checkpoint the run goes on from.
        refresh_report: writes the report of what was trained so far.
    """

    def __init__(
        self, run: Run, engine: TokenSlicePipelineEngine, refresh_report: Callable[[], object] = lambda: None
    ) -> None:
        self._run, self._engine = run, engine
        self._reporters = build_reporters(run, refresh_report)
        self._step = TrainingStep(run, engine, self._reporters)
        self._evaluation = Evaluation(run, engine, self._reporters)
        self._saves = Saves(run, engine, self._reporters)
        self._iteration, self._exit_reason = run.start.iteration, ""

    def run(self) -> None:
        """Train until the last iteration, or until something ends the run before."""
        training = self._run.config.training
        with ExitStack() as cleanup:
            cleanup.callback(self._reporters.close)
            cleanup.push(self._tell_end)
            cleanup.callback(self._step.close)
            keep_schedule(self._run)
            keep_strategy(self._run)
            device = self._engine.device
            # Its backward adds up in any order.
            flash_attention_3 = not training.deterministic_mode and activate_flash_attention_3(device)
            about_attention = attention_notes(self._run.config, device, flash_attention_3=flash_attention_3)
            for line in (*notes(self._run), *about_attention):
                self._reporters.note(line)
            if self._run.checkpoint is not None:
                directory, info = self._run.checkpoint
                self._reporters.note(f" loaded checkpoint {directory} of iteration {info.iteration}")
            if training.skip_train:
                self._evaluate_everything(self._run.start)
                return
            signalled = cleanup.enter_context(heard_signal(training.exit_signal_handler))
            exits = ExitConditions(training, signalled=signalled)
            self._train(exits, cleanup)
            self._saves.finish()

    def _train(self, exits: ExitConditions, cleanup: ExitStack) -> None:
        run, progress = self._run, self._run.start
        loader = cleanup.enter_context(micro_batches(run, self._engine, run.datasets.train, progress.consumed_samples))
        batches = RememberedBatches(loader)
        last_iteration = run.train_iters
        if progress.iteration == 0 and run.config.checkpoint.saves_after(0):
            self._saves.save(progress)
        while progress.iteration < last_iteration:
            progress = self._one_iteration(progress, batches)
            self._iteration = progress.iteration
            self._saves.after_iteration()
            reason = exits.reason(progress.iteration)
            last = reason is not None or progress.iteration == last_iteration
            # Who was told to go, or has no time left, does not begin to evaluate.
            hurried = reason in (ExitReason.SIGNAL, ExitReason.DURATION)
            if not hurried and (last or _is_due(progress.iteration, run.config.logging.eval_interval)):
                self._evaluation.run(progress)
            if last or run.config.checkpoint.saves_after(progress.iteration):
                self._saves.save(progress, last=last)
            if reason is not None:
                self._exit_reason = reason.value
                self._reporters.note(f" exiting after iteration {progress.iteration}, because {reason.value}")
                return
            if last:
                self._evaluation.run(progress, "test")

    def _one_iteration(self, progress: Progress, batches: RememberedBatches) -> Progress:
        try:
            progress = self._step.run(progress, batches)
        except BadIteration:
            if progress.iteration:
                self._engine.uncount_step()
                self._saves.save(progress, last=True)
                self._saves.finish()
            raise
        interval = self._run.config.numbers.check_consistency
        if interval is not None and progress.iteration % interval == 0:
            equal_after = max(progress.iteration - interval, self._run.start.iteration)
            refuse_different_copies(self._engine, progress.iteration, equal_after)
        return progress

    def _tell_end(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Tell the reporters why the run ends; what ends it goes on."""
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        if interrupted:
            reason = "interrupted by Ctrl-C"
        else:
            reason = self._exit_reason if kind is None else " ".join(str(error).split()) or kind.__name__
        failed = kind is not None and not interrupted
        # A disk that is full has ended the run already.
        with suppress(OSError):
            self._reporters.event(RunEnd(iteration=self._iteration, reason=reason, failed=failed))

    def _evaluate_everything(self, progress: Progress) -> None:
        self._evaluation.run(progress)
        self._evaluation.run(progress, "test")


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0


def attention_notes(config: Config, device: torch.device, *, flash_attention_3: bool) -> list[str]:
    """Lines for the log: a kernel that was activated, and settings that keep a device from its speed.

    Args:
        flash_attention_3: whether it is activated.
    """
    if device.type == "cpu":
        return []
    lines = []
    if flash_attention_3:
        lines.append(" attention by FlashAttention-3")
    if config.precision.dtype == "fp32":
        lines.append(
            " warning: fp32 leaves most of a GPU idle: train with --bf16, or let products round to TF32 with "
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1"
        )
    if config.model.attention_dropout:
        lines.append(
            " warning: dropout in attention keeps it from flash kernels, and its scores are written out: give "
            "--attention-dropout 0 if you can"
        )
    if config.model.attention_softcap is not None:
        lines.append(
            f" warning: no flash kernel knows --attention-softcap {config.model.attention_softcap:g}, and scores of "
            "attention are written out: that is slower, and the model's to decide"
        )
    return lines
