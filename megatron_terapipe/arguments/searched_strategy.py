"""What `--strategy auto` leaves open, and what other flags say of it."""

from collections.abc import Mapping
from typing import Any, Protocol

from megatron_terapipe.config import Config
from megatron_terapipe.config.fields.options import flag
from megatron_terapipe.config.parallel.parallel import AUTO
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.strategy import DIMENSIONS, Strategy
from megatron_terapipe.strategy_fields import SOLVED

NOT_SEARCHED = (
    *("num_layers_per_virtual_pipeline_stage", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "no_pipeline_parallel"),
    *(
        "model_chunk_placement",
        "pipeline_model_parallel_layout",
        "schedule_memory_limit",
        "gradient_accumulation_steps",
        "rampup_batch_size",
    ),
    *("recompute_method", "recompute_num_layers"),
)
"""Fields that lay out a run in a way that the search does not know."""

BATCH = "global_batch_size"

Constraints = Mapping[str, tuple[Any, ...]]
"""Values that dimensions of a strategy may have, by name."""


class FoundStrategy(Protocol):
    """A strategy that was found for a run."""

    @property
    def strategy(self) -> Strategy:
        """The strategy."""

    @property
    def place(self) -> str:
        """Where it comes from, for errors: `auto`, or the file of an earlier start of the run."""

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines for the start of the run."""


class StrategyFinder(Protocol):
    """Finds the strategy of a run."""

    def __call__(self, config: Config, constraints: Constraints) -> FoundStrategy:
        """Return the strategy.

        Args:
            config: the configuration, its layout and batch left at their defaults.
            constraints: what flags say of the strategy, the global batch size among it.
        """
        ...


def constraints_of(given: Mapping[str, Any]) -> Constraints:
    """Return what is said of the dimensions of a strategy, by the name of the dimension.

    Raises:
        ConfigError: if a value is none that the search tries, or the batch is not given.
    """
    if given.get(BATCH) is None:
        raise ConfigError(f"--strategy auto searches for one batch, and none is given: add {flag(BATCH)}")
    for name in NOT_SEARCHED:
        if given.get(name):
            raise ConfigError(f"--strategy auto does not search with {flag(name)} {given[name]}: drop one of the two")
    found: dict[str, tuple[Any, ...]] = {BATCH: (given[BATCH],)}
    for each in DIMENSIONS:
        value = given.get(each.setting or "")
        if value is None or each.name == BATCH or (each.name == "token_slices" and value == AUTO):
            continue
        text = {True: "on", False: "off", AUTO: SOLVED}.get(value, str(value)) if _is_word(value) else str(value)
        try:
            found[each.name] = each.parse(text)
        except ConfigError:
            raise ConfigError(
                f"--strategy auto does not search with {flag(each.setting or each.name)} {value}: drop one of the two"
            ) from None
    return found


def without_strategy(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of fields that no strategy sets, with a micro-batch, which every configuration has."""
    settings = {each.setting for each in DIMENSIONS}
    return {name: value for name, value in given.items() if name not in settings} | {"micro_batch_size": 1}


def _is_word(value: object) -> bool:
    return isinstance(value, (bool, str))
