"""An iteration: the settings before it, and its measurements."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.measured.step_record import StepRecord
from deepspeed_ext.plan.timeline import Timeline
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from megatron_terapipe.training.device_peak import peak_tflops_here
from megatron_terapipe.training.lr_schedule import LearningRateSchedule
from megatron_terapipe.training.metrics import IterationMetrics
from megatron_terapipe.training.optimizer import set_step_sizes
from megatron_terapipe.training.parameter_norm import parameter_norm
from megatron_terapipe.training.peak_memory import memory_line, peak_memory_by_stage
from megatron_terapipe.training.progress import Progress
from megatron_terapipe.training.reporting.reporter import Reporter
from megatron_terapipe.training.run import Run
from megatron_terapipe.training.throughput import Throughput
from megatron_terapipe.training.timeline_files import write_drawings, write_step
from megatron_terapipe.training.weight_decay import WeightDecaySchedule

MEMORY_SETTLES_AFTER = 2
"""Iterations of a run: the first makes the optimizer's state, the second the activations beside it."""


class TrainingStep:
    """Trains one iteration after another.

    Args:
        run: the prepared run.
        engine: its engine.
        reporter: is told of every iteration.
    """

    def __init__(self, run: Run, engine: TokenSlicePipelineEngine, reporter: Reporter) -> None:
        self._run, self._engine, self._reporter = run, engine, reporter
        self._training, self._logging = run.config.training, run.config.logging
        self._learning_rates = LearningRateSchedule.from_config(
            run.config.optimizer, self._training, global_batch_size=run.global_batch_size
        )
        self._weight_decays = WeightDecaySchedule.from_config(run.config.optimizer, self._training)
        self._measured = self._logging.measured_iterations(run.start.iteration, run.train_iters)
        self._peak_tflops = self._logging.peak_tflops_per_device or peak_tflops_here(run.config.precision.dtype)

    def run(self, progress: Progress, batches: Iterator[Any]) -> Progress:
        """Train on the next global batch.

        Args:
            progress: before it.
            batches: micro-batches of this rank.

        Returns:
            Progress after it.
        """
        learning_rate = self._set_step_sizes(progress)
        batch_size = self._set_batch_size(progress)
        loss, seconds = self._train(progress.iteration + 1, batches)
        skipped = not self._engine.was_step_applied()
        progress = progress.after(batch_size, skipped=skipped)
        throughput = Throughput.of(
            self._run.config.model,
            num_sequences=batch_size,
            seconds=seconds,
            world_size=self._run.launch.world_size,
            peak_tflops=self._peak_tflops,
        )
        self._reporter.iteration(
            IterationMetrics(
                iteration=progress.iteration,
                consumed_samples=progress.consumed_samples,
                lm_loss=loss,
                # Of a skipped step it is no number, or still that of the step before.
                grad_norm=None if skipped else float(self._engine.get_global_grad_norm()),
                learning_rate=learning_rate,
                iteration_time_s=seconds,
                tokens_per_second=throughput.tokens_per_second,
                global_batch_size=batch_size,
                tflops_per_device=throughput.tflops_per_device,
                mfu=throughput.mfu,
                loss_scale=float(self._engine.optimizer.loss_scale) if self._run.config.precision.fp16 else None,
                skipped_iterations=progress.skipped_iterations,
                params_norm=parameter_norm(self._engine) if self._logging.log_params_norm else None,
                peak_memory_bytes=self._peak_memory(progress.iteration),
            )
        )
        return progress

    def _set_step_sizes(self, progress: Progress) -> float:
        """Set learning rate and weight decay, and return the former."""
        step = progress.schedule_step(self._training.unit)
        learning_rate = self._learning_rates.at(step)
        set_step_sizes(self._engine.optimizer, learning_rate=learning_rate, weight_decay=self._weight_decays.at(step))
        return learning_rate

    def _set_batch_size(self, progress: Progress) -> int:
        batch_size = self._run.batch_sizes.at(progress.consumed_samples)
        if batch_size != self._engine.train_batch_size():
            self._engine.set_train_batch_size(batch_size)
        return batch_size

    def _train(self, iteration: int, batches: Iterator[Any]) -> tuple[float, float]:
        """Return the loss, and the time it took in seconds."""
        start = time.perf_counter()
        if self._logging.timeline is None or iteration not in self._measured:
            loss = self._engine.train_batch(batches).item()
            return loss, time.perf_counter() - start
        with self._engine.timeline() as timelines:
            loss = self._engine.train_batch(batches).item()
        seconds = time.perf_counter() - start
        if self._run.launch.rank == 0:
            self._write_timeline(timelines[0], iteration, Path(self._logging.timeline))
        return loss, seconds

    def _write_timeline(self, timeline: Timeline, iteration: int, directory: Path) -> None:
        """Write a measured iteration; draw only the last of them, which takes longer."""
        config = self._run.config
        lengths = config.token_slices().lengths
        step = StepRecord(timeline, config.parallel.pipeline_schedule, iteration, lengths)
        write_step(step, directory)
        if iteration == self._measured.last:
            self._reporter.note(write_drawings(step, directory))

    def _peak_memory(self, iteration: int) -> tuple[int, ...] | None:
        settles = iteration == self._run.start.iteration + MEMORY_SETTLES_AFTER
        if not settles and iteration % self._logging.log_interval:
            return None
        by_stage = peak_memory_by_stage(self._engine)
        if settles:
            self._reporter.note(memory_line(MEMORY_SETTLES_AFTER, by_stage))
        return by_stage
