"""The fields of a strategy: each is declared once, with all that is done with it in general."""

from dataclasses import dataclass
from operator import neg

from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES
from megatron_terapipe.dimensions import Tried, dimension, switch, whole, whole_list, word, word_or_bounds

__all__ = ["StrategyFields"]

SOLVED = "solved"
"""The stage partition that balances the predicted time of stages; in a strategy it is a list of bounds."""

WHOLE_LAYERS = ("none", "selective", "full")
RECOMPUTE = (*WHOLE_LAYERS, "stage")
ZERO_STAGES = (0, 1)
KEY_VALUE_GRADIENTS = ("fp32", "bf16")

MODEL_CHUNKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Model chunks that are tried. With more, a stage has few layers, and launches and transfers are most of its time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyFields:
    """All that a strategy chooses, field by field; `Strategy` is made of them.

    The keys of its JSON object are the names of these fields, in their order.
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

    sequence_parallel_size: int = dimension(
        1,
        kind=whole(),
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
        kind=whole(),
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
        kind=whole(),
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

    num_token_slices: int = dimension(
        1,
        kind=whole(),
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
        kind=whole_list(1),
        flag_help=(8, "lengths of the token slices: 704,688,656"),
        label=(7, "lengths of token slices"),
        none="equal",
        column=(13, "cut"),
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
        flag_help=(6, "micro-batch sizes"),
        label=(8, "micro-batch size"),
        column=(6, "mbs"),
        phrase=(5, "micro-batch {}"),
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
        kind=whole(),
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
        kind=switch(),
        tried=(False, True),
        axis="sequence_parallel",
        flag_help=(13, "sequence parallelism: off, on"),
        label=(10, "sequence parallelism"),
        column=(12, "sp"),
        dropped=3,
        phrase=(11, "sequence parallel"),
        tie=9,
    )
    """Whether tensor-parallel ranks share the tokens between the matrices, too."""

    recompute: str = dimension(
        "none",
        kind=word(),
        setting="recompute_granularity",
        trained=RECOMPUTE,
        priced=RECOMPUTE,
        tried=WHOLE_LAYERS,
        tried_if_long=("stage",),
        axis="recompute",
        flag_help=(10, f"recomputation among {', '.join(RECOMPUTE)}"),
        label=(11, "recomputation"),
        column=(9, "recompute"),
        dropped=6,
        phrase=(9, "recompute {}"),
        tie=8,
        tie_key=lambda mode: RECOMPUTE.index(mode) if mode in RECOMPUTE else len(RECOMPUTE),
    )
    """Activations recomputed in the backward: none, selective, full, or those of a whole stage at once."""

    offload: bool = dimension(
        False,
        kind=switch(),
        setting="offload_token_slices",
        tried=(False,),
        tried_if_long=(True,),
        axis="recompute",
        flag_help=(11, "copies of token slices in the memory of the host: off, on"),
        label=(12, "offload"),
        column=(10, "offload"),
        usual="no",
        dropped=7,
        phrase=(10, "offload"),
        tie=16,
    )
    """Whether keys, values and stage inputs of token slices wait in the memory of the host."""

    key_value_gradients: str = dimension(
        "fp32",
        kind=word(),
        trained=KEY_VALUE_GRADIENTS,
        priced=KEY_VALUE_GRADIENTS,
        tried=("fp32",),
        flag_help=(16, "type that gradients of keys and values are kept in: fp32, or bf16, which rounds them"),
        label=(16, "gradients of keys and values"),
        column=(16, "dK dV"),
        usual="fp32",
        dropped=9,
        phrase=(12, "dK and dV in {}"),
        tie=18,
        tie_key=lambda kept: KEY_VALUE_GRADIENTS.index(kept) if kept in KEY_VALUE_GRADIENTS else 2,
    )
    """Type in which gradients of keys and values are kept between the backwards of token slices. The search tries what
    rounds them only where it is asked to: it changes the numbers of a run."""

    zero_stage: int = dimension(
        1,
        kind=whole(0),
        trained=ZERO_STAGES,
        priced=ZERO_STAGES,
        tried=(1, 0),
        axis="zero",
        flag_help=(12, "ZeRO stages, 0 or 1"),
        label=(13, "ZeRO stage"),
        column=(11, "ZeRO"),
        dropped=4,
        phrase=(12, "ZeRO {}"),
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
        flag_help=(14, f"rules among uniform, parameters, {SOLVED}; or the bounds of one partition: 0,5,12"),
        label=(14, "stage partition"),
        column=(14, "stages"),
        usual="uniform",
        dropped=1,
        tie=12,
    )
    """How layers are dealt to stages: a rule, or the first layer of each stage and the end of the last."""

    vocabulary_stages: bool = dimension(
        False,
        kind=switch(),
        found=("on",),
        tried=(False,),
        flag_help=(15, "stages with a part of the vocabulary: off"),
        label=(15, "vocabulary stages"),
        column=(15, "vocabulary"),
        usual="no",
        dropped=8,
        phrase=(12, "vocabulary stages"),
        tie=17,
    )
    """Whether each pipeline rank has one more stage, with its part of the output layer's vocabulary."""

    placement: tuple[int, ...] | None = dimension(
        None, kind=whole_list(0), setting="", label=(17, "placement"), none="as the hosts come", tie=14
    )
    """Device of the cluster for each rank; None = in the order of the hostfile."""
