"""The training loop, with its evaluations, its saves, and the conditions that end it early.

Trainer.train: micro-batches -> TrainingStep -> reporters -> evaluate -> Saves -> ExitConditions
"""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import mul
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from deepspeed_ext.runtime.attention.flash_kernels import activate_flash_attention
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.health.rank_watch import CTRL_C
from deepspeed_ext.runtime.topology import any_rank
from megatron_terapipe.checkpoint.agreement import from_first_rank
from megatron_terapipe.checkpoint.save import BackgroundSaves, begin_save, bytes_to_save, check_room, room_warning
from megatron_terapipe.checkpoint.saved_weights import left_out
from megatron_terapipe.config import Config, ModelConfig
from megatron_terapipe.config.flops import model_parameters
from megatron_terapipe.config.training import TrainingConfig
from megatron_terapipe.errors import SaveError
from megatron_terapipe.records import EvaluationMetrics, Progress, RunEnd, Saved
from megatron_terapipe.training.auto_plan import keep_schedule, keep_strategy, notes
from megatron_terapipe.training.micro_batches import micro_batches
from megatron_terapipe.training.number_guards import (
    BadIteration,
    RememberedBatches,
    check_evaluation,
    refuse_bad_states,
    refuse_different_copies,
)
from megatron_terapipe.training.own_layers import layers_in_words
from megatron_terapipe.training.reporters import Reporters, build_reporters
from megatron_terapipe.training.run import Run
from megatron_terapipe.training.step import TrainingStep, losses_of_depths, number_of_parameters


class ExitReason(Enum):
    """Reason for the end of a run, as the log prints it."""

    SIGNAL = "a SIGTERM came"
    DURATION = "--exit-duration-in-mins have passed"
    INTERVAL = "--exit-interval is reached"


@dataclass
class ExitConditions:
    """Conditions that end a run early, equal on all ranks."""

    training: TrainingConfig
    signalled: Callable[[], bool] = lambda: False
    """Whether this rank received SIGTERM."""
    clock: Callable[[], float] = time.monotonic
    """Seconds since any moment; the run starts now."""
    agree: Callable[[bool], bool] = any_rank
    """Whether a condition is true on any rank; a collective operation of all ranks."""

    def __post_init__(self) -> None:
        self._start = self.clock()

    def reason(self, iteration: int) -> ExitReason | None:
        """Return the reason to end the run after this iteration; None if it continues."""
        training = self.training
        # Ranks get signals at different times, and if only one of them ends, the others hang.
        if training.exit_signal_handler and self.agree(self.signalled()):
            return ExitReason.SIGNAL
        if training.exit_duration_in_mins is not None:
            minutes = (self.clock() - self._start) / 60
            if self.agree(minutes > training.exit_duration_in_mins):
                return ExitReason.DURATION
        if training.exit_interval is not None and iteration % training.exit_interval == 0:
            return ExitReason.INTERVAL
        return None


@contextmanager
def catch_sigterm(enabled: bool) -> Iterator[Callable[[], bool]]:
    """Catch SIGTERM if enabled, and yield a function that returns whether it came."""
    if not enabled:
        yield lambda: False
        return
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGTERM, before)


def evaluate(
    run: Run,
    engine: TokenSlicePipelineEngine,
    report: Reporters,
    progress: Progress,
    part: Literal["validation", "test"] = "validation",
) -> None:
    """Report the mean loss over the same samples every time, with the token slices of training, if there are any."""
    dataset = run.datasets.valid if part == "validation" else run.datasets.test
    if dataset is None:
        return
    rows, num_micro_batches = run.evaluation_batch
    per_token = run.config.training.calculate_per_token_loss
    losses, weights = [], []
    with closing(micro_batches(run, engine, dataset, 0, rows)) as batches:
        for _ in range(run.config.logging.eval_iters):
            found = engine.eval_batch(batches, num_micro_batches=num_micro_batches, micro_batch_size=rows)
            losses.append(losses_of_depths(found, run.config.model))
            weights.append(engine.num_loss_tokens() if per_token else 1.0)
    loss, *further = (sum(map(mul, each, weights)) / max(sum(weights), 1.0) for each in zip(*losses, strict=True))
    metrics = EvaluationMetrics(
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        part=part,
        lm_loss=loss,
        mtp_losses=tuple(further),
    )
    report(metrics)
    name = f"{part} at iteration {progress.iteration}"
    line = check_evaluation(run.config.numbers, engine, name, metrics.lm_loss)
    if line is not None:
        report.note(line)


class Saves:
    """Saves the checkpoints of a run, at once or in the background; methods are collective operations of all ranks.

    Raises:
        SaveError: if the disk has no room for one checkpoint.
    """

    def __init__(self, run: Run, engine: TokenSlicePipelineEngine, report: Reporters) -> None:
        self._run, self._engine, self._report, self._config = run, engine, report, run.config.checkpoint
        # A new run has not saved even its initial weights.
        self._saved_iteration = run.start.iteration or None
        self._background = BackgroundSaves() if self._config.async_save else None
        if self._config.save is not None and not run.config.training.skip_train:
            self._check_room(Path(self._config.save))
        # Read now: the folder that the run was loaded from may be gone when it saves.
        self._model_files = run.model_files[0] if self._config.save is not None and run.launch.rank == 0 else None

    def save(self, progress: Progress, *, last: bool = False) -> None:
        """Save a checkpoint, unless there is one of this iteration.

        Args:
            last: whether it is the last one: then its failure always ends the run.

        Raises:
            SaveError: if it or the previous one cannot be saved, without `--train-on-if-save-fails`.
        """
        if self._config.save is None or progress.iteration == self._saved_iteration:
            return
        start = time.perf_counter()
        # One at a time.
        self._report_lines(self._finish_background, last=False)
        refuse_bad_states(
            self._engine,
            f"the model after iteration {progress.iteration}",
            "it was not saved; resume from a checkpoint before it",
        )
        info = self._run.checkpoint_info(progress)

        def begin() -> list[str]:
            unfinished = begin_save(
                self._engine,
                str(self._config.save),
                info,
                keep_last=self._config.keep_last_n_checkpoints,
                in_memory=self._background is not None,
                model_files=self._model_files,
            )
            if self._background is None:
                return unfinished.finish()
            self._background.start(unfinished)
            return [f" saving checkpoint {unfinished.directory} in the background"]

        if self._report_lines(begin, last=last):
            self._saved_iteration = progress.iteration
            self._report(Saved(iteration=progress.iteration, seconds=time.perf_counter() - start))

    def after_iteration(self) -> None:
        """Finish a save in the background if it is done, without waiting for it.

        Raises:
            SaveError: if it failed, without `--train-on-if-save-fails`.
        """
        if self._background is not None and self._background.is_done():
            self._report_lines(self._finish_background, last=False)

    def finish(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            SaveError: if it cannot be saved.
        """
        self._report_lines(self._finish_background, last=True)

    def _finish_background(self) -> list[str]:
        return [] if self._background is None else self._background.finish()

    def _report_lines(self, action: Callable[[], list[str]], *, last: bool) -> bool:
        """Do something and report its lines; return whether it succeeded."""
        try:
            with self._engine.ledger.phase("saving"):
                lines = action()
        except SaveError as error:
            if last or not self._config.train_on_if_save_fails:
                raise
            self._report.note(f" warning: {error}; training continues")
            return False
        for line in lines:
            self._report.note(line)
        return True

    def _check_room(self, save: Path) -> None:
        """Check now that the disk has room, and not after days of training."""
        optimizer = self._run.config.optimizer.optimizer
        size = bytes_to_save(self._engine, None if self._config.no_save_optim else optimizer)

        def check() -> str | None:
            there = next(each for each in (save, *save.absolute().parents) if each.exists())
            check_room(there, size)
            return room_warning(there, size, self._num_new(), self._config.keep_last_n_checkpoints)

        if line := from_first_rank(check, error=SaveError):
            self._report.note(line)

    def _num_new(self) -> int:
        """Number of checkpoints that this run will save, the last one included."""
        interval, ahead = self._config.save_interval, self._run.train_iters - self._run.start.iteration
        regular = 0 if interval is None else math.ceil(ahead / interval)
        return max(regular, 1) + len(self._config.extra_save_iterations or ())


class Trainer:
    """Trains, evaluates, saves and reports, as configured."""

    def __init__(
        self, run: Run, engine: TokenSlicePipelineEngine, refresh_report: Callable[[], object] = lambda: None
    ) -> None:
        self._run, self._engine = run, engine
        trained, own = run.trained, 0 if run.trained.is_gpt else number_of_parameters(engine)
        self._report = build_reporters(run, own or model_parameters(run.config.model), refresh_report)
        if not trained.is_gpt:
            words = layers_in_words(engine.module._layer_specs, engine.module.parts)
            self._report.note(f" {own:,} parameters in {words}")
        self._step = TrainingStep(run, engine, self._report)
        self._evaluate = partial(evaluate, run, engine, self._report)
        self._saves = Saves(run, engine, self._report)
        self._iteration, self._exit_reason = run.start.iteration, ""

    def run(self) -> None:
        """Train until the last iteration, or until something ends the run before."""
        training = self._run.config.training
        with ExitStack() as cleanup:
            cleanup.callback(self._report.close)
            cleanup.push(self._report_end)
            cleanup.callback(self._step.close)
            keep_schedule(self._run)
            keep_strategy(self._run)
            device = self._engine.device
            for line in (*notes(self._run), *attention_notes(self._run.config, device)):
                self._report.note(line)
            if self._run.checkpoint is not None:
                directory, info = self._run.checkpoint
                self._report.note(f" loaded checkpoint {directory} of iteration {info.iteration}")
                if (unread := left_out(directory, info)) is not None:
                    self._report.note(f" {unread}")
            if training.skip_train:
                self._evaluate(self._run.start)
                self._evaluate(self._run.start, "test")
                return
            signalled = cleanup.enter_context(catch_sigterm(training.exit_signal_handler))
            exits = ExitConditions(training, signalled=signalled)
            self._train(exits, cleanup)
            self._saves.finish()

    def _train(self, exits: ExitConditions, cleanup: ExitStack) -> None:
        run, progress = self._run, self._run.start
        loader = micro_batches(run, self._engine, run.datasets.train, progress.consumed_samples)
        batches = RememberedBatches(cleanup.enter_context(closing(loader)))
        last_iteration = run.train_iters
        if progress.iteration == 0 and run.config.checkpoint.saves_after(0):
            self._saves.save(progress)
        while progress.iteration < last_iteration:
            progress = self._one_iteration(progress, batches)
            self._iteration = progress.iteration
            self._saves.after_iteration()
            reason = exits.reason(progress.iteration)
            last = reason is not None or progress.iteration == last_iteration
            # No evaluation after a signal, or when the time is over.
            hurried = reason in (ExitReason.SIGNAL, ExitReason.DURATION)
            interval = run.config.logging.eval_interval
            is_due = interval is not None and progress.iteration % interval == 0
            if not hurried and (last or is_due):
                self._evaluate(progress)
            if last or run.config.checkpoint.saves_after(progress.iteration):
                self._saves.save(progress, last=last)
            if reason is not None:
                self._exit_reason = reason.value
                self._report.note(f" exiting after iteration {progress.iteration}, because {reason.value}")
                return
            if last:
                self._evaluate(progress, "test")

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

    def _report_end(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Report the reason of the end; an exception is raised further."""
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        if interrupted:
            reason = CTRL_C
        else:
            reason = self._exit_reason if kind is None else " ".join(str(error).split()) or kind.__name__
        failed = kind is not None and not interrupted
        self._report(RunEnd(iteration=self._iteration, reason=reason, failed=failed))


def sample_heads(model: ModelConfig, device: torch.device, dtype: str) -> list[tuple[Tensor, Tensor, int | None]]:
    """Queries, keys and the window of each kind of layer: random, as gradients of patterns may be mostly rounding."""
    generator = torch.Generator().manual_seed(0)

    def heads(tokens: int, number: int) -> Tensor:
        drawn = torch.randn(1, tokens, number, model.kv_channels, generator=generator)
        return drawn.to(device, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32))

    kinds = {(block.num_key_value_heads, block.window) for block in model.blocks if block.num_key_value_heads}
    return [(heads(128, model.num_attention_heads), heads(256, groups), window) for groups, window in kinds]


def attention_notes(config: Config, device: torch.device) -> list[str]:
    """Activate flash attention, and return lines for the log: the one in use, and settings that make a device slow."""
    if device.type == "cpu":
        return []
    fused = not config.model.attention_dropout and config.model.attention_softcap is None
    lines = activate_flash_attention(sample_heads(config.model, device, config.precision.dtype)) if fused else []
    if config.precision.dtype == "fp32":
        lines.append(
            " warning: fp32 uses a small part of a GPU: train with --bf16, or round products to TF32 with "
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1"
        )
    if config.model.attention_dropout:
        lines.append(
            " warning: dropout in attention excludes flash kernels, so its scores are written to memory: use "
            "--attention-dropout 0 if you can"
        )
    if config.model.attention_softcap is not None:
        lines.append(
            f" warning: no flash kernel has --attention-softcap {config.model.attention_softcap:g}, so its scores are "
            "written to memory, which is slower"
        )
    return lines
