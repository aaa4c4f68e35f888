"""The strategy of a training run, as the search writes it and the trainer reads it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any, get_type_hints

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.partition import StagePartition
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config import (
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megatron_terapipe.config.fields.options import field_help
from megatron_terapipe.config.parallel.parallel import AUTO, MOST_RANKS
from megatron_terapipe.dimensions import Dimension, dimensions_of
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.strategy_fields import StrategyFields

__all__ = ["Strategy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy(StrategyFields):
    """Parallelism, batch and memory savings of a run.

    Values that the trainer cannot run are valid here: the search prices them, and `settings` refuses them.

    Raises:
        ConfigError: if a value is not of its type, or two contradict each other.
    """

    def __post_init__(self) -> None:
        """Check types and pairs."""
        for each in DIMENSIONS:
            each.check(getattr(self, each.name))
        if self.world_size > MOST_RANKS:
            sizes = " x ".join(each.name for each in DIMENSIONS if each.ranks)
            raise ConfigError(
                f"strategy: {sizes} = {self.world_size} is more than {MOST_RANKS:,} ranks: lower one of them"
            )
        sequences = self.micro_batch_size * self.data_parallel_size
        if self.global_batch_size is not None and self.global_batch_size % sequences:
            raise ConfigError(
                f"strategy: global_batch_size {self.global_batch_size} is not a multiple of micro_batch_size x "
                f"data_parallel_size = {sequences}: change one of them"
            )
        if self.token_slices is not None and len(self.token_slices) != self.num_token_slices:
            raise ConfigError(
                f"strategy: num_token_slices {self.num_token_slices} contradicts token_slices, which lists "
                f"{len(self.token_slices)}: make them agree"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(getattr(self, each.name) for each in DIMENSIONS if each.ranks)

    @property
    def layout(self) -> ParallelLayout:
        """How its ranks are laid out, whatever they are told of token slices."""
        return ParallelLayout(
            data_parallel_size=self.data_parallel_size,
            sequence_parallel_size=self.sequence_parallel_size,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
        )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank in one optimizer step."""
        sequences = self.micro_batch_size * self.data_parallel_size
        return (self.global_batch_size or sequences) // sequences

    @property
    def stages_of_a_rank(self) -> int:
        """Stages that each pipeline rank owns, that with its part of the vocabulary included."""
        return self.num_model_chunks + self.vocabulary_stages

    @property
    def granularity(self) -> int:
        """Tokens of which every token slice needs a multiple, as many as there are ranks that share its tokens."""
        return self.sequence_parallel_size * (self.tensor_parallel_size if self.sequence_parallel else 1)

    def cut(self, seq_length: int) -> TokenSlices:
        """Return the token slices of a sequence of `seq_length` tokens.

        Raises:
            ConfigError: if the token slices do not cover `seq_length` tokens.
        """
        try:
            if self.token_slices is None:
                return TokenSlices.uniform(seq_length, self.num_token_slices, granularity=self.granularity)
            return TokenSlices(self.token_slices).covering(seq_length)
        except PlanError as error:
            raise ConfigError(f"strategy: {error}") from None

    @classmethod
    def from_json(cls, document: object) -> "Strategy":
        """Read the JSON object of a strategy. Fields left out keep their defaults.

        Raises:
            ConfigError: if it is not an object, has an unknown field, or a value is wrong.
        """
        if not isinstance(document, Mapping):
            raise ConfigError(f"strategy: {json.dumps(document)} is not a JSON object: write one")
        known = [each.name for each in DIMENSIONS]
        for name in document:
            if name not in known:
                raise ConfigError(f"strategy: field {name!r} is not known: choose among {', '.join(known)}")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
        }
        return cls(**values)

    @classmethod
    def of_config(cls, config: Config, data_parallel_size: int) -> "Strategy":
        """Return the strategy that a configuration runs; the inverse of `config`.

        Token slices and stages that are still to be found are left at the defaults. Model chunks in a V are not part
        of a strategy.

        Args:
            data_parallel_size: ranks that share the batch.

        Raises:
            ConfigError: if the batch cannot be dealt to the replicas.
        """
        sections = (config.parallel, config.batch, config.optimizer, config.training)
        values: dict[str, Any] = {
            each.name: getattr(section, each.setting)
            for each in DIMENSIONS
            for section in sections
            if each.setting and hasattr(section, each.setting)
        }
        parallel, num_layers = config.parallel, config.model.num_layers
        cut = None if parallel.token_slices == AUTO else config.token_slices()
        stages = parallel.stage_bounds() or parallel.uniform_stages(num_layers)
        uniform = stages == StagePartition.uniform(num_layers, parallel.num_stages)
        values |= {
            "data_parallel_size": data_parallel_size,
            "global_batch_size": config.global_batch_size(data_parallel_size),
            "num_token_slices": 1 if cut is None else len(cut),
            "token_slices": None if cut is None else cut.lengths,
        }
        if parallel.stage_partition != "parameters":
            values["stage_partition"] = "uniform" if uniform else stages.bounds
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this strategy, every field in it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def settings(self) -> dict[str, Any]:
        """Return what this strategy sets in the configuration, by field of its sections.

        Raises:
            ConfigError: if the trainer does not support a value.
        """
        for each in DIMENSIONS:
            each.check_trained(getattr(self, each.name))
        if self.placement not in (None, tuple(range(self.world_size))):
            raise ConfigError(
                "strategy: placement does not list the devices in order, and it is the launcher that puts ranks on "
                "devices: order the hostfile so, and leave placement null"
            )
        return {each.setting: _as_text(getattr(self, each.name)) for each in DIMENSIONS if each.setting}

    def config(self, model: ModelConfig, **more: Any) -> Config:
        """Return the configuration of a run with this strategy: one iteration on random tokens, where no more is said.

        Args:
            **more: sections that are not to be the defaults, by their names in `Config`.

        Raises:
            ConfigError: if the trainer does not support the strategy, or it does not fit the model.
        """
        settings = self.settings()

        def section(of: type[Any], **others: Any) -> Any:
            return of(**{each.name: settings[each.name] for each in fields(of) if each.name in settings}, **others)

        sections: dict[str, Any] = {
            "model": model,
            "parallel": section(ParallelConfig),
            "batch": section(BatchConfig),
            "training": section(TrainingConfig, train_iters=1),
            "optimizer": section(OptimizerConfig, lr=1e-4),
            "data": DataConfig(mock_data=True),
            **more,
        }
        others = {name: kind() for name, kind in get_type_hints(Config).items() if name not in sections}
        return Config(**sections, **others)


DIMENSIONS: tuple[Dimension, ...] = dimensions_of(Strategy)
"""All that a strategy chooses, in the order of its fields."""


def strategy_schema(*, whole: bool = False) -> dict[str, Any]:
    """Return the JSON Schema of a strategy: of what `Strategy.from_json` reads, field by field.

    Args:
        whole: whether all fields have to be there, as `Strategy.to_json` writes them.
    """
    texts = field_help(StrategyFields)
    properties = {each.name: each.json_schema() | {"description": texts[each.name]} for each in DIMENSIONS}
    required = {"required": list(properties)} if whole else {}
    return {"type": "object", "properties": properties, **required, "additionalProperties": False}


def _as_text(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value
