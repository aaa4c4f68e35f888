"""The strategy of a training run: its fields, each declared once by `dimension`; to and from JSON and configurations.

`DIMENSIONS` has the fields as data, for flags, tables, comparisons and ties.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from operator import neg
from typing import Any, NamedTuple

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.text_files import field_texts
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
from megatron_terapipe.dimensions import Dimension, Tried, dimension, dimensions_of
from megatron_terapipe.errors import ConfigError, errors_in

__all__ = ["Strategy"]

SOLVED = "solved"
"""The stage partition that balances the predicted time of stages; in a strategy it is a list of bounds."""

WHOLE_LAYERS = ("none", "selective", "full")
RECOMPUTE = (*WHOLE_LAYERS, "stage")
KEY_VALUE_GRADIENTS = ("fp32", "bf16")
LATENT_KEPT = ("expanded", "latent")


class KeptKeys(NamedTuple):
    """Form in which keys and values are kept from token slice to token slice."""

    gradients: str = "fp32"
    """Type of their gradients."""
    latents: bool = False
    """Whether latent attention keeps latents in their place."""


USUAL_KEYS = KeptKeys()


MODEL_CHUNKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Model chunks that are tried. With more, a stage has few layers, and launches and transfers are most of its time."""


LEAST_TOKENS = 256
"""Tokens of an expert in a token slice below which its products are slow: two tiles of rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Parallelism, batch and memory savings of a run; the keys of its JSON object are its fields, in their order.

    Values that the trainer cannot run are valid here: the search prices them, and `settings` refuses them.
    """

    data_parallel_size: int = dimension(
        1,
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

    sequence_parallel_size: int = dimension(
        1,
        setting="ds_sequence_parallel_size",
        tried=Tried.SHARES_OF_HEADS,
        ranks=True,
        flag_help=(2, "sequence-parallel sizes"),
        label=(2, "sequence-parallel size"),
        column=(2, "seq"),
        usual="1",
        phrase=(2, "seq {}"),
        tie=15,
    )
    """Ranks that share the tokens of each token slice, and the heads of its attention."""

    tensor_parallel_size: int = dimension(
        1,
        setting="tensor_model_parallel_size",
        tried=Tried.DIVISORS_OF_DEVICES,
        ranks=True,
        flag_help=(3, "tensor-parallel sizes"),
        label=(3, "tensor-parallel size"),
        column=(3, "tp"),
        phrase=(3, "tp {}"),
        always=True,
        tie=3,
    )
    """Ranks that share each layer."""

    pipeline_parallel_size: int = dimension(
        1,
        setting="pipeline_model_parallel_size",
        tried=Tried.DIVISORS_OF_DEVICES,
        ranks=True,
        flag_help=(4, "pipeline-parallel sizes"),
        label=(4, "pipeline ranks"),
        column=(4, "pp"),
        phrase=(4, "pp {}"),
        always=True,
        tie=4,
    )
    """Pipeline ranks."""

    expert_parallel_size: int = dimension(
        1,
        setting="expert_model_parallel_size",
        tried=Tried.SHARES_OF_EXPERTS,
        optional=True,
        flag_help=(4, "expert-parallel sizes"),
        label=(4, "expert-parallel size"),
        column=(4, "ep"),
        usual="1",
        phrase=(4, "ep {}"),
        tie=19,
    )
    """Ranks of a stage that share the experts of each layer; they are counted in the sizes above."""

    num_token_slices: int = dimension(
        1,
        tried=Tried.COUNTS_OF_TOKEN_SLICES,
        axis="token_slices",
        flag_help=(7, "numbers of token slices; 1 leaves sequences whole"),
        label=(6, "token slices"),
        column=(5, "S"),
        phrase=(8, "{} token slices"),
        tie=1,
    )
    """Token slices that every sequence is cut into."""

    token_slices: tuple[int, ...] | None = dimension(
        None,
        flag_help=(8, "lengths of the token slices: 704,688,656"),
        label=(7, "lengths of token slices"),
        none="equal",
        tie=13,
    )
    """Their lengths in tokens; None = as equal as can be."""

    micro_batch_size: int = dimension(
        1,
        tried=Tried.DIVISORS_OF_BATCH,
        axis="micro_batch",
        flag_help=(6, "micro-batch sizes"),
        label=(8, "micro-batch size"),
        column=(6, "mbs"),
        phrase=(5, "micro-batch {}"),
        always=True,
        tie=6,
    )
    """Sequences that go through the pipeline together."""

    global_batch_size: int | None = dimension(None, tie=7)
    """Sequences of one optimizer step; None = one micro-batch on each data-parallel rank."""

    schedule: str = dimension(
        "1f1b",
        setting="pipeline_schedule",
        trained=(*SCHEDULES, OPTIMISED),
        priced=tuple(SCHEDULES),
        found=(OPTIMISED,),
        tried=("1f1b", "interleaved", "zero-bubble", "gpipe"),
        tried_if_long=("breadth-first",),
        axis="order",
        flag_help=(9, f"schedules among {', '.join(SCHEDULES)}"),
        label=(9, "schedule"),
        column=(7, "schedule"),
        phrase=(6, "{}"),
        always=True,
        tie=11,
    )
    """Order in which a pipeline rank runs forwards and backwards."""

    num_model_chunks: int = dimension(
        1,
        tried=MODEL_CHUNKS,
        axis="order",
        flag_help=(5, "model chunks, the stages of each pipeline rank"),
        label=(5, "model chunks"),
        column=(8, "V"),
        phrase=(7, "{} model chunks"),
        tie=2,
    )
    """Stages that each pipeline rank owns."""

    sequence_parallel: bool = dimension(
        False,
        tried=(False, True),
        axis="sequence_parallel",
        flag_help=(13, "sequence parallelism: off, on"),
        label=(10, "sequence parallelism"),
        column=(12, "sp"),
        phrase=(11, "sequence parallel"),
        tie=9,
    )
    """Whether tensor-parallel ranks share the tokens between the matrices, too."""

    recompute: str = dimension(
        "none",
        setting="recompute_granularity",
        trained=RECOMPUTE,
        priced=RECOMPUTE,
        tried=WHOLE_LAYERS,
        tried_if_long=("stage",),
        axis="recompute",
        flag_help=(10, f"recomputation among {', '.join(RECOMPUTE)}"),
        label=(11, "recomputation"),
        column=(9, "recompute"),
        phrase=(9, "recompute {}"),
        tie=8,
        tie_key=lambda mode: RECOMPUTE.index(mode) if mode in RECOMPUTE else len(RECOMPUTE),
    )
    """Activations recomputed in the backward: none, selective, full, or of a whole stage at once."""

    offload: bool = dimension(
        False,
        setting="offload_token_slices",
        tried=(False,),
        tried_if_long=(True,),
        axis="recompute",
        flag_help=(11, "copies of token slices in the memory of the host: off, on"),
        label=(12, "offload"),
        column=(10, "offload"),
        usual="no",
        phrase=(10, "offload"),
        tie=16,
    )
    """Whether keys, values and stage inputs of token slices wait in the memory of the host."""

    key_value_gradients: str = dimension(
        "fp32",
        trained=KEY_VALUE_GRADIENTS,
        priced=KEY_VALUE_GRADIENTS,
        tried=("fp32",),
        flag_help=(16, "type that gradients of keys and values are kept in: fp32, or bf16, which rounds them"),
        label=(16, "gradients of keys and values"),
        column=(16, "dK dV"),
        usual="fp32",
        phrase=(12, "dK and dV in {}"),
        tie=18,
        tie_key=lambda kept: KEY_VALUE_GRADIENTS.index(kept) if kept in KEY_VALUE_GRADIENTS else 2,
    )
    """Type in which gradients of keys and values are kept between the backwards of token slices. The search tries
    `bf16`, which rounds them, only with its flag, because it changes the numbers of a run."""

    latent_kept: str = dimension(
        "expanded",
        trained=LATENT_KEPT,
        priced=LATENT_KEPT,
        tried=Tried.KEPT_OF_LATENTS,
        optional=True,
        flag_help=(
            17,
            "tensors that latent attention keeps for later token slices: expanded, keys and values; or latent",
        ),
        label=(18, "kept by latent attention"),
        column=(17, "kept"),
        usual="expanded",
        phrase=(12, "latents kept"),
        tie=21,
    )
    """Whether layers with latent attention keep keys and values of a token slice, or the latents that give them."""

    zero_stage: int = dimension(
        1,
        least=0,
        trained=(0, 1),
        priced=(0, 1, 3),
        tried=(1, 0, 3),
        axis="zero",
        flag_help=(12, "ZeRO stages, 0, 1 or 3"),
        label=(13, "ZeRO stage"),
        column=(11, "ZeRO"),
        phrase=(12, "ZeRO {}"),
        always=True,
        tie=10,
        tie_key=neg,
    )
    """ZeRO stage: 1 divides the optimizer state, 3 also gradients and weights, which are gathered for each forward and
    backward (arXiv 1910.02054 section 5)."""

    zero_shard_size: int | None = dimension(
        None,
        setting="",
        trained=(None,),
        tried=Tried.SHARDS_OF_A_NODE,
        optional=True,
        axis="zero",
        flag_help=(12, "ranks of a group that divides the states of ZeRO, among those with the same weights"),
        label=(14, "ranks that divide states"),
        none="all",
        column=(11, "shard"),
        usual="all",
        phrase=(12, "states over {} ranks"),
        tie=20,
    )
    """Neighbouring ranks with the same weights that divide the states of ZeRO; None = all of them. The ranks of a node
    with stage 3 are hybrid sharding (HSDP, arXiv 2304.11277 section 3.2.2)."""

    stage_partition: str | tuple[int, ...] = dimension(
        "uniform",
        least=0,
        priced=("uniform", "parameters", SOLVED),
        tried=("uniform", "parameters", SOLVED),
        axis="partition",
        flag_help=(14, f"rules among uniform, parameters, {SOLVED}; or the bounds of one partition: 0,5,12"),
        label=(14, "stage partition"),
        tie=12,
    )
    """How layers are dealt to stages: a rule, or the first layer of each stage and the end of the last."""

    vocabulary_stages: bool = dimension(
        False,
        found=("on",),
        tried=(False,),
        flag_help=(15, "stages with a part of the vocabulary: off"),
        label=(15, "vocabulary stages"),
        column=(15, "vocabulary"),
        usual="no",
        phrase=(12, "vocabulary stages"),
        tie=17,
    )
    """Whether each pipeline rank has one more stage, with its part of the output layer's vocabulary."""

    placement: tuple[int, ...] | None = dimension(
        None, least=0, setting="", label=(17, "placement"), none="as the hosts come", tie=14
    )
    """Device of the cluster for each rank; None = in the order of the hostfile."""

    @property
    def kept_keys(self) -> KeptKeys:
        """Form of keys, values and their gradients between token slices."""
        return KeptKeys(self.key_value_gradients, self.latent_kept == "latent")

    def __post_init__(self) -> None:
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
        copies = self.data_parallel_size * self.sequence_parallel_size
        if self.zero_shard_size is not None and copies % self.zero_shard_size:
            raise ConfigError(
                f"strategy: zero_shard_size {self.zero_shard_size} is not a divisor of data_parallel_size x "
                f"sequence_parallel_size = {copies}: change one of them"
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
        """Layout of its ranks, without token slices."""
        return ParallelLayout(
            data_parallel_size=self.data_parallel_size,
            sequence_parallel_size=self.sequence_parallel_size,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            expert_parallel_size=self.expert_parallel_size,
        )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank in one optimizer step."""
        sequences = self.micro_batch_size * self.data_parallel_size
        return (self.global_batch_size or sequences) // sequences

    @property
    def num_sequences(self) -> int:
        """Sequences of one optimizer step."""
        return self.num_micro_batches * self.micro_batch_size * self.data_parallel_size

    @property
    def num_stages(self) -> int:
        """Stages of all pipeline ranks, without stages of the vocabulary."""
        return self.pipeline_parallel_size * self.num_model_chunks

    @property
    def stages_of_a_rank(self) -> int:
        """Stages that each pipeline rank owns, that with its part of the vocabulary included."""
        return self.num_model_chunks + self.vocabulary_stages

    @property
    def granularity(self) -> int:
        """Tokens of which every token slice needs a multiple, as many as there are ranks that share its tokens."""
        return self.sequence_parallel_size * (self.tensor_parallel_size if self.sequence_parallel else 1)

    def few_tokens(self, model: ModelConfig) -> str | None:
        """A warning if experts have few tokens of a token slice, which makes their products slow; None if not."""
        if model.num_experts is None:
            return None
        of_slice = self.micro_batch_size * model.seq_length / (self.num_token_slices * self.granularity)
        mean = self.expert_parallel_size * of_slice * model.moe_router_topk / model.num_experts
        if mean >= LEAST_TOKENS:
            return None
        fewer = int(self.num_token_slices * mean / LEAST_TOKENS)
        remedy = f"take {fewer} token slices or fewer" if fewer > 1 else "take one token slice, or larger micro-batches"
        if self.num_token_slices == 1:
            remedy = "take larger micro-batches, or more expert-parallel ranks"
        return (
            f"an expert has {mean:.4g} tokens of a token slice on average, and its products are slow with fewer than "
            f"{LEAST_TOKENS}: {remedy}"
        )

    def cut(self, seq_length: int) -> TokenSlices:
        """Return the token slices of a sequence of `seq_length` tokens."""
        with errors_in("strategy"):
            if self.token_slices is None:
                return TokenSlices.uniform(seq_length, self.num_token_slices, granularity=self.granularity)
            return TokenSlices(self.token_slices).covering(seq_length)

    @classmethod
    def from_json(cls, document: object) -> "Strategy":
        """Read the JSON object of a strategy. Fields left out keep their defaults."""
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
        values |= {
            "data_parallel_size": data_parallel_size,
            "global_batch_size": config.global_batch_size(data_parallel_size),
            "num_token_slices": 1 if cut is None else len(cut),
            "token_slices": None if cut is None else cut.lengths,
        }
        if parallel.stage_partition != "parameters":
            values["stage_partition"] = "uniform" if stages.is_uniform else stages.bounds
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this strategy, every field in it but optional ones at their default."""
        values = {each.name: getattr(self, each.name) for each in DIMENSIONS}
        left_out = [each.name for each in DIMENSIONS if each.optional and values[each.name] == each.default]
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if name not in left_out
        }

    def settings(self) -> dict[str, Any]:
        """Return the settings of this strategy, by field of the configuration."""
        for each in DIMENSIONS:
            each.check_trained(getattr(self, each.name))
        if self.placement not in (None, tuple(range(self.world_size))):
            raise ConfigError(
                "strategy: placement does not list the devices in order, and it is the launcher that puts ranks on "
                "devices: order the hostfile so, and leave placement null"
            )
        return {each.setting: _as_text(getattr(self, each.name)) for each in DIMENSIONS if each.setting}

    def config(self, model: ModelConfig, **more: Any) -> Config:
        """Return the configuration of a run with this strategy: one iteration on random tokens, else defaults."""
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
        others = {name: kind() for name, kind in Config.sections().items() if name not in sections}
        return Config(**sections, **others)


class FoundStrategy(NamedTuple):
    """A strategy that was found for a run."""

    strategy: Strategy
    place: str
    """Where it comes from, for errors: `auto`, or the file of an earlier start of the run."""
    notices: tuple[str, ...]
    """Lines for the start of the run."""

    def to_json(self) -> dict[str, Any]:
        """Return it as an object of JSON."""
        return {"strategy": self.strategy.to_json(), "place": self.place, "notices": self.notices}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "FoundStrategy":
        """Read the object of `to_json`."""
        return cls(Strategy.from_json(document["strategy"]), document["place"], tuple(document["notices"]))


DIMENSIONS: tuple[Dimension, ...] = dimensions_of(Strategy)
"""All that a strategy chooses, in the order of its fields."""


def strategy_schema() -> dict[str, Any]:
    """Return the JSON Schema of the objects that `Strategy.from_json` reads."""
    texts = field_texts(Strategy)
    properties = {each.name: each.json_schema() | {"description": texts[each.name]} for each in DIMENSIONS}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _as_text(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value
