"""Defaults of Megatron-LM and Megatron-DeepSpeed that differ from ours."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_terapipe.arguments.flags import flags
from megatron_terapipe.config import Config
from megatron_terapipe.config.fields.options import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherDefault:
    """A default of Megatron's that differs from ours."""

    field: str
    """The field."""

    theirs: str
    """Their default."""

    trains: Callable[[Config], bool] = lambda config: False
    """Whether a training under a configuration is another one by it; never, for what is only reported."""


OTHER_DEFAULTS = (
    OtherDefault(field="hidden_dropout", theirs="0.1", trains=lambda config: True),
    OtherDefault(field="attention_dropout", theirs="0.1", trains=lambda config: True),
    OtherDefault(
        field="initial_loss_scale",
        theirs="2**32",
        trains=lambda config: config.precision.fp16 and config.precision.loss_scale is None,
    ),
    OtherDefault(field="eval_iters", theirs="100"),
    OtherDefault(field="log_interval", theirs="100"),
    OtherDefault(field="distributed_timeout_minutes", theirs="10"),
    OtherDefault(field="num_workers", theirs="2"),
)
"""All of them, those that change a training first."""


def differing_defaults(given: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yield the defaults of ours, each with theirs, by which this training is not the one that Megatron would run."""
    ours = {each.name: each.default for each in flags()}
    for each in OTHER_DEFAULTS:
        if each.field not in given and each.trains(config):
            yield f"{flag(each.field)} {ours[each.field]:g} (there {each.theirs})"
