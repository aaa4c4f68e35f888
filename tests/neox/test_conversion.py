"""NeoX's settings become flags that the trainer takes, and that mean the same."""

import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import Config, flops
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, TRAINING_CANNOT_BE_RUN, ConfigError
from megatron_terapipe.neox.convert import convert
from megatron_terapipe.neox.settings import BEFORE_2023_12, MODELS, OPERATION, SWITCHES, TRAININGS, VALUES, Conversion

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

AGREEING = {key: values for table in (MODELS, TRAININGS) for key, (values, _) in table.items()}
"""Values of settings without a counterpart that say what is so anyway."""


def parsed(conversion: Conversion) -> Config:
    """What the trainer makes of the words that a shell makes of the command."""
    command = shlex.split(conversion.command().replace("\\\n", " "))
    words = command[command.index("pretrain_gpt.py") + 1 :]
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


def test_what_is_left_out_takes_neoxs_default_not_ours() -> None:
    config, bare = (
        parsed(converted()),
        parse_arguments(
            "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 "
            "--train-iters 100 --lr 1 --data-path corpus".split()
        ),
    )
    assert (config.model.hidden_dropout, config.model.attention_dropout, config.model.activation) == (
        0.0,
        0.0,
        "gelu-exact",
    )
    assert (config.optimizer.weight_decay, bare.optimizer.weight_decay) == (0.1, 0.01)
    assert (config.optimizer.lr, config.optimizer.lr_warmup_fraction, config.optimizer.zero_stage) == (0.001, 0.01, 0)
    assert (config.logging.log_interval, config.logging.eval_iters, config.data.num_workers) == (100, 100, 2)
    assert config.data.tokenizer_type == "GPT2BPETokenizer"
    assert converted(norm="rmsnorm").words().count("1e-08") == 2  # The norm's and Adam's.


def test_defaults_of_files_from_before_december_2023() -> None:
    config = parsed(convert(LEAST, defaults=BEFORE_2023_12))
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0.1, 0.1)
    assert config.optimizer.weight_decay == 0.01
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
        # NeoX means torch's Adam by it, and takes DeepSpeed's.
        ({"optimizer": {"type": "cpu_torch_adam"}}, "--weight-decay 0.1"),
        ({"use_wandb": True, "wandb_run_name": "x"}, "--wandb-project neox --wandb-exp-name x"),
        ({"save": "a b", "checkpoint_factor": 5, "keep_last_n_checkpoints": 3}, "--save-interval 5"),
        (
            {"save": "a", "checkpoint_factor": 50, "extra_save_iters": [4, 0, 1]},
            "--save-interval 50 --extra-save-iterations 0 1 4",
        ),
        (
            {"save": "a", "checkpoint_factor": 2, "checkpoint_scale": "log", "extra_save_iters": [3]},
            "--extra-save-iterations 2 3 4 8 16 32 64",
        ),
        ({"save": "a", "checkpoint_factor": 1.5, "checkpoint_scale": "log", "extra_save_iters": [9]}, "--save a"),
        ({"profile": True, "profile_step_stop": 15}, "--profile --profile-step-start 10 --profile-step-end 15"),
        ({"split": "90, 5, 5"}, "--split 90,5,5"),
        ({"tokenizer_type": "SPMTokenizer"}, "--tokenizer-type SPMTokenizer --tokenizer-model vocab.json"),
    ],
)
def test_settings_and_their_flags(changes: dict[str, Any], words: str) -> None:
    conversion = converted(**changes)
    assert f" {words} " in f" {' '.join(conversion.words())} "
    parsed(conversion)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"optimizer": {"type": "sm3", "params": {}}},
            f"optimizer sm3: it can be adam or sgd: {TRAINING_CANNOT_BE_RUN}",
        ),
        (
            {"optimizer": {"params": {"freeze_step": 3}}},
            "optimizer.params.freeze_step: the optimizer has no such param",
        ),
        (
            {"optimizer": {"params": {"adam_w_mode": False}}},
            "weight_decay 0.1 in the gradient: weights decay apart from the",
        ),
        (
            {"soft_prompt_tuning": {"enabled": True}},
            f"soft_prompt_tuning: there are no prompts that are trained: {MODEL_CANNOT_BE_TRAINED}",
        ),
        (
            {"tokenizer_type": "CharLevelTokenizer"},
            "tokenizer_type CharLevelTokenizer: it is not here: tokenize the data",
        ),
        (
            {"train_epochs": 2},
            f"train_epochs 2: its length is a number of iterations, train_iters: {TRAINING_CANNOT_BE_RUN}",
        ),
        ({"train_impl": "dpo"}, f"train_impl dpo: training is on the next token: {TRAINING_CANNOT_BE_RUN}"),
        (
            {"fp16": {"enabled": True, "auto_cast": True}},
            "fp16.auto_cast: no flag decides it: give it in a file for --",
        ),
        ({"num_experts": 4}, f"num_experts 4: mixtures of experts are not in this trainer: {MODEL_CANNOT_BE_TRAINED}"),
        (
            {"te_fp8_mha": True},
            f"te_fp8_mha True: numbers of 8 bits and less are not in this trainer: {TRAINING_CANNOT_BE_RUN}",
        ),
        ({"use_mup": True}, f"use_mup True: widths have no multipliers (muP): {MODEL_CANNOT_BE_TRAINED}"),
        ({"no_such_key": 1}, "no_such_key 1: no setting of NeoX that is known here: check how it is written"),
        (
            {"train_epochs": 2, "pos_emb": "alibi"},
            f"pos_emb alibi: positions can be learned, rotary or none: {MODEL_CANNOT_BE_TRAINED}; "
            "train_epochs 2: its length is a number",
        ),
    ],
)
def test_what_would_train_another_model_ends_the_conversion(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        converted(**changes)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_settings_without_effect_are_no_reason_to_end() -> None:
    """Experts of which there is one, FP8 in layers that run in none, 8 bits of an optimizer that has 32."""
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


@pytest.mark.parametrize(
    ("changes", "world_size", "line"),
    [
        ({"train_batch_size": 7}, None, "train_batch_size 7, train_micro_batch_size_per_gpu 2 do not fit each other"),
        (
            {"train_batch_size": 16, "gradient_accumulation_steps": 2},
            2,
            "train_batch_size 16, train_micro_batch_size_per_gpu 2, gradient_accumulation_steps 2 do not fit 2 data-",
        ),
        (
            {"gradient_accumulation_steps": 4},
            None,
            "gradient_accumulation_steps 4 makes a batch that grows with the processes of the run: give their number",
        ),
        (
            {"train_batch_size": 16, "train_micro_batch_size_per_gpu": None},
            None,
            "train_batch_size 16 is dealt to the processes of the run: give their number, --world-size N",
        ),
        ({"pipe_parallel_size": 2}, 3, "3 processes are not a multiple of the 2 ranks of a model: change one of them"),
        ({"num_layers": "many"}, None, "num_layers many is not a number: give one"),
        ({"hidden_size": 1.5}, None, "hidden_size 1.5 is not a whole number: give one"),
        ({"optimizer": "Adam"}, None, "optimizer 'Adam' is not a mapping: write it as {...}"),
        ({"optimizer": {"params": {"betas": 0.9}}}, None, "optimizer.params.betas 0.9 are not two numbers: write them"),
        (
            {"save": "x", "checkpoint_factor": 1, "checkpoint_scale": "log"},
            None,
            "checkpoint_factor 1 does not grow with checkpoint_scale log: give more than 1",
        ),
        ({"save": "x", "extra_save_iters": [-1]}, None, "extra_save_iters or checkpoint_factor -1 is no number of "),
        ({"deepspeed_extra_args": {"train_iters": 3}}, None, "train_iters stands in deepspeed_extra_args and outside"),
        ({"train_data_paths": ["a", "b"], "train_data_weights": [1]}, None, "train_data_weights has 1 entries and "),
    ],
)
def test_settings_that_are_wrong(changes: dict[str, Any], world_size: int | None, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(LEAST | changes, world_size)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_what_sections_hold_beside_is_remarked() -> None:
    conversion = converted(
        zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}, "reduce_scatter": False, "x": True},
        deepspeed_extra_args={"compile": {"deepcompile": True}},
    )
    assert list(conversion.comments()) == [
        "zero_optimization.offload_optimizer: nothing is offloaded",
        "zero_optimization.x, compile: it can stand in a file for --deepspeed-config",
    ]


def test_no_key_is_in_two_tables() -> None:
    tables = [*VALUES, *SWITCHES, *MODELS, *TRAININGS, *OPERATION]
    assert len(tables) == len(set(tables))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted({*AGREEING, *OPERATION, "xyzzy", "no-such"})),
        st.sampled_from([1, "text", [2], {"a": 1}]),
    )
)
def test_no_setting_goes_unmentioned(extra: dict[str, Any]) -> None:
    """Settings of operation have their remark; all others end the conversion, unless they say what is so anyway."""
    decisive = {key for key, value in extra.items() if key not in OPERATION and value not in AGREEING.get(key, ())}
    try:
        conversion = converted(**extra)
    except ConfigError as error:
        assert decisive == {refusal.split()[0].rstrip(":") for refusal in str(error).split("; ")}
        return
    assert not decisive
    assert remarks(conversion) == extra.keys() & OPERATION.keys()
    parsed(conversion)
