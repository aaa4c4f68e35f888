"""Sections and the rules between them: every refusal is one line with the value, the rule and the remedy."""

from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.plan.text_files import field_texts
from megatron_terapipe.arguments import Flag, build_config, flags, parse_arguments
from megatron_terapipe.config import BatchConfig, Config, DataConfig, ModelConfig, ParallelConfig
from megatron_terapipe.config.flops import block_forward_flops, linear_flops_per_token
from megatron_terapipe.config.logging import LoggingConfig
from megatron_terapipe.errors import ConfigError

REQUIRED = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 128,
    "micro_batch_size": 2,
    "train_iters": 10,
    "lr": 1e-3,
    "data_path": ("corpus",),
}


def config(**given: object) -> Config:
    return build_config({**REQUIRED, **given})


def refusal(**given: object) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**given)
    return str(caught.value)


ONE_NARROW_LAYER = '{"block_configs": [{}, {}, {"mlp": {"ffn_hidden_size": 6}}, {}]}'
SHARED_TOKENS = {"tensor_model_parallel_size": 4, "sequence_parallel": True}

# The values given, then the words that name the value and the rule, then those of the remedy.
REFUSALS = [
    ({"num_layers": 0}, "--num-layers 0 is not positive", "give 1 or more"),
    ({"hidden_size": -64}, "--hidden-size -64 is not positive", "give 1 or more"),
    ({"vocab_size": 0}, "--vocab-size 0 is not positive", "give 1 or more"),
    ({"layernorm_epsilon": 0.0}, "--layernorm-epsilon 0.0 is not positive", "give a number above 0"),
    ({"init_method_std": -0.1}, "--init-method-std -0.1 is out of range", "give 0 or more"),
    (
        {"hidden_size": 66},
        "--hidden-size 66 is not a multiple of --num-attention-heads 4",
        "change one of them",
    ),
    (
        {"num_key_value_heads": 3},
        "--num-key-value-heads 3 does not divide --num-attention-heads 4",
        "give one of its divisors",
    ),
    (
        {"max_position_embeddings": 64},
        "--seq-length 128 is more than --max-position-embeddings 64",
        "raise the latter to 128",
    ),
    ({"tensor_model_parallel_size": 0}, "--tensor-model-parallel-size 0 is not positive", "give 1 or more"),
    (
        {"tensor_model_parallel_size": 3},
        "--num-attention-heads 4 is not a multiple of --tensor-model-parallel-size 3",
        "change one of them",
    ),
    (
        {"tensor_model_parallel_size": 4, "num_key_value_heads": 2},
        "--num-key-value-heads 2 is not a multiple of --tensor-model-parallel-size 4",
        "change one of them",
    ),
    (
        {"tensor_model_parallel_size": 4, "ffn_hidden_size": 130},
        "--ffn-hidden-size 130 is not a multiple of --tensor-model-parallel-size 4",
        "change one of them",
    ),
    (
        {"tensor_model_parallel_size": 4, "heterogeneous_layers_config_path": ONE_NARROW_LAYER},
        "--ffn-hidden-size 6 is not a multiple of --tensor-model-parallel-size 4",
        "change one of them",
    ),
    (
        {**SHARED_TOKENS, "token_slices": "64,62,2"},
        "--sequence-parallel deals each token slice to 4 ranks, but one has 62 tokens",
        "that are multiples of 4",
    ),
    (
        {**SHARED_TOKENS, "seq_length": 126},
        "--sequence-parallel deals each token slice to 4 ranks, but one has 126 tokens",
        "and a --seq-length, that are multiples of 4",
    ),
    ({**SHARED_TOKENS, "num_token_slices": 33}, "--token-slices: 33 token slices of", "give between 1 and 32"),
    (
        {**SHARED_TOKENS, "num_token_slices": 33, "token_slices": "balanced"},
        "--token-slices: 33 token slices of",
        "give between 1 and 32",
    ),
    (
        {"no_pipeline_parallel": True, "pipeline_model_parallel_size": 2},
        "--no-pipeline-parallel contradicts --pipeline-model-parallel-size 2",
        "drop one of them",
    ),
    (
        {"pipeline_model_parallel_size": 5},
        "--pipeline-model-parallel-size 5 is more than --num-layers 4",
        "give 4 stages or less",
    ),
    ({"token_slices": "balanced"}, "--token-slices balanced does not say how many", "add --num-token-slices"),
    ({"token_slices": "64,many"}, "--token-slices: token slices '64,many' are not whole numbers", "write them as"),
    ({"token_slices": "64,0,64"}, "--token-slices: token slices 64,0,64", "at least one token"),
    (
        {"token_slices": "64,32,16"},
        "--token-slices: token slices 64,32,16 sum to 112, but the sequence has 128 tokens",
        "change one of them by +16",
    ),
    (
        {"token_slices": "64,64", "num_token_slices": 3},
        "--num-token-slices 3 contradicts --token-slices 64,64, which lists 2",
        "drop the former",
    ),
    ({"num_token_slices": 129}, "--num-token-slices 129 is more than the 128 tokens", "give 128 or less"),
    ({"num_token_slices": 0}, "--num-token-slices 0 is not positive", "give 1 or more"),
    (
        {"stage_partition": "half"},
        "--stage-partition: stage partition 'half' is neither uniform nor parameters, nor a list",
        "a list as 0,5,12",
    ),
    (
        {"stage_partition": "0,2,4"},
        "--stage-partition 0,2,4 has 2 stages, but --pipeline-model-parallel-size is 1",
        "give 2 bounds, the first layer of each stage and the end",
    ),
    (
        {"stage_partition": "0,3,3", "pipeline_model_parallel_size": 2},
        "--stage-partition: stage partition 0,3,3 does not rise from 0",
        "give the first layer of each stage",
    ),
    (
        {"stage_partition": "0,2,6", "pipeline_model_parallel_size": 2},
        "--stage-partition 0,2,6 ends at 6, but --num-layers is 4",
        "end it with 4",
    ),
    ({"distributed_timeout_minutes": 0}, "--distributed-timeout-minutes 0 is not positive", "give"),
    ({"micro_batch_size": 0}, "--micro-batch-size 0 is not positive", "give 1 or more"),
    (
        {"global_batch_size": 7},
        "--global-batch-size 7 is not a multiple of --micro-batch-size 2",
        "give a multiple, such as 8",
    ),
    ({"train_iters": 0}, "--train-iters 0 is not positive", "give 1 or more"),
    ({"exit_interval": 0}, "--exit-interval 0 is not positive", "give 1 or more"),
    ({"seed": -1}, "--seed -1 is out of range", "give 0 or more"),
    (
        {"recompute_granularity": "some"},
        "--recompute-granularity some is not known",
        "choose none, selective, full or stage",
    ),
    ({"optimizer": "lamb"}, "--optimizer lamb is not known", "choose adam or sgd"),
    ({"lr": 0.0}, "--lr 0.0 is not positive", "give a number above 0"),
    ({"lr": float("nan")}, "--lr nan is not a number", "give one"),
    ({"lr": float("inf")}, "--lr inf is more than 100", "give 100 or less"),
    ({"min_lr": 0.1}, "--min-lr 0.1 is above --lr 0.001", "give 0.001 or less"),
    (
        {"lr_decay_style": "square"},
        "--lr-decay-style square is not known",
        "choose constant, linear, cosine, inverse-square-root or WSD",
    ),
    ({"lr_warmup_fraction": 1.0}, "--lr-warmup-fraction 1.0 is out of range", "give 0 or more, below 1"),
    (
        {"lr_warmup_iters": 2, "lr_warmup_fraction": 0.1},
        "--lr-warmup-iters 2 and --lr-warmup-fraction 0.1 both say how long the warmup is",
        "drop one of them",
    ),
    ({"lr_warmup_iters": 10}, "--lr-warmup-iters 10 leaves nothing of the 10 iterations", "give 9 or less"),
    ({"clip_grad": -1.0}, "--clip-grad -1.0 is out of range", "give 0 or more"),
    ({"adam_beta2": 1.0}, "--adam-beta2 1.0 is out of range", "give 0 or more, below 1"),
    ({"zero_stage": 2}, "--zero-stage 2: DeepSpeed cannot combine ZeRO 2 or 3 with pipelines", "use 0 or 1"),
    ({"zero_stage": 4}, "--zero-stage 4 is not known", "choose 0 or 1"),
    ({"fp16": True, "bf16": True}, "--fp16 and --bf16 exclude each other", "drop one of them"),
    ({"fp16": True, "zero_stage": 0}, "--fp16 with --zero-stage 0 would train on wrongly", "use --zero-stage 1"),
    (
        {"bf16": True, "zero_stage": 0, "accumulate_allreduce_grads_in_fp32": True},
        "--accumulate-allreduce-grads-in-fp32 with --bf16 and --zero-stage 0 is not in DeepSpeed",
        "use --zero-stage 1",
    ),
    ({"initial_loss_scale": 1000.0}, "--initial-loss-scale 1000.0 is not a power of 2", "such as 65536"),
    ({"min_loss_scale": 0.5}, "--min-loss-scale 0.5 is not a whole number", "such as 1"),
    ({"data_path": ("0.3", "wiki", "books")}, "--data-path 0.3 wiki books is neither", "write it as 0.3 wiki"),
    ({"data_path": ("0.3", "wiki", "books", "0.7")}, "--data-path 0.3 wiki books 0.7 is neither", "write it as"),
    ({"data_path": ("0", "wiki")}, "--data-path 0 wiki is neither", "write it as 0.3 wiki"),
    ({"data_path": ()}, "--data-path (nothing) is neither", "write it as 0.3 wiki"),
    ({"split": "90,x"}, "--split 90,x is not three shares", "write it as 969,30,1"),
    ({"split": "0,1,1"}, "--split 0,1,1 is not three shares", "write it as 969,30,1"),
    ({"split": "1,1,1,1"}, "--split 1,1,1,1 is not three shares", "write it as 969,30,1"),
    ({"tokenizer_type": "BertWordPiece"}, "--tokenizer-type BertWordPiece is not known", "choose byte, GPT2BPE"),
    (
        {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "vocab.json"},
        "--tokenizer-type GPT2BPETokenizer reads two files",
        "add --vocab-file and --merge-file",
    ),
    ({"num_workers": -1}, "--num-workers -1 is out of range", "give 0 or more"),
    ({"keep_last_n_checkpoints": 5}, "--keep-last-n-checkpoints 5 does not say where to save", "add --save"),
    ({"finetune": True}, "--finetune has nothing to load", "add --load"),
    ({"exit_on_missing_checkpoint": True}, "--exit-on-missing-checkpoint has nothing to load", "add --load"),
    ({"eval_interval": 0}, "--eval-interval 0 is not positive", "give 1 or more"),
    ({"eval_iters": -1}, "--eval-iters -1 is out of range", "give 0 or more"),
    ({"log_interval": 0}, "--log-interval 0 is not positive", "give 1 or more"),
    (
        {"timeline": "out", "timeline_iterations": "3,8-11"},
        "--timeline-iterations 3,8-11 goes on after the last of --train-iters 10",
        "give 10 or less",
    ),
    ({"timeline_iterations": "3"}, "--timeline-iterations 3 says not where to", "add --timeline"),
    (
        {"timeline": "out", "timeline_iterations": "3-"},
        "--timeline-iterations 3- is no list of iterations",
        "write it as 10 or 10,20 or 30-34",
    ),
    (
        {"timeline": "out", "timeline_iterations": "5-3"},
        "--timeline-iterations 5-3 is no list of iterations",
        "write it as 10",
    ),
    (
        {"timeline": "out", "timeline_iterations": "0"},
        "--timeline-iterations 0 names an iteration that is never done",
        "count from 1",
    ),
]


@pytest.mark.parametrize(("given", "rule", "remedy"), REFUSALS)
def test_refusal_is_one_line_with_value_rule_and_remedy(given: dict[str, object], rule: str, remedy: str) -> None:
    line = refusal(**given)
    assert "\n" not in line
    assert line.startswith(rule), line
    assert remedy in line.removeprefix(rule), line


def test_derived_sizes() -> None:
    model = config().model
    assert (model.ffn_hidden_size, model.num_key_value_heads, model.kv_channels) == (256, 4, 16)
    assert model.max_position_embeddings == 128
    assert config(hidden_size=66, kv_channels=16).model.kv_channels == 16


def test_vocabulary_is_padded() -> None:
    assert config(vocab_size=50257).model.padded_vocab_size() == 50304
    # A tensor-parallel size that divides 128 changes nothing; one that does not must divide the rows as well.
    sizes = {2: 50304, 8: 50304, 128: 50304, 256: 50432, 5: 50560, 6: 50304, 100: 51200}
    for size, rows in sizes.items():
        assert config(vocab_size=50257).model.padded_vocab_size(tensor_parallel_size=size) == rows
    with pytest.raises(ConfigError, match=r"--vocab-size"):
        config().model.padded_vocab_size()


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, (128,)),
        ({"num_token_slices": 3}, (43, 43, 42)),
        ({"token_slices": "64,40,24"}, (64, 40, 24)),
        ({"token_slices": "64, 40, 24", "num_token_slices": 3}, (64, 40, 24)),
        ({"token_slices": "balanced", "num_token_slices": 1}, (128,)),
    ],
)
def test_token_slices(given: dict[str, object], lengths: tuple[int, ...]) -> None:
    assert config(**given).token_slices().lengths == lengths
    assert config(**given).parallel.num_token_slices == len(lengths)


def test_balanced_token_slices_shorten_and_have_equal_flops() -> None:
    long = config(seq_length=8192, token_slices="balanced", num_token_slices=4)
    cut = long.token_slices()
    assert list(cut.lengths) == sorted(cut.lengths, reverse=True)
    assert sum(cut.lengths) == 8192
    # Forward and backward: a matrix product takes 1 + 2 times its forward, flash attention 1 + 2.5.
    (block,) = set(long.model.blocks)
    linear = [length * linear_flops_per_token(long.model, block) for length in cut.lengths]
    forward = [block_forward_flops(long.model, block, end - start, start) for start, end in cut.bounds()]
    costs = [3 * of_linear + 3.5 * (whole - of_linear) for of_linear, whole in zip(linear, forward, strict=True)]
    assert max(costs) - min(costs) < 0.01 * max(costs)


def test_sequence_parallelism_of_one_rank_is_none() -> None:
    assert not config(sequence_parallel=True, seq_length=127).parallel.sequence_parallel
    assert config(**SHARED_TOKENS).parallel.sequence_parallel


def test_parts_left_out_are_shared_by_any_number_of_ranks() -> None:
    layers = '{"block_configs": [{"attention": {"no_op": true}}, {"mlp": {"no_op": true}}, {}, {}]}'
    parallel = config(tensor_model_parallel_size=4, heterogeneous_layers_config_path=layers).parallel
    assert parallel.tensor_model_parallel_size == 4


def test_layout_takes_the_rest_of_the_world_for_data() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2, num_token_slices=4)
    layout = parallel.layout(8)
    assert (layout.data_parallel_size, layout.pipeline_parallel_size, layout.num_token_slices) == (4, 2, 4)
    with pytest.raises(ConfigError, match=r"7 is not a multiple of .*launch a multiple of 2"):
        parallel.layout(7)
    with pytest.raises(ConfigError, match=r"--data-parallel-size 2 contradicts the 8 processes .*launch 4 processes"):
        ParallelConfig(pipeline_model_parallel_size=2, data_parallel_size=2).layout(8)


def test_micro_batches() -> None:
    assert config(global_batch_size=16).num_micro_batches(2) == 4
    assert config().num_micro_batches(4) == 1
    assert config().global_batch_size(4) == 8
    with pytest.raises(ConfigError) as caught:
        BatchConfig(micro_batch_size=2, global_batch_size=8).num_micro_batches(3)
    assert str(caught.value) == (
        "--global-batch-size 8 is not a multiple of --micro-batch-size 2 x data-parallel size 3 = 6: "
        "give a multiple, such as 12"
    )


def test_stage_bounds() -> None:
    given = {"pipeline_model_parallel_size": 2}
    assert config(**given).parallel.stage_bounds() is None
    assert config(stage_partition="0,3,4", **given).parallel.stage_bounds() == StagePartition((0, 3, 4))


@pytest.mark.parametrize(
    ("words", "pairs"),
    [
        (("wiki",), ((None, "wiki"),)),
        (("wiki", "books"), ((None, "wiki"), (None, "books"))),
        (("0.3", "wiki", "7", "books"), ((0.3, "wiki"), (7.0, "books"))),
    ],
)
def test_weighted_prefixes(words: tuple[str, ...], pairs: tuple[tuple[float | None, str], ...]) -> None:
    assert DataConfig(data_path=words).weighted_prefixes() == pairs


@pytest.mark.parametrize(
    ("split", "shares"),
    [("8,1,1", (0.8, 0.1, 0.1)), ("3,1", (0.75, 0.25, 0.0)), ("100", (1.0, 0.0, 0.0))],
)
def test_split_shares(split: str, shares: tuple[float, float, float]) -> None:
    assert DataConfig(data_path=("wiki",), split=split).split_shares() == pytest.approx(shares)


@pytest.mark.parametrize(
    ("given", "save", "directory"),
    [(None, None, "stalled_pipeline"), (None, "there", "there/stalled_pipeline"), ("here", "there", "here")],
)
def test_ledgers_stand_with_the_checkpoints(given: str | None, save: str | None, directory: str) -> None:
    assert LoggingConfig(ledger_directory=given).ledgers(save) == Path(directory)


def test_dtype() -> None:
    assert [config(**given).precision.dtype for given in ({}, {"fp16": True}, {"bf16": True})] == [
        "fp32",
        "fp16",
        "bf16",
    ]


def test_sections_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        config().model.num_layers = 2  # type: ignore[misc]


def test_every_field_has_a_docstring_and_a_name_of_its_own() -> None:
    names: list[str] = []
    for section in get_type_hints(Config).values():
        assert is_dataclass(section)
        own = [declared.name for declared in fields(section)]
        assert sorted(field_texts(section)) == sorted(own), section
        names += own
    assert len(names) == len(set(names))


def test_model_config_alone() -> None:
    model = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=4)
    assert model.kv_channels == 4


def test_evaluating_alone_must_evaluate() -> None:
    with pytest.raises(ConfigError, match=r"^--skip-train with --eval-iters 0 leaves nothing to do: drop one of them$"):
        parse_arguments(
            "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --lr 1"
            " --data-path d --train-iters 1 --skip-train --eval-iters 0".split()
        )


SMALL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8, "micro_batch_size": 1}
GIVEN = SMALL | {"train_iters": 1, "lr": 1e-3, "mock_data": True}
NUMBERS = [each for each in flags() if each.kind in (int, float) and not each.choices]


@pytest.mark.parametrize("each", NUMBERS, ids=lambda each: each.name)
def test_a_number_beyond_all_sense_is_refused(each: Flag) -> None:
    for number in (10**30, 10**400) if each.kind is int else (1e300, float("inf"), float("nan")):
        with pytest.raises(ConfigError) as caught:
            build_config(GIVEN | {each.name: (number,) if each.repeated else number})
        line = str(caught.value)
        assert line.startswith(f"--{each.name.replace('_', '-')} ") and ": give " in line


def test_help_and_the_list_of_flags_state_the_bounds() -> None:
    texts = {each.name: each.help for each in NUMBERS}
    assert texts["num_layers"].endswith("Transformer layers. 1 to 10,000.")
    assert texts["lr"].endswith(" Above 0, up to 100.")
    assert texts["hidden_dropout"].endswith(" 0 or more, below 1.")
    assert all(each.option.bounds for each in NUMBERS)
