"""Records of a run: its progress, the metrics of iterations and evaluations, and its events.

Reporters are called with them, and the metrics file has a line for each. Lines of events have the key `event`; lines of
iterations and of evaluations have no such key. Nothing here needs torch, because the report reads them, too.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import exp, inf, isfinite
from operator import mul
from statistics import median
from typing import Any, ClassVar, Literal, Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Iterations and samples done, over all runs. An iteration whose update fp16 skipped counts like any other."""

    iteration: int = 0
    """Iterations done."""

    consumed_samples: int = 0
    """Samples read in them."""

    skipped_iterations: int = 0
    """Iterations that did not update the weights."""

    skipped_samples: int = 0
    """Samples read in those."""

    def after(self, batch_size: int, *, skipped: bool = False) -> Self:
        """Return the progress after one more iteration."""
        return replace(
            self,
            iteration=self.iteration + 1,
            consumed_samples=self.consumed_samples + batch_size,
            skipped_iterations=self.skipped_iterations + skipped,
            skipped_samples=self.skipped_samples + skipped * batch_size,
        )

    def schedule_step(self, unit: Literal["iters", "samples"]) -> int:
        """Return the step of the learning rate's schedule, which as in Megatron counts only updates."""
        if unit == "iters":
            return self.iteration - self.skipped_iterations
        return self.consumed_samples - self.skipped_samples


class Record:
    """A line of the metrics file: a dataclass whose fields are the keys."""

    __slots__ = ()
    event: ClassVar[str | None] = None
    """Value of the key `event`; None for lines without the key."""

    def as_json(self) -> dict[str, Any]:
        """Return the object of the metrics file."""
        return ({} if self.event is None else {"event": self.event}) | asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationMetrics(Record):
    """Numbers of a training iteration, by their names in the metrics file."""

    iteration: int
    consumed_samples: int
    lm_loss: float
    grad_norm: float | None
    """None if the update was skipped."""
    learning_rate: float
    iteration_time_s: float
    tokens_per_second: float
    global_batch_size: int
    tflops_per_device: float | None
    """Model FLOPs, without recomputation: every token counted as if it attended to the whole sequence, or to a
    whole window. None for layers of a program's own, whose FLOPs are not known."""
    mfu: float | None
    """The same as a share of the device's peak; None where that is unknown."""
    loss_scale: float | None
    """None unless in fp16."""
    skipped_iterations: int
    """Over all runs."""
    tflops_per_device_causal: float | None
    """The same as `tflops_per_device`, but only scores that causal attention computes are counted."""
    mfu_causal: float | None
    """This as a share of the device's peak; None where that is unknown."""
    mtp_losses: tuple[float, ...] = ()
    """Losses of the layers that predict further tokens, without their factor; empty without such layers."""
    params_norm: float | None = None
    """None without `--log-params-norm`."""
    decoupled_learning_rate: float | None = None
    """Learning rate of the word embedding and of the output layer; None without `--decoupled-lr`."""
    weight_decay: float | None = None
    """Weight decay of the weights that decay."""
    num_zeros_in_grad: int | None = None
    """Before clipping; None without `--log-num-zeros-in-grad`."""
    timers: Mapping[str, tuple[float, ...]] | None = None
    """Seconds of each phase of the iteration, over ranks; None without `--timing-log-level`."""
    peak_memory_bytes: tuple[int, ...] | None = None
    """Peak memory of a rank of each stage since the start; None in iterations in which it is not measured."""
    spiky_loss: bool = False
    """Whether the loss is far above the previous ones."""
    large_grads: bool = False
    """Whether the norm of the gradient is; False without `--large-grads`."""

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped, because a gradient was NaN or infinite."""
        return self.grad_norm is None

    def as_json(self) -> dict[str, Any]:
        """Return the object of the metrics file; JSON has no NaN, so a loss that is not finite is null."""
        return Record.as_json(self) | {"lm_loss": _or_none(self.lm_loss), **_further(self.mtp_losses)}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationMetrics(Record):
    """Numbers of an evaluation."""

    iteration: int
    consumed_samples: int
    part: Literal["validation", "test"]
    lm_loss: float
    mtp_losses: tuple[float, ...] = ()

    @property
    def perplexity(self) -> float:
        """Perplexity e**loss. As in Megatron the loss is capped at 20."""
        return exp(min(20.0, self.lm_loss))

    def as_json(self) -> dict[str, Any]:
        """Return the object of the metrics file, without the samples of training."""
        losses = {f"{self.part}_lm_loss": _or_none(self.lm_loss)}
        return {"iteration": self.iteration, **losses} | (_further(self.mtp_losses) if self.mtp_losses else {})


def mtp_name(depth: int) -> str:
    """Return the name of the loss of a layer that predicts further tokens, counted from 1; it is Megatron's."""
    return f"mtp_{depth} loss"


def _further(losses: Iterable[float]) -> dict[str, Any]:
    return {"mtp_losses": list(map(_or_none, losses))}


def _or_none(loss: float) -> float | None:
    return loss if isfinite(loss) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Hosts and devices of a run."""

    host: str
    """Name of the host of the first rank."""
    num_hosts: int
    """Number of hosts."""
    num_devices: int
    """Devices of all hosts: one for each rank."""
    device: str
    """Name of the first rank's device, as its driver prints it, or `cpu`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event(Record):
    """An event of a run, with its time."""

    iteration: int
    """Iterations done."""
    time: float = field(default_factory=time.time)
    """Seconds since 1970, in UTC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart(Event):
    """Start of a run, or of a piece of it after a restart: its command, machine, model and strategy."""

    event = "start"

    train_iters: int
    """The last iteration that is planned."""
    command: str
    """Command that started it, as a shell reads it."""
    directory: str
    """Directory in which it was started."""
    versions: Mapping[str, str]
    """Versions of Python and of the packages that compute, by name."""
    machine: Machine
    """Machine that it runs on."""
    model_name: str
    """Name of the preset, or layers x hidden size; the program's, where the layers are its own."""
    parameters: int
    """Parameters; a shared weight counts once."""
    model: Mapping[str, Any]
    """Fields of the model section."""
    precision: Literal["fp32", "fp16", "bf16"]
    """Type of matrix products."""
    strategy: Mapping[str, Any] | None
    """Strategy, as `--strategy` reads it; null if the search has no strategy for the settings of the run."""
    strategy_file: str | None = None
    """File of the strategy, if there is one: the answer of the search is in its directory."""
    timeline: str | None = None
    """Directory of measured timelines, if some are written."""
    peak_tflops_per_device: float | None = None
    """Peak of a device in TFLOP/s; null where that is unknown."""
    restarts: int = 0
    """Starts before this one, as torch's elastic launcher counts them."""
    checkpoint: str | None = None
    """Checkpoint from which it resumes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved(Event):
    """A checkpoint for which training waited."""

    event = "save"

    seconds: float
    """Seconds for which training waited."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note(Event):
    """A line of the log that is neither of iterations nor of an evaluation."""

    event = "note"

    text: str
    """The line."""

    def as_json(self) -> dict[str, Any]:
        """Return the object of the metrics file; lines of the log begin with a space."""
        return Record.as_json(self) | {"text": self.text.strip()}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd(Event):
    """End of a run, or of a piece of it. A run of which all processes were killed has none."""

    event = "end"

    reason: str
    """Reason of the end; empty = the last iteration was reached."""
    failed: bool
    """Whether it ended by a failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLoads(Record):
    """Loads of experts. The load of an expert is the number of its tokens over its even share: 1 = balanced."""

    event = "experts"

    iteration: int
    """Last iteration that is counted."""
    iterations: int
    """Iterations that are counted."""
    layers: tuple[int, ...]
    """Layers with experts, in ascending order."""
    loads: tuple[tuple[float, ...], ...]
    """Load of each expert, by layer."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """Losses of the routers by their names in the log, without their coefficients: means over layers and iterations."""

    def __post_init__(self) -> None:
        widths = {len(of_layer) for of_layer in self.loads}
        if not (0 < self.iterations and 0 < len(self.layers) == len(self.loads) and len(widths) == 1 and min(widths)):
            raise ValueError("loads are not a table of layers x experts")
        if not all(0 <= load < inf for of_layer in self.loads for load in of_layer):
            raise ValueError("a load is negative or not finite")

    @classmethod
    def mean(cls, lines: Sequence[Self]) -> Self:
        """Return the loads over the iterations of several lines of one model, at least one."""
        total = sum(each.iterations for each in lines)
        weights = [each.iterations / total for each in lines]
        means = (
            tuple(sum(map(mul, weights, of_expert)) for of_expert in zip(*of_layer, strict=True))
            for of_layer in zip(*(each.loads for each in lines), strict=True)
        )
        return replace(lines[-1], iterations=total, loads=tuple(means))

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return len(self.loads[0])

    @property
    def busiest(self) -> float:
        """Highest load of all layers."""
        return max(map(max, self.loads))

    @property
    def starved(self) -> list[tuple[float, int, int]]:
        """Load, layer and expert of each starved expert, the lowest load first; empty for too few iterations."""
        if self.iterations < STARVED_FOR:
            return []
        table = zip(self.layers, self.loads, strict=True)
        return sorted(
            (load, layer, expert)
            for layer, of_layer in table
            for expert, load in enumerate(of_layer)
            if load < STARVED_BELOW
        )


STARVED_BELOW, STARVED_FOR = 0.1, 100
"""An expert is starved if its load is below this, over so many iterations."""


def latest_loads(lines: Sequence[ExpertLoads]) -> ExpertLoads | None:
    """Return the loads over the last iterations, `STARVED_FOR` of them where there are as many; None without lines.

    Args:
        lines: in the order of iterations; those before a change of layers or experts are left out.
    """
    latest: list[ExpertLoads] = []
    for line in reversed(lines):
        if latest and (line.layers, line.num_experts) != (latest[0].layers, latest[0].num_experts):
            break
        latest.insert(0, line)
        if sum(each.iterations for each in latest) >= STARVED_FOR:
            break
    return ExpertLoads.mean(latest) if latest else None


def starved_text(loads: ExpertLoads) -> str:
    """Return a line about the starved experts, at least one, with the remedy."""
    (load, layer, expert), *others = loads.starved
    more = f", and {len(others)} more below {STARVED_BELOW:.0%}" if others else ""
    return (
        f"expert {expert} of layer {layer} received {load:.1%} of an even share of tokens over the last "
        f"{loads.iterations} iterations{more}: raise --moe-aux-loss-coeff, or add --moe-router-enable-expert-bias"
    )


Line = IterationMetrics | EvaluationMetrics | RunStart | Saved | Note | RunEnd | ExpertLoads
"""Any line of the metrics file."""


SPREAD_OF_NORMAL = 1.4826
"""Standard deviation over median absolute deviation of normal values (Rousseeuw and Croux 1993, equation 1.2)."""


def outlier_bound(values: Iterable[float], spreads: float, least_ratio: float) -> float:
    """Return the value above which a value is far outside others.

    Args:
        spreads: robust standard deviations of the bound above the median.
        least_ratio: least bound, as a multiple of the median.
    """
    values = list(values)
    middle = median(values)
    deviation = SPREAD_OF_NORMAL * median(abs(value - middle) for value in values)
    return max(middle + spreads * deviation, least_ratio * middle)
