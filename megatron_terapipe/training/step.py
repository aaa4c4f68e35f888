"""A training iteration: its learning rate and batch size, and its measurements."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor

from deepspeed_ext.plan.draw import Panel, render_chrome_trace, render_html, render_svg
from deepspeed_ext.plan.measured import Comparison, StepRecord
from deepspeed_ext.plan.memory import activation_over_time
from deepspeed_ext.plan.timeline import Timeline
from deepspeed_ext.runtime.clocks import PhaseClock, ProfilerRanges
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.gradients.gradient_norm import ZeroGradients
from megatron_terapipe.config import LoggingConfig, ModelConfig
from megatron_terapipe.config.flops import iteration_flops
from megatron_terapipe.config.logging import TimingOption
from megatron_terapipe.config.parallel import BY_DOCUMENTS
from megatron_terapipe.records import (
    STARVED_FOR,
    ExpertLoads,
    IterationMetrics,
    Progress,
    latest_loads,
    starved_text,
)
from megatron_terapipe.training.number_guards import BadNumbers, RememberedBatches, SpikeGuard
from megatron_terapipe.training.optimizer import LearningRateSchedule, set_step_sizes, weight_decay_at
from megatron_terapipe.training.reporters import Reporters
from megatron_terapipe.training.run import Run

MEMORY_SETTLES_AFTER = 2
"""Iterations of a run: the first allocates the optimizer's state, the second activations in addition to it."""


class TrainingStep:
    """Trains iterations, and reports each."""

    def __init__(self, run: Run, engine: TokenSlicePipelineEngine, report: Reporters) -> None:
        self._run, self._engine, self._report = run, engine, report
        self._training, self._logging = run.config.training, run.config.logging
        self._learning_rates = LearningRateSchedule.from_config(
            run.config.optimizer,
            self._training,
            global_batch_size=run.batch_sizes.final,
            seq_length=run.config.model.seq_length,
        )
        highest, last = run.config.optimizer.ends
        self._rates_of_ends = replace(self._learning_rates, max_lr=highest, min_lr=last)
        self._bad_numbers = BadNumbers(run.config.numbers, engine, report.note)
        self._spikes = SpikeGuard(run.config.numbers)
        self._instruments = Instruments(self._logging, engine, report.note)
        self._measured = self._logging.measured_iterations(run.start.iteration, run.train_iters)
        self._experts = ExpertWatch(run.config.model, engine, report)

    def run(self, progress: Progress, batches: RememberedBatches) -> Progress:
        """Train on the next global batch.

        Raises:
            NumbersError: on every rank, if its numbers are bad and the run ends.
        """
        learning_rate, rate_of_ends, weight_decay = self._set_step_sizes(progress)
        batch_size = self._set_batch_size(progress)
        batches.begin()
        with self._instruments.around(progress.iteration + 1):
            losses, seconds = self._train(progress.iteration + 1, batches)
        # NaN of a further prediction is a bad number, too.
        self._bad_numbers.check(progress.iteration + 1, float(losses.sum()), batches)
        loss, *mtp_losses = losses_of_depths(losses, self._run.config.model)
        skipped = not self._engine.was_step_applied()
        # The norm of a skipped step is NaN or that of the previous step.
        grad_norm = None if skipped else float(self._engine.get_global_grad_norm())
        progress = progress.after(batch_size, skipped=skipped)
        model = self._run.config.model
        device_seconds = self._run.launch.world_size * seconds
        tflops: list[float | None] = [None, None]
        if self._run.trained.is_gpt:  # Of other layers the FLOPs are not known.
            tflops = [
                iteration_flops(model, batch_size, causal=causal) / device_seconds / 1e12 for causal in (False, True)
            ]
        peak = self._run.peak_tflops
        shares = [None if peak is None or each is None else each / peak for each in tflops]
        spiky_loss, large_grads = self._spikes.check(progress.iteration, loss, grad_norm)
        is_first = progress.iteration == self._run.start.iteration + 1
        if (
            self._run.trained.is_gpt
            and model.num_experts is not None
            and (is_first or progress.iteration % self._logging.log_interval == 0)
        ):
            self._experts.read(progress.iteration)
        self._report(
            IterationMetrics(
                iteration=progress.iteration,
                consumed_samples=progress.consumed_samples,
                lm_loss=loss,
                mtp_losses=tuple(mtp_losses),
                grad_norm=grad_norm,
                learning_rate=learning_rate,
                decoupled_learning_rate=None if self._run.config.optimizer.decoupled_lr is None else rate_of_ends,
                weight_decay=weight_decay,
                iteration_time_s=seconds,
                tokens_per_second=batch_size * model.seq_length / seconds,
                global_batch_size=batch_size,
                tflops_per_device=tflops[0],
                tflops_per_device_causal=tflops[1],
                mfu=shares[0],
                mfu_causal=shares[1],
                loss_scale=float(self._engine.optimizer.loss_scale) if self._run.config.precision.fp16 else None,
                skipped_iterations=progress.skipped_iterations,
                params_norm=parameter_norm(self._engine) if self._logging.log_params_norm else None,
                num_zeros_in_grad=self._instruments.num_zero_gradients(),
                timers=self._instruments.timers(),
                peak_memory_bytes=self._peak_memory(progress.iteration),
                spiky_loss=spiky_loss,
                large_grads=large_grads,
            )
        )
        self._spikes.report(self._report.note)
        return progress

    def close(self) -> None:
        """Write the recordings of the profiler."""
        self._instruments.close()

    def _set_step_sizes(self, progress: Progress) -> tuple[float, float, float]:
        """Set and return the learning rates, of most weights and of the model's ends, and the weight decay."""
        step = progress.schedule_step(self._training.unit)
        learning_rate, of_ends = self._learning_rates.at(step), self._rates_of_ends.at(step)
        decay = weight_decay_at(step, self._run.config.optimizer, self._training)
        set_step_sizes(self._engine.optimizer, learning_rate=learning_rate, of_ends=of_ends, weight_decay=decay)
        return learning_rate, of_ends, decay

    def _set_batch_size(self, progress: Progress) -> int:
        batch_size = self._run.batch_sizes.at(progress.consumed_samples)
        if batch_size != self._engine.train_batch_size():
            self._engine.set_train_batch_size(batch_size)
        return batch_size

    def _train(self, iteration: int, batches: Iterator[Any]) -> tuple[Tensor, float]:
        start = time.perf_counter()
        if self._logging.timeline is None or not any(iteration in run for run in self._measured):
            losses = self._engine.train_batch(batches).cpu()
            return losses, time.perf_counter() - start
        with self._engine.timeline() as timelines:
            losses = self._engine.train_batch(batches).cpu()
        seconds = time.perf_counter() - start
        if self._run.launch.rank == 0:
            with self._report.writing(f"--timeline {self._logging.timeline}"):
                self._write_timeline(timelines[0], iteration, Path(self._logging.timeline))
        return losses, seconds

    def _write_timeline(self, timeline: Timeline, iteration: int, directory: Path) -> None:
        """Write a measured iteration; draw only the last one, because drawing takes longer."""
        config = self._run.config
        # Unknown where each micro-batch has its own lengths.
        lengths = () if config.parallel.token_slices == BY_DOCUMENTS else config.token_slices().lengths
        step = StepRecord(timeline, config.parallel.pipeline_schedule, iteration, lengths)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"iteration_{iteration:06d}.json").write_text(step.to_json(), encoding="utf-8")
        if iteration == self._measured[-1][-1]:
            self._report.note(write_drawings(step, directory))

    def _peak_memory(self, iteration: int) -> tuple[int, ...] | None:
        settles = iteration == self._run.start.iteration + MEMORY_SETTLES_AFTER
        if not settles and iteration % self._logging.log_interval:
            return None
        by_stage = peak_memory_by_stage(self._engine)
        if settles:
            self._report.note(memory_line(MEMORY_SETTLES_AFTER, by_stage))
        return by_stage


def losses_of_depths(losses: Tensor, model: ModelConfig) -> list[float]:
    """Return the loss of the next token, and of each further one without its factor, from losses of the engine."""
    loss, *further = losses.flatten().tolist()
    return [loss, *(each / model.mtp_loss_factor for each in further)]


def parameter_norm(engine: TokenSlicePipelineEngine) -> float:
    """2-norm of the parameters, each counted once; a collective operation of all ranks.

    Several stages have tied weights, and all tensor-parallel ranks the weights that are not divided.
    """
    squares = torch.zeros((), dtype=torch.float64, device=engine.device)
    engine.complete_weights()
    with torch.no_grad():
        for parameter in _parameters_counted_here(engine):
            squares += torch.linalg.vector_norm(parameter.float()).double() ** 2
    dist.all_reduce(squares, group=engine.grid.get_model_parallel_group())
    return squares.sqrt().item()


def number_of_parameters(engine: TokenSlicePipelineEngine) -> int:
    """Number of the model's parameters, each counted once; a collective operation of all ranks."""
    number = torch.tensor(sum(each.numel() for each in _parameters_counted_here(engine)), device=engine.device)
    dist.all_reduce(number, group=engine.grid.get_model_parallel_group())
    return int(number.item())


def _parameters_counted_here(engine: TokenSlicePipelineEngine) -> Iterator[torch.nn.Parameter]:
    first_of_tensor_parallel = engine.grid.get_slice_parallel_rank() == 0
    for parameter in engine.module.parameters():
        replicated = getattr(parameter, "ds_pipe_replicated", False)
        if not replicated and (first_of_tensor_parallel or is_model_parallel_parameter(parameter)):
            yield parameter


def peak_memory_bytes() -> int:
    """Peak memory of this rank: of tensors on its accelerator; on a CPU, of the whole process."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return int(accelerator.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux


def peak_memory_by_stage(engine: TokenSlicePipelineEngine) -> tuple[int, ...]:
    """Peak memory of any rank of each stage; a collective operation of all ranks."""
    peaks = torch.zeros(engine.num_stages, dtype=torch.int64, device=engine.device)
    peaks[engine.stage_id] = peak_memory_bytes()
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    return tuple(peaks.tolist())


def memory_line(iteration: int, by_stage: tuple[int, ...]) -> str:
    """Return the line of the log with the peak memory of each stage, in MiB."""
    stages = " | ".join(f"stage {stage}: {peak / 2**20:.1f}" for stage, peak in enumerate(by_stage))
    return f" peak memory after {iteration} iterations (MiB) | {stages} |"


def write_drawings(step: StepRecord, directory: Path) -> str:
    """Draw a measured iteration as a picture, a Chrome trace, and a page with its simulation; return a log line."""
    timeline = step.timeline
    title = f"{step.schedule}, iteration {step.iteration}, as executed"
    comparison = Comparison((timeline,))
    panels = [
        Panel(name, each, activation_over_time(each, step.token_slices or None))
        for name, each in ((title, timeline), ("simulated with the measured op times", comparison.simulated))
    ]
    (directory / "timeline.json").write_text(step.to_json(), encoding="utf-8")
    (directory / "timeline.svg").write_text(render_svg(timeline, title), encoding="utf-8")
    (directory / "timeline.html").write_text(render_html(panels, title), encoding="utf-8")
    (directory / "timeline.trace.json").write_text(render_chrome_trace(timeline), encoding="utf-8")
    return (
        f" wrote {directory}/timeline.svg, .html, .json and .trace.json: bubble {timeline.bubble_ratio:.1%} in "
        f"iteration {step.iteration}, simulated time {comparison.efficiency:.1%} of the measured"
    )


Timers = dict[str, tuple[float, ...]]
"""Seconds by phase: the maximum over ranks, the minimum and the maximum, or one figure for each rank."""


def seconds_over_ranks(clock: PhaseClock, engine: TokenSlicePipelineEngine, option: TimingOption) -> Timers:
    """Return the seconds of ranks in each phase since the last call; a collective operation of all ranks."""
    own = torch.tensor(list(clock.take().values()), dtype=torch.float64, device=engine.device)
    if option == "all":
        each = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(each, own)
        rows = each
    else:
        extremes = torch.stack((-own, own))
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        rows = [extremes[1]] if option == "max" else [-extremes[0], extremes[1]]
    return dict(zip(clock.names, zip(*(row.tolist() for row in rows), strict=True), strict=True))


class Instruments:
    """Instruments of the flags: timers, zeros in gradients, and a profiler with names of ops and phases."""

    def __init__(self, logging: LoggingConfig, engine: TokenSlicePipelineEngine, note: Callable[[str], None]) -> None:
        self._engine, self._note, self._option = engine, note, logging.timing_log_option
        level = logging.timing_log_level
        self._clock = PhaseClock(parts=level > 1) if level else None
        self._zeros = ZeroGradients(engine) if logging.log_num_zeros_in_grad else None
        chosen = logging.profile and engine.global_rank in logging.profile_ranks
        self._profiled = logging.profiled_iterations if chosen else range(0)
        self._recorder: Any = torch.cuda.profiler
        if chosen and logging.use_pytorch_profiler:
            directory, name = str(logging.tensorboard_dir), f"rank{engine.global_rank}"
            handler = torch.profiler.tensorboard_trace_handler(directory, worker_name=name)
            self._recorder = torch.profiler.profile(record_shapes=True, with_stack=True, on_trace_ready=handler)
        self._records = False

    @contextmanager
    def around(self, iteration: int) -> Iterator[None]:
        """Measure an iteration, counted from 1, and record it if it is to be profiled."""
        profiled = iteration in self._profiled
        if profiled and not self._records:
            self._recorder.start()
            self._records = True
        with ExitStack() as entered:
            for observer in (ProfilerRanges() if profiled else None, self._clock, self._zeros):
                if observer is not None:
                    entered.enter_context(self._engine.observers.joined_by(observer))
            yield
        if profiled and iteration == self._profiled[-1]:
            self.close()

    def timers(self) -> Timers | None:
        """Return the seconds of each phase of the last iteration, if measured; a collective operation of all ranks."""
        return None if self._clock is None else seconds_over_ranks(self._clock, self._engine, self._option)

    def num_zero_gradients(self) -> int | None:
        """Return the number of zeros in the gradient of the last iteration, if counted."""
        return None if self._zeros is None else self._zeros.number()

    def close(self) -> None:
        """Stop recording."""
        if self._records:
            self._recorder.stop()
            self._records = False
            self._note(f" profiled iterations {self._profiled[0]} to {self._profiled[-1]}")


class ExpertWatch:
    """Reports the loads of experts and the losses of routers, and each expert once that begins to be starved."""

    def __init__(self, model: ModelConfig, engine: TokenSlicePipelineEngine, report: Reporters) -> None:
        self._model, self._engine, self._report = model, engine, report
        self._layers = [index for index, block in model.blocks_by_index.items() if block.num_experts]
        self._recent: list[ExpertLoads] = []
        self._starved: set[tuple[int, int]] = set()
        self._next_check = 0

    def read(self, iteration: int) -> None:
        """Report the loads since the previous call; a collective operation of all ranks, and the host waits."""
        steps, counts, values = self._engine.take_tally()
        blocks = self._model.blocks_by_index.values()  # Layers that predict further tokens have the numbers after.
        shares = counts[self._layers] / counts[self._layers].double().mean(1, keepdim=True)
        loads = ExpertLoads(
            iteration=iteration,
            iterations=steps,
            layers=tuple(number for number, block in enumerate(blocks) if block.num_experts),
            loads=tuple(tuple(round(load, 4) for load in of_layer) for of_layer in shares.tolist()),
            losses=dict(zip(self._model.router_losses, values[self._layers].mean(0).tolist(), strict=True)),
        )
        self._report(loads)
        self._recent = [*self._recent[-STARVED_FOR:], loads]
        if iteration < self._next_check:  # Means of many lines take long.
            return
        self._next_check = iteration + STARVED_FOR // 10
        latest = latest_loads(self._recent)
        assert latest is not None, "has a line"
        starved = {(layer, expert) for _, layer, expert in latest.starved}
        if starved - self._starved:
            self._report.note(f" warning: {starved_text(latest)}")
        self._starved = starved
