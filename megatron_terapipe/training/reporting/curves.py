"""The points of the curves that TensorBoard and Weights & Biases draw, under Megatron's names."""

from megatron_terapipe.config import LoggingConfig
from megatron_terapipe.training.metrics import EvaluationMetrics, IterationMetrics


def iteration_points(metrics: IterationMetrics, logging: LoggingConfig, world_size: int) -> dict[str, float]:
    """Return the points of one iteration, by the name of their curve.

    Args:
        metrics: numbers of the iteration.
        logging: the logging section.
        world_size: number of ranks.
    """
    points: dict[str, float | None] = {"lm loss": metrics.lm_loss, "grad-norm": metrics.grad_norm}
    points["params-norm"] = metrics.params_norm
    if not logging.no_log_learning_rate_to_tensorboard:
        points["learning-rate"] = metrics.learning_rate
    if not logging.no_log_loss_scale_to_tensorboard:
        points["loss-scale"] = metrics.loss_scale
    if logging.log_batch_size_to_tensorboard:
        points["batch-size"] = metrics.global_batch_size
    if logging.log_world_size_to_tensorboard:
        points["world-size"] = world_size
    if logging.log_timers_to_tensorboard:
        points["iteration-time"] = metrics.iteration_time_s
        points["tokens-per-second"] = metrics.tokens_per_second
        points["throughput"] = metrics.tflops_per_device
        points["mfu"] = metrics.mfu
    if logging.log_memory_to_tensorboard:
        for stage, peak in enumerate(metrics.peak_memory_bytes or ()):
            points[f"mem-max-allocated-bytes stage {stage}"] = peak
    return {name: value for name, value in points.items() if value is not None}


def evaluation_points(metrics: EvaluationMetrics, logging: LoggingConfig) -> dict[str, float]:
    """Return the points of one evaluation, by the name of their curve.

    Args:
        metrics: numbers of the evaluation.
        logging: the logging section.
    """
    points = {f"lm loss {metrics.part}": metrics.lm_loss}
    if logging.log_validation_ppl_to_tensorboard:
        points[f"lm loss {metrics.part} ppl"] = metrics.perplexity
    return points
