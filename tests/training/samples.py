"""Metrics to report."""

from dataclasses import replace

from megatron_terapipe.records import EvaluationMetrics, IterationMetrics

ITERATION = IterationMetrics(
    iteration=7,
    consumed_samples=56,
    lm_loss=5.123456789012345,
    grad_norm=1.25,
    learning_rate=1e-4,
    iteration_time_s=0.5,
    tokens_per_second=512.0,
    global_batch_size=8,
    tflops_per_device=100.0,
    mfu=0.25,
    tflops_per_device_causal=60.0,
    mfu_causal=0.15,
    loss_scale=None,
    skipped_iterations=2,
)
SKIPPED = replace(ITERATION, iteration=8, consumed_samples=64, lm_loss=9.0, grad_norm=None, skipped_iterations=3)
EVALUATION = EvaluationMetrics(iteration=7, consumed_samples=56, part="validation", lm_loss=1000.0)
TEST = EvaluationMetrics(iteration=7, consumed_samples=56, part="test", lm_loss=2.0)
