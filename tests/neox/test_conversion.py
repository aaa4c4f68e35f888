"""NeoX's settings become flags that the trainer takes, and that mean the same."""

import shlex
from math import sqrt
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import Config, flops
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.conversion import Conversion, Effect
from megatron_terapipe.neox.convert import convert
from megatron_terapipe.neox.keys import FIXED, HARMLESS, SWITCHES, VALUES

LEAST = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "train_micro_batch_size_per_gpu": 2,
    "train_iters": 100,
    "data_path": "corpus_text_document",
    "vocab_file": "vocab.json",
    "merge_file": "merges.txt",
}
"""What NeoX itself cannot do without."""

SMALL = {
    "pipe_parallel_size": 2,
    "model_parallel_size": 1,
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "norm": "layernorm",
    "pos_emb": "rotary",
    "rotary_pct": 0.25,
    "no_weight_tying": True,
    "gpt_j_residual": False,
    "output_layer_parallelism": "column",
    "scaled_upper_triang_masked_softmax_fusion": True,
    "bias_gelu_fusion": True,
    "attention_config": [[["flash"], 12]],
    "optimizer": {"type": "Adam", "params": {"lr": "6e-4", "betas": [0.9, 0.95], "eps": 1e-8}},
    "min_lr": 6e-5,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 500000000, "overlap_comm": True},
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "data_impl": "mmap",
    "checkpoint_activations": True,
    "checkpoint_num_layers": 2,
    "partition_activations": True,
    "gradient_clipping": 0.5,
    "weight_decay": 0.1,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12},
    "train_iters": 320000,
    "lr_decay_iters": 320000,
    "lr_decay_style": "cosine",
    "warmup": 0.02,
    "checkpoint_factor": 10000,
    "save": "checkpoints",
    "log_interval": 7,
    "wall_clock_breakdown": True,
    "data_path": "data/enwik8_text_document",
    "vocab_file": "vocab.json",
    "merge_file": "merges.txt",
    "tokenizer_type": "GPT2BPETokenizer",
}
LLAMA = {
    "pipe_parallel_size": 1,
    "make_vocab_size_divisible_by": 1,
    "num_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 32768,
    "num_attention_heads": 32,
    "num_kv_heads": 8,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "pos_emb": "rotary",
    "rotary_pct": 1,
    "no_weight_tying": True,
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-5,
    "use_bias_in_norms": False,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "activation": "swiglu",
    "mlp_multiple_of": 256,
    "precision": "bfloat16",
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 1,
    "train_iters": 1000,
    "train_data_paths": ["a", "b"],
    "train_data_weights": [1.0, 2.5],
    "valid_data_paths": ["c"],
    "test_data_paths": ["d"],
    "tokenizer_type": "HFTokenizer",
    "vocab_file": "tokenizer.json",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "lr_decay_style": "constant",
}


def parsed(conversion: Conversion) -> Config:
    """What the trainer makes of the words that a shell makes of the command."""
    command = shlex.split(conversion.command().replace("\\\n", " "))
    words = command[command.index("pretrain_gpt.py") + 1 :]
    assert words == conversion.words()
    return parse_arguments(words)


def keys_that(conversion: Conversion, effect: Effect) -> set[str]:
    return {note.key for note in conversion.notes if note.effect is effect}


def converted(**changes: Any) -> Conversion:
    return convert(LEAST | changes)


def test_a_small_model_means_the_same() -> None:
    conversion = convert(SMALL, 8)
    config = parsed(conversion)
    model = config.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.activation) == (12, 768, 3072, "gelu")
    assert (model.position_embedding_type, model.rotary_percent, model.rotary_base) == ("rope", 0.25, 10000.0)
    assert (model.untie_embeddings_and_output_weights, model.disable_bias_linear) == (True, False)
    assert (model.hidden_dropout, model.attention_dropout, model.init_method_std) == (0.0, 0.0, 0.02)
    assert config.parallel.pipeline_model_parallel_size == 2
    assert (config.batch.micro_batch_size, config.global_batch_size(4)) == (4, 32)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.min_lr, optimizer.adam_beta2, optimizer.adam_eps) == (6e-4, 6e-5, 0.95, 1e-8)
    assert (optimizer.lr_decay_style, optimizer.lr_warmup_fraction, optimizer.clip_grad) == ("cosine", 0.02, 0.5)
    assert (config.precision.dtype, config.precision.initial_loss_scale) == ("fp16", 4096.0)
    assert (config.precision.loss_scale, config.precision.loss_scale_window) == (None, 500)
    assert (config.training.recompute_granularity, config.training.recompute_num_layers) == ("full", 2)
    assert (config.training.train_iters, config.training.seed) == (320000, 1234)
    assert (config.checkpoint.save, config.checkpoint.save_interval) == ("checkpoints", 10000)
    assert (config.logging.log_interval, config.logging.eval_iters) == (7, 100)
    assert config.deepspeed.zero_reduce_bucket_size == 500000000
    assert not keys_that(conversion, Effect.CHANGES)
    assert keys_that(conversion, Effect.NEAR) == {"lr_decay_style"}
    assert "zero_optimization.overlap_comm" in keys_that(conversion, Effect.NONE)


def test_a_llama_means_the_same() -> None:
    conversion = convert(LLAMA)
    config = parsed(conversion)
    model = config.model
    assert (model.ffn_hidden_size, model.num_key_value_heads, model.activation) == (11008, 8, "swiglu")
    assert (model.normalization, model.layernorm_epsilon, model.disable_bias_linear) == ("rmsnorm", 1e-5, True)
    assert (config.precision.dtype, config.optimizer.zero_stage) == ("bf16", 1)
    assert config.global_batch_size(8) == 64
    assert config.data.train_data_path == ("1.0", "a", "2.5", "b")
    assert (config.data.valid_data_path, config.data.test_data_path) == (("c",), ("d",))
    assert (config.data.tokenizer_type, config.data.tokenizer_model) == ("HuggingFaceTokenizer", "tokenizer.json")
    assert not keys_that(conversion, Effect.CHANGES) and not keys_that(conversion, Effect.NEAR)
    whole = convert({**LLAMA, "num_kv_heads": None})
    published = parse_arguments([*whole.words(), "--vocab-size", "32000"]).model
    assert flops.model_parameters(published) == 6_738_415_616


def test_what_is_left_out_takes_neoxs_default_not_ours() -> None:
    config, bare = (
        parsed(converted()),
        parse_arguments(
            "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 "
            "--train-iters 100 --lr 1 --data-path corpus".split()
        ),
    )
    assert (config.model.hidden_dropout, config.model.attention_dropout, config.model.activation) == (
        0.1,
        0.1,
        "gelu-exact",
    )
    assert (config.optimizer.lr, config.optimizer.lr_warmup_fraction, config.optimizer.zero_stage) == (0.001, 0.01, 0)
    assert (config.logging.log_interval, config.logging.eval_iters, config.data.num_workers) == (100, 100, 2)
    assert config.data.tokenizer_type == "GPT2BPETokenizer"
    assert config.model.hidden_dropout != bare.model.hidden_dropout
    assert converted(norm="rmsnorm").words().count("1e-08") == 2  # The norm's and Adam's.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"mlp_type": "llama", "activation": "silu", "use_bias_in_attn_linear": False},
            "--activation swiglu --ffn-hidden-size 256",
        ),
        ({"activation": "swiglu"}, "--activation swiglu --ffn-hidden-size 85"),
        ({"activation": "relu", "intermediate_size": 100, "mlp_multiple_of": 64}, "--ffn-hidden-size 128"),
        ({"norm": "rmsnorm", "rms_norm_epsilon": 0.5}, "--normalization rmsnorm --layernorm-epsilon 0.5"),
        ({"pos_emb": "none"}, "--position-embedding-type none"),
        ({"fp16": {"enabled": True, "type": "bfloat16"}}, "--bf16"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "--fp16 --loss-scale 128"),
        ({"zero_optimization": {"stage": 3}}, "--zero-stage 1"),
        ({"fp16": {"enabled": True}}, "--zero-stage 1"),
        ({"pipe_parallel_size": 0}, "--pipeline-model-parallel-size 1"),
        ({"pipe_parallel_size": 2, "pipe_partition_method": "parameters"}, "--stage-partition parameters"),
        ({"lr_decay_fraction": 0.5}, "--lr-decay-iters 50"),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.5}}}, "--optimizer sgd --sgd-momentum 0.5"),
        ({"optimizer": {"params": {"weight_decay": 0.3}}}, "--weight-decay 0.3"),
        ({"use_wandb": True, "wandb_run_name": "x"}, "--wandb-project neox --wandb-exp-name x"),
        ({"save": "a b", "checkpoint_factor": 5, "keep_last_n_checkpoints": 3}, "--save-interval 5"),
        ({"split": "90, 5, 5"}, "--split 90,5,5"),
        ({"tokenizer_type": "SPMTokenizer"}, "--tokenizer-type SPMTokenizer --tokenizer-model vocab.json"),
    ],
)
def test_settings_and_their_flags(changes: dict[str, Any], words: str) -> None:
    conversion = converted(**changes)
    assert f" {words} " in f" {' '.join(conversion.words())} "
    parsed(conversion)
    assert not keys_that(conversion, Effect.CHANGES)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"pos_emb": "alibi"}, "pos_emb"),
        ({"norm": "scalenorm"}, "norm"),
        ({"activation": "geglu"}, "activation"),
        ({"gpt_j_residual": True}, "gpt_j_residual"),
        ({"use_bias_in_norms": False}, "use_bias_in_norms"),
        ({"use_bias_in_mlp": False}, "use_bias_in_mlp"),
        ({"mlp_type": "llama", "activation": "silu"}, "mlp_type"),
        ({"attention_config": [[["global", "local"], 2]]}, "attention_config"),
        ({"init_method": "orthogonal"}, "init_method"),
        ({"output_layer_init_method": "xavier_uniform"}, "output_layer_init_method"),
        ({"optimizer": {"type": "sm3", "params": {}}}, "optimizer"),
        ({"optimizer": {"params": {"freeze_step": 3}}}, "optimizer.params.freeze_step"),
        ({"lr_decay_style": "exponential"}, "lr_decay_style"),
        ({"soft_prompt_tuning": {"enabled": True}}, "soft_prompt_tuning"),
        ({"tokenizer_type": "CharLevelTokenizer"}, "tokenizer_type"),
        ({"train_epochs": 2}, "train_epochs"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps"),
        ({"no_such_key": 1}, "no_such_key"),
    ],
)
def test_another_training_is_named_and_still_a_command(changes: dict[str, Any], key: str) -> None:
    conversion = converted(**changes)
    assert keys_that(conversion, Effect.CHANGES) == {key}
    parsed(conversion)


def test_initial_weights() -> None:
    conversion = convert({**SMALL, "init_method": "small_init", "output_layer_init_method": "wang_init"})
    assert parsed(conversion).model.init_method_std == pytest.approx(sqrt(2 / (5 * 768)), rel=1e-7)
    assert "output_layer_init_method" in keys_that(conversion, Effect.NEAR)


@pytest.mark.parametrize(
    ("batch", "world_size", "micro", "whole"),
    [
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, None, 2, 16),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": None}, 2, 4, 16),
        ({"gradient_accumulation_steps": 2}, 4, 2, 16),
        ({"gradient_accumulation_steps": 2, "num_nodes": 2, "num_gpus": 4, "pipe_parallel_size": 2}, None, 2, 16),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": None}, 4, 4, 16),
        ({}, None, 2, None),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, None, 2, None),
    ],
)
def test_batches(batch: dict[str, Any], world_size: int | None, micro: int, whole: int | None) -> None:
    conversion = convert(LEAST | batch, world_size)
    config = parsed(conversion)
    assert (config.batch.micro_batch_size, config.batch.global_batch_size) == (micro, whole)
    assert not keys_that(conversion, Effect.CHANGES)


@pytest.mark.parametrize(
    ("changes", "world_size", "line"),
    [
        ({"train_batch_size": 7}, None, "train_batch_size 7, train_micro_batch_size_per_gpu 2 do not fit each other"),
        (
            {"train_batch_size": 16, "gradient_accumulation_steps": 2},
            2,
            "train_batch_size 16, train_micro_batch_size_per_gpu 2, gradient_accumulation_steps 2 do not fit 2 data-",
        ),
        ({"pipe_parallel_size": 2}, 3, "3 processes are not a multiple of the 2 ranks of a model: change one of them"),
        ({"num_layers": "many"}, None, "num_layers many is not a number: give one"),
        ({"hidden_size": 1.5}, None, "hidden_size 1.5 is not a whole number: give one"),
        ({"rotary_pct": True}, None, "rotary_pct True is not a number: give one"),
        ({"optimizer": "Adam"}, None, "optimizer 'Adam' is not a mapping: write it as {...}"),
        ({"optimizer": {"params": {"betas": 0.9}}}, None, "optimizer.params.betas 0.9 are not two numbers: write them"),
        ({"attention_config": "flash"}, None, "attention_config 'flash' is not a list such as"),
        ({"train_data_paths": ["a", "b"], "train_data_weights": [1]}, None, "train_data_weights has 1 entries and "),
    ],
)
def test_settings_that_are_wrong(changes: dict[str, Any], world_size: int | None, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(LEAST | changes, world_size)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_what_sections_hold_beside_is_noted() -> None:
    conversion = converted(
        fp16={"fp16": True, "enabled": True, "consecutive_hysteresis": True},
        zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}, "reduce_scatter": False},
        deepspeed_extra_args={"compile": {"deepcompile": True}},
    )
    assert keys_that(conversion, Effect.NEAR) == {
        "fp16.consecutive_hysteresis",
        "deepspeed_extra_args.compile",
        "lr_decay_style",
    }
    assert keys_that(conversion, Effect.NONE) == {
        "zero_optimization.offload_optimizer",
        "zero_optimization.reduce_scatter",
    }


def test_the_launcher_gets_its_own() -> None:
    conversion = converted(
        hostfile="/job/hostfile", num_nodes=2, num_gpus=8, master_port=29500, deepspeed_slurm=True, comment="a b"
    )
    launch = conversion.command().splitlines()[0]
    assert launch == (
        "deepspeed --hostfile /job/hostfile --num_nodes 2 --num_gpus 8 --launcher_args '--comment=a b' "
        "--launcher slurm pretrain_gpt.py \\"
    )


def test_no_key_is_in_two_tables() -> None:
    tables = [*VALUES, *SWITCHES, *FIXED, *HARMLESS]
    assert len(tables) == len(set(tables))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted({*FIXED, *HARMLESS, "xyzzy", "no-such"})), st.sampled_from([1, "text", [2], {"a": 1}])
    )
)
def test_no_setting_goes_unmentioned(extra: dict[str, Any]) -> None:
    """What the tables know and what nobody knows: each has its note, unless it says what is so anyway."""
    conversion = converted(**extra)
    noted = {note.key for note in conversion.notes}
    agreeing = {key for key, value in extra.items() if key in FIXED and value in FIXED[key][0]}
    assert extra.keys() - noted == agreeing
    parsed(conversion)
