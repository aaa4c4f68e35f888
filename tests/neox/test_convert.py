"""NeoX's settings become flags that the trainer takes, and that mean the same."""

import shlex
from dataclasses import fields
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.command.train import split
from megatron_terapipe.config import Config, OptimizerConfig, flops
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED as MODEL
from megatron_terapipe.errors import TRAINING_CANNOT_BE_RUN as TRAINING
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.convert import (
    BEFORE_2023_12,
    Conversion,
    convert,
    cut_off,
    layer_kinds,
    standard_deviation,
    table,
)
from megatron_terapipe.training.optimizer_schedules import LearningRateSchedule

LEAST = {
    **{"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128},
    **{"max_position_embeddings": 128, "train_micro_batch_size_per_gpu": 2, "train_iters": 100},
    **{"data_path": "corpus_text_document", "vocab_file": "vocab.json", "merge_file": "merges.txt"},
}
"""Settings that NeoX itself needs."""

EXPERTS: dict[str, Any] = {"moe_num_experts": 8, "moe_router_type": "topk"}

SMALL = {
    **{"pipe_parallel_size": 2, "model_parallel_size": 1, "num_layers": 12, "hidden_size": 768},
    **{"num_attention_heads": 12, "seq_length": 2048, "max_position_embeddings": 2048, "norm": "layernorm"},
    **{"pos_emb": "rotary", "rotary_pct": 0.25, "no_weight_tying": True, "gpt_j_residual": False},
    **{"output_layer_parallelism": "column", "scaled_upper_triang_masked_softmax_fusion": True},
    **{"bias_gelu_fusion": True, "attention_config": [[["flash"], 12]]},
    **{"optimizer": {"type": "Adam", "params": {"lr": "6e-4", "betas": [0.9, 0.95], "eps": 1e-08}}},
    **{"min_lr": 6e-05, "zero_optimization": {"stage": 1, "reduce_bucket_size": 500000000, "overlap_comm": True}},
    **{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "data_impl": "mmap"},
    **{"checkpoint_activations": True, "checkpoint_num_layers": 2, "partition_activations": True},
    **{"gradient_clipping": 0.5, "weight_decay": 0.1, "hidden_dropout": 0, "attention_dropout": 0},
    **{"fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12}},
    **{"train_iters": 320000, "lr_decay_iters": 320000, "lr_decay_style": "cosine", "warmup": 0.02},
    **{"checkpoint_factor": 10000, "save": "checkpoints", "log_interval": 7, "wall_clock_breakdown": True},
    **{"data_path": "data/enwik8_text_document", "vocab_file": "vocab.json", "merge_file": "merges.txt"},
    **{"tokenizer_type": "GPT2BPETokenizer"},
}
LLAMA = {
    **{"pipe_parallel_size": 1, "make_vocab_size_divisible_by": 1, "num_layers": 32, "hidden_size": 4096},
    **{"intermediate_size": 32768, "num_attention_heads": 32, "num_kv_heads": 8, "seq_length": 4096},
    **{"max_position_embeddings": 4096, "pos_emb": "rotary", "rotary_pct": 1, "no_weight_tying": True},
    **{"norm": "rmsnorm", "rms_norm_epsilon": 1e-05, "use_bias_in_norms": False},
    **{"use_bias_in_attn_linear": False, "use_bias_in_mlp": False, "activation": "swiglu"},
    **{"mlp_multiple_of": 256, "precision": "bfloat16", "bf16": {"enabled": True}},
    **{"zero_optimization": {"stage": 1}, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 1},
    **{"train_iters": 1000, "train_data_paths": ["a", "b"], "train_data_weights": [1.0, 2.5]},
    **{"valid_data_paths": ["c"], "test_data_paths": ["d"], "tokenizer_type": "HFTokenizer"},
    **{"vocab_file": "tokenizer.json", "hidden_dropout": 0.0, "attention_dropout": 0.0},
    **{"lr_decay_style": "constant"},
}
PYTHIA = {
    **{"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 2048},
    **{"max_position_embeddings": 2048, "pos_emb": "rotary", "rotary_pct": 0.25, "no_weight_tying": True},
    **{"gpt_j_residual": True, "attention_config": [[["flash"], 12]]},
}

NEUTRAL = {key: values for part in ("another-model", "another-training") for key, (values, _) in table()[part].items()}
"""Values of settings without a counterpart that agree with this trainer."""
OPERATION = table()["operation"]


def parsed(conversion: Conversion) -> Config:
    """Configuration of the command, as a shell and the trainer read it."""
    command = shlex.split(conversion.command().replace("\\\n", " "))
    words = split(command[2:])[1]
    assert words == conversion.words()
    return parse_arguments(words)


def remarks(conversion: Conversion) -> set[str]:
    return {setting for setting, _ in conversion.remarks}


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
    assert remarks(conversion) == {
        *("output_layer_parallelism", "scaled_upper_triang_masked_softmax_fusion", "zero_optimization.overlap_comm"),
        *("data_impl", "partition_activations", "wall_clock_breakdown"),
    }


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
    assert not remarks(conversion)
    whole = convert({**LLAMA, "num_kv_heads": None})
    published = parse_arguments([*whole.words(), "--vocab-size", "32000"]).model
    assert flops.model_parameters(published) == 6_738_415_616


def test_pythia_is_the_preset_of_its_name() -> None:
    ours = parsed(converted(**PYTHIA)).model
    preset = parse_arguments(
        "--model-preset pythia-160m --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data".split()
    ).model
    differing = {each.name for each in fields(ours) if getattr(ours, each.name) != getattr(preset, each.name)}
    assert differing <= {"vocab_size"}


def test_settings_left_out_have_neoxs_defaults() -> None:
    config = parsed(converted())
    model, optimizer = config.model, config.optimizer
    assert (model.hidden_dropout, model.attention_dropout, model.activation) == (0.0, 0.0, "gelu-exact")
    assert (optimizer.weight_decay, OptimizerConfig(lr=1).weight_decay) == (0.1, 0.01)
    assert (optimizer.lr, optimizer.lr_warmup_fraction, optimizer.zero_stage) == (0.001, 0.01, 0)
    assert (config.logging.log_interval, config.logging.eval_iters, config.data.num_workers) == (100, 100, 2)
    assert config.data.tokenizer_type == "GPT2BPETokenizer"
    assert converted(norm="rmsnorm").words().count("1e-08") == 2  # The norm's and Adam's.
    older = parsed(convert(LEAST, defaults=BEFORE_2023_12))
    assert (older.model.hidden_dropout, older.model.attention_dropout) == (0.1, 0.1)
    assert older.optimizer.weight_decay == 0.01
    assert parsed(convert({**LEAST, "weight_decay": 0.5}, defaults=BEFORE_2023_12)).optimizer.weight_decay == 0.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fp16": {"enabled": True, "type": "bfloat16"}}, "--bf16"),
        ({"deepspeed_extra_args": {"bf16": {"enabled": True}}}, "--bf16"),
        ({"bf16": {"bf16": True, "enabled": True, "loss_scale": 0, "hysteresis": 2}}, "--bf16"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "--fp16 --loss-scale 128"),
        ({"zero_optimization": {"stage": 3}}, "--zero-stage 1"),
        ({"fp16": {"enabled": True}}, "--zero-stage 1"),
        ({"pipe_parallel_size": 0}, "--pipeline-model-parallel-size 1"),
        ({"pipe_parallel_size": 2, "pipe_partition_method": "parameters"}, "--stage-partition parameters"),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.5}}}, "--optimizer sgd --sgd-momentum 0.5"),
        ({"optimizer": {"params": {"weight_decay": 0.3}}}, "--weight-decay 0.3"),
        ({"optimizer": {"params": {"adam_w_mode": False, "weight_decay": 0}}}, "--weight-decay 0"),
        ({"optimizer": {"type": "cpu_torch_adam"}}, "--weight-decay 0.1"),
        ({"use_wandb": True, "wandb_run_name": "x"}, "--wandb-project neox --wandb-exp-name x"),
        ({"save": "a b", "checkpoint_factor": 5, "keep_last_n_checkpoints": 3}, "--save-interval 5"),
        (
            {"save": "a", "checkpoint_factor": 50, "extra_save_iters": [4, 0, 1]},
            "--save-interval 50 --extra-save-iterations 0 1 4",
        ),
        ({"save": "a", "checkpoint_scale": "log", "extra_save_iters": [9]}, "--extra-save-iterations 9"),
        ({"profile": True, "profile_step_stop": 15}, "--profile --profile-step-start 10 --profile-step-end 15"),
        ({"split": "90, 5, 5"}, "--split 90,5,5"),
        ({"tokenizer_type": "SPMTokenizer"}, "--tokenizer-type SPMTokenizer --tokenizer-model vocab.json"),
        ({"norm": "rmsnorm", "rms_norm_epsilon": 0.5}, "--normalization rmsnorm --layernorm-epsilon 0.5"),
        ({"norm": "te_layernorm"}, "--normalization layernorm --layernorm-epsilon 1e-05"),
        ({"norm": "rmsnorm", "use_bias_in_norms": False}, "--normalization rmsnorm --layernorm-epsilon 1e-08"),
        ({"use_bias_in_norms": False}, "--normalization layernorm-no-bias"),
        ({"pos_emb": "none"}, "--position-embedding-type none"),
        ({"pos_emb": "rotary", "rotary_pct": 0.25}, "--rotary-base 10000 --rotary-percent 0.25"),
        ({"gpt_j_residual": True}, "--parallel-residual"),
        ({"gpt_j_residual": True, "gpt_j_tied": True}, "--parallel-residual --shared-block-norm"),
        ({"gpt_j_tied": True}, "--activation gelu-exact"),
        ({"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}, "--disable-bias-linear"),
        ({"use_bias_in_attn_linear": False}, "--disable-bias-linear --add-mlp-bias"),
        ({"use_bias_in_mlp": False}, "--disable-bias-linear --add-attention-bias"),
        ({"sliding_window_width": 64, "attention_config": [[["flash"], 4]]}, "--sliding-window 65"),
        (
            {"sliding_window_width": 64, "attention_config": [[["flash", "global"], "all"]]},
            "--sliding-window 65 --window-attn-skip-freq [1,0,1,0]",
        ),
        ({"num_kv_heads": 2, "attention_type": "groupedquery"}, "--num-key-value-heads 2"),
        (
            EXPERTS | {"moe_top_k": 2, "moe_jitter_eps": 0.1, "model_parallel_size": 2},
            "--num-experts 8 --moe-router-topk 2 --moe-router-pre-softmax "
            "--moe-layer-freq 1 --moe-ffn-hidden-size 256 --moe-input-jitter-eps 0.1 --expert-model-parallel-size 2 "
            "--sequence-parallel --disable-bias-linear --add-attention-bias",
        ),
        (
            EXPERTS | {"moe_expert_interval": 2, "use_bias_in_mlp": False, "intermediate_size": 100},
            "--moe-router-topk 1 --moe-router-pre-softmax --moe-layer-freq 2 --moe-ffn-hidden-size 100",
        ),
    ],
)
def test_settings_and_their_flags(changes: dict[str, Any], words: str) -> None:
    conversion = converted(**changes)
    assert f" {words} " in f" {' '.join(conversion.words())} "
    parsed(conversion)


REFUSED: list[tuple[dict[str, Any], str]] = [
    # Settings, and the beginning of the line about them: a setting with its value, and the other setting or the rule.
    ({"optimizer": {"type": "sm3", "params": {}}}, "optimizer sm3: "),
    ({"optimizer": {"params": {"freeze_step": 3}}}, "optimizer.params.freeze_step: "),
    ({"optimizer": {"params": {"adam_w_mode": False}}}, "weight_decay 0.1 in the gradient: "),
    ({"soft_prompt_tuning": {"enabled": True}}, f"soft_prompt_tuning: there are no prompts that are trained: {MODEL}"),
    ({"tokenizer_type": "CharLevelTokenizer"}, "tokenizer_type CharLevelTokenizer: "),
    ({"train_epochs": 2}, f"train_epochs 2: its length is a number of iterations, train_iters: {TRAINING}"),
    ({"train_impl": "dpo"}, "train_impl dpo: "),
    ({"fp16": {"enabled": True, "auto_cast": True, "consecutive_hysteresis": True}}, "fp16.consecutive_hysteresis: "),
    ({"num_experts": 4}, "num_experts 4: "),
    ({"te_fp8_mha": True}, "te_fp8_mha True: "),
    ({"use_mup": True}, "use_mup True: "),
    ({"no_such_key": 1}, "no_such_key 1: "),
    ({"pos_emb": "alibi"}, "pos_emb alibi: "),
    ({"moe_num_experts": 8}, "moe_router_type sinkhorn: the choice of a token would depend on later tokens"),
    (EXPERTS | {"activation": "swiglu"}, "activation swiglu: experts of NeoX have no gates"),
    (EXPERTS | {"moe_expert_interval": 2}, "use_bias_in_mlp true: experts of NeoX have no biases"),
    (EXPERTS | {"hidden_dropout": 0.1}, "hidden_dropout 0.1: "),
    ({"norm": "scalenorm"}, "norm scalenorm: "),
    ({"activation": "mish"}, "activation mish: "),
    ({"mlp_type": "llama"}, "activation gelu: "),
    ({"mlp_type": "other"}, "mlp_type other: "),
    ({"attention_config": [[["mamba"], 4]]}, "attention_config mamba: "),
    ({"attention_config": [[["gmlp"], "all"]], "activation": "silu"}, "attention_config gmlp: "),
    ({"attention_config": [[["global", "rwkv"], 2]]}, "attention_config rwkv: "),
    ({"attention_config": [[["global", "local"], 2]]}, "attention_config local: "),
    ({"sliding_window_width": 8, "te_mha": True}, "sliding_window_width 8: "),
    ({"use_qk_layernorm": True}, "use_qk_layernorm True: "),
    ({"init_method": "orthogonal"}, "init_method orthogonal: "),
    ({"output_layer_init_method": "no"}, "output_layer_init_method no: "),
    ({"te_layernorm_mlp": True, "layernorm_epsilon": 1e-6}, "layernorm_epsilon 1e-06: with te_layernorm_mlp "),
    ({"hidden_dropout": 0.1, "use_bias_in_mlp": False}, "hidden_dropout 0.1: "),
    ({"hidden_dropout": 0.1, "gpt_j_residual": True, "use_bias_in_attn_linear": False}, "hidden_dropout 0.1: "),
    ({"lr_decay_style": "exponential"}, "lr_decay_style exponential: "),
    # Values that are wrong.
    ({"train_batch_size": 7}, "train_batch_size 7, train_micro_batch_size_per_gpu 2 "),
    (
        {"global_num_gpus": 2, "train_batch_size": 16, "gradient_accumulation_steps": 2},
        "train_batch_size 16, train_micro_batch_size_per_gpu 2, gradient_accumulation_steps 2 do not fit 2 data-",
    ),
    ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps 4 "),
    ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": None}, "train_batch_size 16 "),
    ({"global_num_gpus": 3, "pipe_parallel_size": 2}, "3 processes are not a multiple of the 2 ranks"),
    ({"num_layers": "many"}, "num_layers many is not a number"),
    ({"hidden_size": 1.5}, "hidden_size 1.5 is not a whole number"),
    ({"optimizer": "Adam"}, "optimizer 'Adam' is not a mapping"),
    ({"optimizer": {"params": {"betas": 0.9}}}, "optimizer.params.betas 0.9 "),
    ({"save": "x", "extra_save_iters": [1.5]}, "extra_save_iters 1.5 is not a whole number"),
    ({"deepspeed_extra_args": {"train_iters": 3}}, "train_iters is in deepspeed_extra_args and outside"),
    ({"train_data_paths": ["a", "b"], "train_data_weights": [1]}, "train_data_weights has 1 entries and "),
    ({"attention_config": "flash"}, "attention_config describes 5 layers and num_layers is 4"),
    ({"attention_config": 3}, "attention_config 3 is not a list"),
    ({"attention_config": [[["flash"], "some"]]}, "attention_config [[['flash'], 'some']] is not a list"),
    ({"attention_config": [[["flash"], 3]]}, "attention_config describes 3 layers and num_layers is 4"),
    ({"intermediate_size": 8, "expansion_factor": 2}, "intermediate_size 8 and expansion_factor 2 "),
    ({"rotary_pct": True}, "rotary_pct True is not a number"),
    ({"lr_decay_iters": 5, "lr_decay_fraction": 0.5}, "lr_decay_iters 5 and lr_decay_fraction 0.5 "),
    ({"min_lr": 0.1, "decay_lr_to": 0.1}, "min_lr 0.1 and decay_lr_to 0.1 "),
    ({"warmup": 0.1, "warmup_iters": 5}, "warmup 0.1 and warmup_iters 5 "),
    ({"master_addr": "a;touch x"}, 'master_addr: "a;touch x" is not a host name'),
]


@pytest.mark.parametrize(("changes", "line"), REFUSED)
def test_refusals(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        converted(**changes)
    assert str(caught.value).startswith(line)
    assert ": " in str(caught.value) and "\n" not in str(caught.value)


def test_all_refusals_are_in_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        converted(train_epochs=2, pos_emb="alibi")
    assert [part.split(":")[0] for part in str(caught.value).split("; ")] == ["pos_emb alibi", "train_epochs 2"]
    # The settings of a refused activation are not unknown ones.
    with pytest.raises(ConfigError) as caught:
        converted(activation="mish", intermediate_size=128, mlp_multiple_of=64)
    assert ";" not in str(caught.value) and "intermediate_size" not in str(caught.value)


def test_settings_without_effect_are_remarked() -> None:
    conversion = converted(num_experts=1, moe_top_k=2, te_fp8_format="hybrid", te_fp8_mha=False, use_bnb_optimizer=True)
    assert remarks(conversion) == {"moe_top_k", "te_fp8_format", "use_bnb_optimizer"}
    assert "moe_top_k, te_fp8_format: without effect in this model" in conversion.comments()
    parsed(conversion)


@pytest.mark.parametrize(
    ("batch", "world_size", "micro", "whole"),
    [
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, None, 2, 16),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": None}, 2, 4, 16),
        ({"gradient_accumulation_steps": 2}, 4, 2, 16),
        ({"gradient_accumulation_steps": 2, "global_num_gpus": 4}, None, 2, 16),
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


def test_other_settings_of_sections_are_remarked() -> None:
    conversion = converted(
        zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}, "reduce_scatter": False, "x": True},
        deepspeed_extra_args={"compile": {"deepcompile": True}},
    )
    assert [comment.split(":")[0] for comment in conversion.comments()] == [
        "zero_optimization.offload_optimizer",
        "zero_optimization.x, compile",
    ]


WIDTH_256 = {"hidden_size": 256}


@pytest.mark.parametrize(
    ("changes", "activation", "width"),
    [
        ({}, "gelu-exact", 1024),
        ({"bias_gelu_fusion": True}, "gelu", 1024),
        ({"activation": "relu", "intermediate_size": 100, "mlp_multiple_of": 64}, "relu", 128),
        ({"expansion_factor": 3.5}, "gelu-exact", 896),
        ({"activation": "swiglu"}, "swiglu", 341),
        ({"activation": "geglu", "bias_gelu_fusion": True, "mlp_multiple_of": 64}, "geglu-exact", 384),
        ({"activation": "swiglu", "intermediate_size": 2048, "mlp_multiple_of": 64}, "swiglu", 704),
        ({"mlp_type": "llama", "activation": "silu"}, "swiglu", 768),
        ({"mlp_type": "llama", "activation": "silu", "intermediate_size": 700, "mlp_multiple_of": 100}, "swiglu", 700),
        ({"te_layernorm_mlp": True}, "gelu", 1024),
        ({"te_layernorm_mlp": True, "activation": "geglu"}, "geglu", 682),
        ({"te_layernorm_mlp": True, "activation": "srelu"}, "squared-relu", 1024),
    ],
)
def test_the_mlp_has_neoxs_width(changes: dict[str, Any], activation: str, width: int) -> None:
    model = parsed(converted(**WIDTH_256, **changes)).model
    assert (model.activation, model.ffn_hidden_size) == (activation, width)


def test_biases_of_older_and_of_transformer_engines_layers() -> None:
    """NeoX's older gated MLP has none; Transformer Engine's layers always have them."""
    without = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
    assert not parsed(converted(**without, te_mha=True, te_layernorm_mlp=True)).model.disable_bias_linear
    for changes in ({**without, "te_mha": True}, {"mlp_type": "llama", "activation": "silu"}):
        model = parsed(converted(**changes)).model
        assert (model.has_qkv_bias, model.has_projection_bias, model.has_mlp_bias) == (True, True, False)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("normal", 0.02),
        ("scaled_normal", 0.02 / 24**0.5),
        ("single_residual_scaled_normal", 0.02 / 12**0.5),
        ("small_init", (2 / 3840) ** 0.5),
        ("wang_init", 2 / 12 / 768**0.5),
        ("orthogonal", None),
        ("xavier_uniform", None),
    ],
)
def test_standard_deviations(method: str, expected: float | None) -> None:
    found = standard_deviation(method, 0.02, hidden_size=768, num_layers=12)
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-15))


def test_initial_weights_are_exact() -> None:
    model = parsed(convert({**SMALL, "init_method": "small_init", "output_layer_init_method": "wang_init"}, 8)).model
    expected = [(2 / (5 * 768)) ** 0.5, 2 / (12 * 768**0.5)]
    assert [model.init_method_std, model.output_layer_init_std] == pytest.approx(expected, rel=1e-15)
    usual = parsed(converted()).model
    assert (usual.init_method_std, usual.output_layer_init_std) == (0.02, pytest.approx(0.02 / 8**0.5, rel=1e-15))


def test_parts_that_neox_drops_are_remarked() -> None:
    conversion = converted(sliding_window_width=64, gpt_j_residual=True, use_bias_in_mlp=False)
    assert parsed(conversion).model.sliding_window is None
    assert {setting for setting, _ in conversion.remarks} == {"sliding_window_width", "gpt_j_residual"}


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (None, ["global"] * 4),
        ([[["flash"], 4]], ["flash"] * 4),
        ([[["flash", "global"], 1], [["global"], 2]], ["flash", "global", "global", "global"]),
        ([[["flash", "global"], "all"]], ["flash", "global", "flash", "global"]),
        (["flash", "global", "global", "flash"], ["flash", "global", "global", "flash"]),
    ],
)
def test_kinds_of_layers(config: list[Any] | None, kinds: list[str]) -> None:
    assert layer_kinds(config, 4) == kinds


def neoxs_rate(iteration: int, *, peak: float, lowest: float, warmup: float, last: int, style: str) -> float:
    """Learning rate by the formulas of NeoX's scheduler."""
    rise = warmup * last
    if rise and iteration <= rise:
        return peak * iteration / rise
    progress = (iteration - rise) / (last - rise)
    if style == "cosine":
        return max(lowest, lowest + (peak - lowest) / 2 * (cos(pi * progress) + 1))
    return max(lowest, peak * (1 - progress) if style == "linear" else peak)


@pytest.mark.parametrize("lowest", [0.0, 0.2])
@pytest.mark.parametrize("style", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(
    ("warmup", "end"), [(0.1, {}), (0.0, {"lr_decay_iters": 60}), (0.1, {"lr_decay_fraction": 0.5})]
)
def test_the_learning_rate_is_neoxs_at_every_iteration(
    style: str, lowest: float, warmup: float, end: dict[str, Any]
) -> None:
    optimizer = {"type": "Adam", "params": {"lr": 1.0}}
    conversion = converted(optimizer=optimizer, lr_decay_style=style, min_lr=lowest, warmup=warmup, **end)
    config = parsed(conversion)
    schedule = LearningRateSchedule.from_config(config.optimizer, config.training, global_batch_size=2, seq_length=128)
    last = {"lr_decay_iters": 60, "lr_decay_fraction": 50}.get(next(iter(end), ""), 100)
    for iteration in range(100 if style != "cosine" else last + 1):
        expected = neoxs_rate(iteration, peak=1.0, lowest=lowest, warmup=warmup, last=last, style=style)
        assert schedule.at(iteration) == pytest.approx(expected, rel=1e-12, abs=1e-15), iteration
    remarked = {setting for setting, _ in conversion.remarks}
    assert remarked == ({"lr_decay_iters"} if style == "cosine" and end else set())


def test_a_decay_that_ends_between_iterations_is_remarked() -> None:
    assert cut_off(100, 0.0, highest=1.0, lowest=0.1)[0] == 90
    end, warmup_fraction, exact = cut_off(100, 0.01, highest=1.0, lowest=0.333)
    assert (end, exact) == (67, False)
    assert warmup_fraction * end == pytest.approx(1.0, rel=1e-15)
    assert "lr_decay_style" in remarks(converted(optimizer={"params": {"lr": 1.0}}, min_lr=0.333))


def test_keys_of_llemma() -> None:
    rates = {"optimizer": {"params": {"lr": 0.5}}, "lr_decay_style": "cosine", "decay_lr_to": 0.1, "warmup_iters": 5}
    optimizer = parsed(converted(**rates)).optimizer
    assert [optimizer.min_lr, optimizer.lr_warmup_fraction] == pytest.approx([0.05, 0.05], rel=1e-15)


def test_flags_of_the_launcher(tmp_path: Path) -> None:
    """A comment is one word of srun: DeepSpeed splits these words as a shell does; --task-prolog names a program."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("one slots=8\ntwo slots=8\n")
    launch = {"hostfile": str(hostfile), "num_nodes": 2, "num_gpus": 8, "master_port": 29500}
    conversion = converted(**launch, deepspeed_slurm=True, comment="a --task-prolog=/tmp/mine")
    program, command, *words = shlex.split(conversion.command().replace("\\\n", " "))
    flags, rest = split(words)
    assert [program, command, *rest] == ["terapipe", "train", *conversion.words()]
    arguments = flags.pop("launcher_args")
    assert shlex.split(arguments) == ["--comment=a --task-prolog=/tmp/mine"]
    assert list(flags.values()) == [str(hostfile), "8", "2", "slurm"]


def test_a_hostfile_that_is_not_here_is_left_out() -> None:
    conversion = converted(hostfile="/mock_path", force_multi=True)
    assert conversion.command().startswith("terapipe train \\\n")
    assert any(line.startswith("hostfile /mock_path: it is not here, and ") for line in conversion.comments())
    assert "force_multi: the launcher has no such flag" in conversion.comments()


def test_no_key_is_in_two_parts_of_the_table() -> None:
    keys = [key for part in table().values() for key in part if part is not table()["launcher"]]
    assert len(keys) == len(set(keys))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted({*NEUTRAL, *OPERATION, "xyzzy", "no-such"})),
        st.sampled_from([1, "text", [2], {"a": 1}]),
    )
)
def test_every_setting_is_remarked_or_refused(extra: dict[str, Any]) -> None:
    """Settings of operation have their remark; all others end the conversion, unless they have neutral values."""
    decisive = {key for key, value in extra.items() if key not in OPERATION and value not in NEUTRAL.get(key, ())}
    try:
        conversion = converted(**extra)
    except ConfigError as error:
        assert decisive == {refusal.split()[0].rstrip(":") for refusal in str(error).split("; ")}
        return
    assert not decisive
    assert remarks(conversion) == extra.keys() & OPERATION.keys()
    parsed(conversion)
