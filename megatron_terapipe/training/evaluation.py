"""Evaluation on samples that are never trained on."""

from operator import mul
from typing import Literal

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from megatron_terapipe.training.guards.bad_numbers import check_evaluation
from megatron_terapipe.training.records.metrics import EvaluationMetrics
from megatron_terapipe.training.records.progress import Progress
from megatron_terapipe.training.reporting.reporter import Reporter
from megatron_terapipe.training.start.run import Run
from megatron_terapipe.training.step.micro_batches import micro_batches


class Evaluation:
    """Evaluates with the token slices that training uses.

    Args:
        reporter: is told of every evaluation.
    """

    def __init__(self, run: Run, engine: TokenSlicePipelineEngine, reporter: Reporter) -> None:
        self._run, self._engine, self._reporter = run, engine, reporter

    def run(self, progress: Progress, part: Literal["validation", "test"] = "validation") -> None:
        """Report the mean loss over the same samples every time, so that evaluations compare.

        Args:
            part: part of the data; if there is none, nothing happens.
        """
        datasets = self._run.datasets
        dataset = datasets.valid if part == "validation" else datasets.test
        if dataset is None:
            return
        eval_iters = self._run.config.logging.eval_iters
        # Those of the full batch, also where training is still on the ramp to it.
        num_micro_batches = self._run.config.num_micro_batches(self._run.layout.data_parallel_size)
        per_token = self._run.config.training.calculate_per_token_loss
        losses, weights = [], []
        with micro_batches(self._run, self._engine, dataset, 0) as batches:
            for _ in range(eval_iters):
                losses.append(self._engine.eval_batch(batches, num_micro_batches=num_micro_batches).item())
                weights.append(self._engine.num_loss_tokens() if per_token else 1.0)
        metrics = EvaluationMetrics(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            part=part,
            lm_loss=sum(map(mul, losses, weights)) / max(sum(weights), 1.0),
        )
        self._reporter.evaluation(metrics)
        what = f"{part} at iteration {progress.iteration}"
        line = check_evaluation(self._run.config.numbers, self._engine, what, metrics.lm_loss)
        if line is not None:
            self._reporter.note(line)
