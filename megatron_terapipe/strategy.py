"""One way to train a model on a cluster, as the search writes it and the trainer reads it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.schedules import SCHEDULES
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config import (
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DeepSpeedConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainingConfig,
)
from megatron_terapipe.config.json_files import read_json
from megatron_terapipe.config.parallel import OPTIMISED
from megatron_terapipe.errors import ConfigError

SETTINGS = {
    "data_parallel_size": "data_parallel_size",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "num_model_chunks": "num_model_chunks",
    "num_token_slices": "num_token_slices",
    "token_slices": "token_slices",
    "micro_batch_size": "micro_batch_size",
    "global_batch_size": "global_batch_size",
    "schedule": "pipeline_schedule",
    "sequence_parallel": "sequence_parallel",
    "recompute": "recompute_granularity",
    "zero_stage": "zero_stage",
    "stage_partition": "stage_partition",
}
"""Field of the configuration that each field of a strategy sets; Megatron's flags have longer names."""

SIZES = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "num_token_slices",
    "micro_batch_size",
    "num_model_chunks",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Parallelism, batch and memory savings of a run.

    The fields of its JSON object have the names of these fields. What the trainer cannot run yet is valid here,
    because the search also prices it; `settings` refuses it.

    Raises:
        ConfigError: if a value is not of its type, or two contradict each other.
    """

    data_parallel_size: int = 1
    """Ranks that share the batch."""

    tensor_parallel_size: int = 1
    """Ranks that share each layer."""

    pipeline_parallel_size: int = 1
    """Pipeline ranks."""

    num_token_slices: int = 1
    """Token slices that every sequence is cut into."""

    token_slices: tuple[int, ...] | None = None
    """Their lengths in tokens; None = as equal as can be."""

    micro_batch_size: int = 1
    """Sequences that go through the pipeline together."""

    global_batch_size: int | None = None
    """Sequences of one optimizer step; None = one micro-batch on each data-parallel rank."""

    schedule: str = "1f1b"
    """Order in which a pipeline rank runs forwards and backwards."""

    num_model_chunks: int = 1
    """Stages that each pipeline rank owns."""

    sequence_parallel: bool = False
    """Whether tensor-parallel ranks share the tokens between the matrices, too."""

    recompute: str = "none"
    """Activations recomputed in the backward: none, selective or full."""

    zero_stage: int = 1
    """ZeRO stage."""

    stage_partition: str | tuple[int, ...] = "uniform"
    """How layers are dealt to stages: a rule, or the first layer of each stage and the end of the last."""

    placement: tuple[int, ...] | None = None
    """Device of the cluster for each rank; None = in the order of the hostfile."""

    def __post_init__(self) -> None:
        """Check types and pairs."""
        for name in SIZES:
            _check_whole(name, getattr(self, name), least=1)
        _check_whole("zero_stage", self.zero_stage, least=0)
        if not isinstance(self.sequence_parallel, bool):
            raise ConfigError(
                f"strategy: sequence_parallel {json.dumps(self.sequence_parallel)} is not true or false: write one"
            )
        if self.global_batch_size is not None:
            _check_whole("global_batch_size", self.global_batch_size, least=1)
            sequences = self.micro_batch_size * self.data_parallel_size
            if self.global_batch_size % sequences:
                raise ConfigError(
                    f"strategy: global_batch_size {self.global_batch_size} is not a multiple of micro_batch_size x "
                    f"data_parallel_size = {sequences}: change one of them"
                )
        if self.token_slices is not None:
            _check_list("token_slices", self.token_slices, least=1)
            if len(self.token_slices) != self.num_token_slices:
                raise ConfigError(
                    f"strategy: num_token_slices {self.num_token_slices} contradicts token_slices, which lists "
                    f"{len(self.token_slices)}: make them agree"
                )
        if not isinstance(self.stage_partition, str):
            _check_list("stage_partition", self.stage_partition, least=0)
        if self.placement is not None:
            _check_list("placement", self.placement, least=0)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.data_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank in one optimizer step."""
        sequences = self.micro_batch_size * self.data_parallel_size
        return (self.global_batch_size or sequences) // sequences

    def cut(self, seq_length: int) -> TokenSlices:
        """Cut a sequence as this strategy does.

        Raises:
            ConfigError: if the token slices do not cover `seq_length` tokens.
        """
        try:
            if self.token_slices is None:
                # With sequence parallelism tensor-parallel ranks share the tokens of every token slice.
                granularity = self.tensor_parallel_size if self.sequence_parallel else 1
                return TokenSlices.uniform(seq_length, self.num_token_slices, granularity=granularity)
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
        known = [declared.name for declared in fields(cls)]
        for name in document:
            if name not in known:
                raise ConfigError(f"strategy: field {name!r} is not known: choose among {', '.join(known)}")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
        }
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this strategy, every field in it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def settings(self) -> dict[str, Any]:
        """Return what this strategy sets in the configuration, by field of its sections.

        Raises:
            ConfigError: if the trainer does not support a value.
        """
        self._check_supported("schedule", (*SCHEDULES, OPTIMISED))
        self._check_supported("recompute", ("none", "selective", "full"))
        self._check_supported("zero_stage", (0, 1))
        if self.placement not in (None, tuple(range(self.world_size))):
            raise ConfigError(
                "strategy: placement does not list the devices in order, and it is the launcher that puts ranks on "
                "devices: order the hostfile so, and leave placement null"
            )
        return {setting: _as_text(getattr(self, name)) for name, setting in SETTINGS.items()}

    def config(self, model: ModelConfig, **more: Any) -> Config:
        """Return the configuration of a run with this strategy: one iteration on random tokens, where no more is said.

        Args:
            model: the model section.
            **more: sections that are not to be the defaults, by their names in `Config`.

        Raises:
            ConfigError: if the trainer does not support the strategy, or it does not fit the model.
        """
        settings = self.settings()

        def section(of: type[Any], **others: Any) -> Any:
            return of(**{each.name: settings[each.name] for each in fields(of) if each.name in settings}, **others)

        sections = {
            "parallel": section(ParallelConfig),
            "batch": section(BatchConfig),
            "training": section(TrainingConfig, train_iters=1),
            "optimizer": section(OptimizerConfig, lr=1e-4),
            "precision": PrecisionConfig(),
            "data": DataConfig(mock_data=True),
            "checkpoint": CheckpointConfig(),
            "logging": LoggingConfig(),
            "deepspeed": DeepSpeedConfig(),
        }
        return Config(model=model, **(sections | more))

    def _check_supported(self, name: str, supported: tuple[object, ...]) -> None:
        value = getattr(self, name)
        if value not in supported:
            choices = " or ".join(json.dumps(choice) for choice in supported)
            raise ConfigError(f"strategy: {name} {json.dumps(value)} cannot be trained yet: use {choices}")


def read_strategy_settings(path: str) -> dict[str, Any]:
    """Read a strategy file, and return what it sets in the configuration, by field of its sections.

    The file holds a strategy, or an entry of the search's output, which has one under `strategy`. Fields that it
    leaves out, or holds null for where null means "your choice", are not in the answer.

    Raises:
        ConfigError: if the file cannot be read, or the strategy cannot be trained.
    """
    document = read_json(path, "--strategy")
    if isinstance(document, Mapping) and isinstance(document.get("strategy"), Mapping):
        document = document["strategy"]
    settings = Strategy.from_json(document).settings()
    assert isinstance(document, Mapping)
    given = {SETTINGS[name] for name in document if name in SETTINGS}
    if settings["global_batch_size"] is None:
        given.discard("global_batch_size")
    return {name: value for name, value in settings.items() if name in given}


def _as_text(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def _check_whole(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"strategy: {name} {json.dumps(value)} is not a whole number from {least}: give one")


def _check_list(name: str, values: object, *, least: int) -> None:
    if not isinstance(values, tuple):
        raise ConfigError(f"strategy: {name} {json.dumps(values)} is not a list: write it as [1, 2]")
    for value in values:
        _check_whole(name, value, least=least)
