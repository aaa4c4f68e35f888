"""The strategy of a training run, as the search writes it and the trainer reads it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import prod
from operator import neg
from typing import Any, get_type_hints

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.partition import StagePartition
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES
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
from megatron_terapipe.config.parallel import AUTO, MOST_RANKS
from megatron_terapipe.dimensions import (
    Dimension,
    Tried,
    dimension,
    dimensions_of,
    switch,
    whole,
    whole_list,
    word,
    word_or_bounds,
)
from megatron_terapipe.errors import ConfigError

SOLVED = "solved"
"""The stage partition that balances the predicted time of stages; in a strategy it is a list of bounds."""

RECOMPUTE = ("none", "selective", "full")
ZERO_STAGES = (0, 1)

MODEL_CHUNKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Model chunks that are tried. With more, a stage has few layers, and launches and transfers are most of its time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Parallelism, batch and memory savings of a run.

    The keys of its JSON object are the names of these fields. Values that the trainer cannot run are valid here: the
    search prices them, and `settings` refuses them. Each field declares what is done with it (`dimensions.Dimension`).

    Raises:
        ConfigError: if a value is not of its type, or two contradict each other.
    """

    data_parallel_size: int = dimension(
        1,
        kind=whole(),
        tried=Tried.REST_OF_DEVICES,
        ranks=True,
        flag_help=(1, "data-parallel sizes"),
        label=(1, "data-parallel size"),
        column=(1, "dp"),
        phrase=(1, "dp {}"),
        always=True,
        tie=5,
    )
    """Ranks that share the batch."""

    tensor_parallel_size: int = dimension(
        1,
        kind=whole(),
        setting="tensor_model_parallel_size",
        tried=Tried.DIVISORS_OF_DEVICES,
        ranks=True,
        flag_help=(2, "tensor-parallel sizes"),
        label=(2, "tensor-parallel size"),
        column=(2, "tp"),
        phrase=(2, "tp {}"),
        always=True,
        tie=3,
    )
    """Ranks that share each layer."""

    pipeline_parallel_size: int = dimension(
        1,
        kind=whole(),
        setting="pipeline_model_parallel_size",
        tried=Tried.DIVISORS_OF_DEVICES,
        ranks=True,
        flag_help=(3, "pipeline-parallel sizes"),
        label=(3, "pipeline ranks"),
        column=(3, "pp"),
        phrase=(3, "pp {}"),
        always=True,
        tie=4,
    )
    """Pipeline ranks."""

    num_token_slices: int = dimension(
        1,
        kind=whole(),
        tried=Tried.COUNTS_OF_TOKEN_SLICES,
        axis="token_slices",
        flag_help=(6, "numbers of token slices; 1 leaves sequences whole"),
        label=(5, "token slices"),
        column=(4, "S"),
        phrase=(7, "{} token slices"),
        tie=1,
    )
    """Token slices that every sequence is cut into."""

    token_slices: tuple[int, ...] | None = dimension(
        None,
        kind=whole_list(1),
        flag_help=(7, "lengths of the token slices: 704,688,656"),
        label=(6, "lengths of token slices"),
        none="equal",
        column=(11, "cut"),
        usual="even",
        dropped=2,
        tie=13,
    )
    """Their lengths in tokens; None = as equal as can be."""

    micro_batch_size: int = dimension(
        1,
        kind=whole(),
        tried=Tried.DIVISORS_OF_BATCH,
        axis="micro_batch",
        flag_help=(5, "micro-batch sizes"),
        label=(7, "micro-batch size"),
        column=(5, "mbs"),
        phrase=(4, "micro-batch {}"),
        always=True,
        tie=6,
    )
    """Sequences that go through the pipeline together."""

    global_batch_size: int | None = dimension(None, kind=whole(optional=True), tie=7)
    """Sequences of one optimizer step; None = one micro-batch on each data-parallel rank."""

    schedule: str = dimension(
        "1f1b",
        kind=word(),
        setting="pipeline_schedule",
        trained=(*SCHEDULES, OPTIMISED),
        priced=tuple(SCHEDULES),
        tried=("1f1b", "interleaved", "zero-bubble", "gpipe"),
        axis="order",
        flag_help=(8, f"schedules among {', '.join(SCHEDULES)}"),
        label=(8, "schedule"),
        column=(6, "schedule"),
        phrase=(5, "{}"),
        always=True,
        tie=11,
    )
    """Order in which a pipeline rank runs forwards and backwards."""

    num_model_chunks: int = dimension(
        1,
        kind=whole(),
        tried=MODEL_CHUNKS,
        axis="order",
        flag_help=(4, "model chunks, the stages of each pipeline rank"),
        label=(4, "model chunks"),
        column=(7, "V"),
        phrase=(6, "{} model chunks"),
        tie=2,
    )
    """Stages that each pipeline rank owns."""

    sequence_parallel: bool = dimension(
        False,
        kind=switch(),
        tried=(False, True),
        axis="sequence_parallel",
        flag_help=(11, "sequence parallelism: off, on"),
        label=(9, "sequence parallelism"),
        column=(10, "sp"),
        dropped=3,
        phrase=(9, "sequence parallel"),
        tie=9,
    )
    """Whether tensor-parallel ranks share the tokens between the matrices, too."""

    recompute: str = dimension(
        "none",
        kind=word(),
        setting="recompute_granularity",
        trained=RECOMPUTE,
        priced=RECOMPUTE,
        tried=RECOMPUTE,
        axis="recompute",
        flag_help=(9, f"recomputation among {', '.join(RECOMPUTE)}"),
        label=(10, "recomputation"),
        column=(8, "recompute"),
        dropped=6,
        phrase=(8, "recompute {}"),
        tie=8,
        tie_key=lambda mode: RECOMPUTE.index(mode) if mode in RECOMPUTE else len(RECOMPUTE),
    )
    """Activations recomputed in the backward: none, selective or full."""

    zero_stage: int = dimension(
        1,
        kind=whole(0),
        trained=ZERO_STAGES,
        priced=ZERO_STAGES,
        tried=(1, 0),
        axis="zero",
        flag_help=(10, "ZeRO stages, 0 or 1"),
        label=(11, "ZeRO stage"),
        column=(9, "ZeRO"),
        dropped=4,
        phrase=(10, "ZeRO {}"),
        always=True,
        tie=10,
        tie_key=neg,
    )
    """ZeRO stage."""

    stage_partition: str | tuple[int, ...] = dimension(
        "uniform",
        kind=word_or_bounds(),
        priced=("uniform", "parameters", SOLVED),
        tried=("uniform", "parameters", SOLVED),
        axis="partition",
        flag_help=(12, f"rules among uniform, parameters, {SOLVED}; or the bounds of one partition: 0,5,12"),
        label=(12, "stage partition"),
        column=(12, "stages"),
        usual="uniform",
        dropped=1,
        tie=12,
    )
    """How layers are dealt to stages: a rule, or the first layer of each stage and the end of the last."""

    placement: tuple[int, ...] | None = dimension(
        None, kind=whole_list(0), setting="", label=(13, "placement"), none="as the hosts come", tie=14
    )
    """Device of the cluster for each rank; None = in the order of the hostfile."""

    def __post_init__(self) -> None:
        """Check types and pairs."""
        for each in DIMENSIONS:
            each.check(getattr(self, each.name))
        if self.world_size > MOST_RANKS:
            raise ConfigError(
                f"strategy: data_parallel_size x tensor_parallel_size x pipeline_parallel_size = {self.world_size} is "
                f"more than {MOST_RANKS:,} ranks: lower one of them"
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
    def num_micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank in one optimizer step."""
        sequences = self.micro_batch_size * self.data_parallel_size
        return (self.global_batch_size or sequences) // sequences

    @property
    def granularity(self) -> int:
        """Tokens of which every token slice needs a multiple: with sequence parallelism, ranks share them."""
        return self.tensor_parallel_size if self.sequence_parallel else 1

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
            config: the configuration.
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
            model: the model section.
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


def _as_text(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value
