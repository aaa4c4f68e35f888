"""The section of the optimizer and the learning rate."""

from dataclasses import dataclass, fields
from typing import Literal

from megatron_terapipe.config.fields.options import check_bounds, check_choices, flag, option
from megatron_terapipe.errors import TRAINING_CANNOT_BE_RUN, ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Optimizer and learning rate.

    Raises:
        ConfigError: if a value is out of range, or two contradict each other.
    """

    optimizer: Literal["adam", "sgd"] = option(
        "adam", elsewhere=dict.fromkeys(("muon", "dist_muon", "lion"), TRAINING_CANNOT_BE_RUN)
    )
    """Optimizer. `adam` decays weights separately from the gradient (AdamW), as Megatron's does."""

    lr: float = option(above=0, most=100)
    """Highest learning rate."""

    min_lr: float = option(0.0, least=0, most=100)
    """Learning rate at the end of the decay, and after it."""

    decoupled_lr: float | None = option(None, least=0, most=100)
    """Highest learning rate of the word embedding and of the output layer, tied or not. Default: `--lr`."""

    decoupled_min_lr: float | None = option(None, least=0, most=100)
    """Learning rate of these two at the end of the decay, and after it. Default: `--min-lr`."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay after the warmup. `WSD` keeps the highest learning rate and decays only at the end."""

    lr_decay_iters: int | None = option(None, least=1, most=10**9)
    """Iteration at which the decay ends. Default: the last."""

    lr_decay_samples: int | None = option(None, least=1, most=10**13)
    """Samples after which the decay ends, with `--train-samples`. Default: all."""

    lr_decay_tokens: int | None = option(None, least=1, most=10**18)
    """Tokens after which the decay ends, instead of `--lr-decay-iters` or `--lr-decay-samples`: tokens / `--seq-length`
    samples, which need not be a whole number. Megatron-DeepSpeed counts them one iteration late."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the decay at the end of WSD."""

    lr_wsd_decay_iters: int | None = option(None, least=1, most=10**9)
    """Iterations of the decay at the end of WSD."""

    lr_wsd_decay_samples: int | None = option(None, least=1, most=10**13)
    """Samples of the decay at the end of WSD, with `--train-samples`."""

    lr_warmup_iters: int = option(0, least=0, most=10**9)
    """Iterations in which the learning rate rises linearly."""

    lr_warmup_samples: int = option(0, least=0, most=10**13)
    """Samples in which the learning rate rises linearly, with `--train-samples`."""

    lr_warmup_tokens: int | None = option(None, least=0, most=10**18)
    """Tokens in which the learning rate rises linearly, instead of `--lr-warmup-iters` or `--lr-warmup-samples`."""

    lr_warmup_fraction: float | None = option(None, least=0, below=1)
    """Length of the warmup as a fraction of the time until the decay ends, instead of `--lr-warmup-iters`."""

    lr_warmup_init: float = option(0.0, least=0, most=100)
    """Learning rate at the start of the warmup."""

    weight_decay: float = option(0.01, least=0, most=1000)
    """Weight decay. Biases and norms do not decay."""

    start_weight_decay: float | None = option(None, least=0, most=1000)
    """Weight decay of the first iteration, if it increases."""

    end_weight_decay: float | None = option(None, least=0, most=1000)
    """Weight decay of the last iteration, if it increases."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape in which weight decay increases over the whole training."""

    clip_grad: float = option(1.0, least=0, most=1e9)
    """Scale gradients down to this global norm. 0 = never."""

    adam_beta1: float = option(0.9, least=0, below=1)
    """Decay rate of Adam's mean of gradients."""

    adam_beta2: float = option(0.999, least=0, below=1)
    """Decay rate of Adam's mean of squared gradients."""

    adam_eps: float = option(1e-8, above=0, most=1)
    """Number that is added to the denominator of Adam's update."""

    sgd_momentum: float = option(0.9, least=0, below=1)
    """Momentum of SGD."""

    zero_stage: Literal[0, 1] = 1
    """ZeRO stage: 1 distributes the optimizer state over the data-parallel ranks, 0 repeats it on each rank."""

    def __post_init__(self) -> None:
        """Check the ranges and the pairs."""
        # The general line would not say why DeepSpeed's other two stages are not on offer.
        if self.zero_stage in (2, 3):
            raise ConfigError(
                f"--zero-stage {self.zero_stage}: DeepSpeed cannot combine ZeRO 2 or 3 with pipelines, not even of "
                "one stage: use 0 or 1"
            )
        check_choices(self)
        check_bounds(self)
        for name in ("min_lr", "lr_warmup_init"):
            if getattr(self, name) > self.lr:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is above --lr {self.lr}: give {self.lr} or less")
        self._check_said_once(
            "warmup", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens", "lr_warmup_fraction"
        )
        self._check_decoupled()
        self._check_said_once("decay", "lr_decay_iters", "lr_decay_samples", "lr_decay_tokens")
        self._check_rising_weight_decay()

    def _check_said_once(self, what: str, *names: str) -> None:
        defaults = {each.name: each.default for each in fields(self)}
        given = [name for name in names if getattr(self, name) != defaults[name]]
        if len(given) > 1:
            first, second = (f"{flag(name)} {getattr(self, name)}" for name in given[:2])
            raise ConfigError(f"{first} and {second} both say how long the {what} is: drop one of them")

    @property
    def ends(self) -> tuple[float, float]:
        """Highest and last learning rate of the word embedding and of the output layer."""
        highest = self.lr if self.decoupled_lr is None else self.decoupled_lr
        return highest, self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr

    def _check_decoupled(self) -> None:
        if self.decoupled_lr is None:
            if self.decoupled_min_lr is not None:
                raise ConfigError(f"--decoupled-min-lr {self.decoupled_min_lr} has no effect alone: add --decoupled-lr")
            return
        for name, value in (("--decoupled-min-lr", self.ends[1]), ("--lr-warmup-init", self.lr_warmup_init)):
            if value > self.decoupled_lr:
                raise ConfigError(f"{name} {value} is above --decoupled-lr {self.decoupled_lr}: give no more than that")

    def _check_rising_weight_decay(self) -> None:
        start, end, style = self.start_weight_decay, self.end_weight_decay, self.weight_decay_incr_style
        if style == "constant":
            for name in ("start_weight_decay", "end_weight_decay"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{flag(name)} {getattr(self, name)} has no effect on a constant weight decay: add "
                        "--weight-decay-incr-style, or use --weight-decay"
                    )
        elif start is None or end is None:
            missing = "--start-weight-decay" if start is None else "--end-weight-decay"
            raise ConfigError(f"--weight-decay-incr-style {style} needs {missing}: add it, or use --weight-decay alone")
        elif start > end:
            raise ConfigError(
                f"--weight-decay-incr-style {style} would fall from --start-weight-decay {start} to --end-weight-decay "
                f"{end}: give the second no less than the first"
            )
