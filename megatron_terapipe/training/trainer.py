"""The training loop."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deepspeed_ext.plan.render.chrome_trace import render_chrome_trace
from deepspeed_ext.plan.render.svg import render_svg
from deepspeed_ext.plan.timeline import Timeline
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from megatron_terapipe.data.blended_dataset import SampleDataset
from megatron_terapipe.data.loader import MicroBatchLoader
from megatron_terapipe.training.checkpoint import save_checkpoint
from megatron_terapipe.training.lr_schedule import LearningRateSchedule
from megatron_terapipe.training.metrics import EvaluationMetrics, IterationMetrics, MetricsFile, mean_over_iterations
from megatron_terapipe.training.optimizer import set_learning_rate
from megatron_terapipe.training.run import Run


class Trainer:
    """Trains, evaluates, saves and reports, as the run's configuration says.

    Args:
        run: the prepared run.
        engine: its engine, at the checkpoint the run goes on from.
    """

    def __init__(self, run: Run, engine: TokenSlicePipelineEngine) -> None:
        self.config = run.config
        self._run, self._engine = run, engine
        self._learning_rates = LearningRateSchedule.from_config(self.config.optimizer, self.config.training.train_iters)
        # Loss and time are the same on every rank; the first one speaks for all.
        self._speaks = run.launch.rank == 0
        self._metrics_file = MetricsFile(self.config.logging.metrics_file if self._speaks else None)
        self._saved_iteration = run.start_iteration
        self._since_last_line: list[IterationMetrics] = []

    def run(self) -> None:
        """Train until the last iteration, or the exit interval."""
        training = self.config.training
        with ExitStack() as cleanup:
            batches = self._loader(
                cleanup, self._run.datasets.train, self._run.consumed_samples(self._run.start_iteration)
            )
            bar = cleanup.enter_context(
                tqdm(
                    total=training.train_iters,
                    initial=self._run.start_iteration,
                    unit="iteration",
                    disable=not (self._speaks and sys.stderr.isatty()),
                )
            )
            for iteration in range(self._run.start_iteration + 1, training.train_iters + 1):
                self._train(iteration, batches)
                bar.update()
                last = iteration == training.train_iters or _is_due(iteration, training.exit_interval)
                if _is_due(iteration, self.config.logging.eval_interval) or last:
                    self._evaluate(iteration)
                if _is_due(iteration, self.config.checkpoint.save_interval) or last:
                    self._save(iteration)
                if last:
                    break

    def _train(self, iteration: int, batches: Iterator[Any]) -> None:
        logging = self.config.logging
        learning_rate = self._learning_rates.at(iteration - 1)
        set_learning_rate(self._engine.optimizer, learning_rate)
        start = time.perf_counter()
        if logging.timeline is not None and iteration == logging.timeline_iteration:
            with self._engine.timeline() as timelines:
                loss = self._engine.train_batch(batches).item()
            self._write_timeline(timelines[0], Path(logging.timeline))
        else:
            loss = self._engine.train_batch(batches).item()
        seconds = time.perf_counter() - start
        norm = self._engine.get_global_grad_norm()
        metrics = IterationMetrics(
            iteration=iteration,
            consumed_samples=self._run.consumed_samples(iteration),
            lm_loss=loss,
            grad_norm=float(norm),
            learning_rate=learning_rate,
            iteration_time_s=seconds,
            tokens_per_second=self._run.global_batch_size * self.config.model.seq_length / seconds,
        )
        self._metrics_file.write(metrics)
        self._since_last_line.append(metrics)
        if _is_due(iteration, logging.log_interval) or iteration == self._run.start_iteration + 1:
            self._say(mean_over_iterations(self._since_last_line).line(self.config.training.train_iters))
            self._since_last_line.clear()

    def _evaluate(self, iteration: int) -> None:
        """Mean loss over the same validation samples every time, so that evaluations compare."""
        if self._run.datasets.valid is None:
            return
        eval_iters = self.config.logging.eval_iters
        with ExitStack() as cleanup:
            batches = self._loader(cleanup, self._run.datasets.valid, 0)
            losses = [self._engine.eval_batch(batches).item() for _ in range(eval_iters)]
        metrics = EvaluationMetrics(iteration=iteration, validation_lm_loss=sum(losses) / eval_iters)
        self._metrics_file.write(metrics)
        self._say(metrics.line(self.config.training.train_iters))

    def _save(self, iteration: int) -> None:
        save = self.config.checkpoint.save
        if save is not None and iteration != self._saved_iteration:
            directory = save_checkpoint(self._engine, save, self._run.checkpoint_info(iteration))
            self._saved_iteration = iteration
            self._say(f" saved checkpoint {directory}")

    def _loader(self, cleanup: ExitStack, dataset: SampleDataset, consumed_samples: int) -> Iterator[Any]:
        """Micro-batches for this rank, if its stage reads any."""
        if not (self._engine.is_first_stage() or self._engine.is_last_stage()):
            return iter(())
        loader = MicroBatchLoader(
            dataset,
            self.config.batch.micro_batch_size,
            self._run.layout.coordinate(self._run.launch.rank).data,
            self._run.layout.data_parallel_size,
            consumed_samples,
            num_workers=self.config.data.num_workers,
        )
        return cleanup.enter_context(loader)

    def _write_timeline(self, timeline: Timeline, directory: Path) -> None:
        if not self._speaks:
            return
        directory.mkdir(parents=True, exist_ok=True)
        parallel = self.config.parallel
        title = f"{parallel.pipeline_schedule}, {parallel.num_token_slices} token slices, as executed"
        (directory / "timeline.json").write_text(timeline.to_json())
        (directory / "timeline.svg").write_text(render_svg(timeline, title))
        (directory / "timeline.trace.json").write_text(render_chrome_trace(timeline))
        self._say(f" wrote {directory}/timeline.svg, .json and .trace.json: bubble {timeline.bubble_ratio:.1%}")

    def _say(self, line: str) -> None:
        if self._speaks:
            tqdm.write(line)
            sys.stdout.flush()


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0
