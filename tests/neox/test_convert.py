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
from megatron_terapipe.neox.convert import BEFORE_2023_12, Conversion, convert, cut_off, without_counterpart
from megatron_terapipe.training.optimizer import LearningRateSchedule

LEAST = {
    **{"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128},
    **{"max_position_embeddings": 128, "train_micro_batch_size_per_gpu": 2, "train_iters": 100},
    **{"data_path": "corpus_text_document", "vocab_file": "vocab.json", "merge_file": "merges.txt"},
}
"""Settings that NeoX itself needs."""

EXPERTS: dict[str, Any] = {"moe_num_experts": 8, "moe_router_type": "topk"}
ROTARY: dict[str, Any] = {"pos_emb": "rotary", "rotary_pct": 0.25}
NO_BIASES = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}

LLAMA = {
    **{"pipe_parallel_size": 1, "make_vocab_size_divisible_by": 1, "num_layers": 32, "hidden_size": 4096},
    **{"intermediate_size": 32768, "num_attention_heads": 32, "seq_length": 4096},
    **{"max_position_embeddings": 4096, "pos_emb": "rotary", "rotary_pct": 1, "no_weight_tying": True},
    **{"norm": "rmsnorm", "rms_norm_epsilon": 1e-05, "use_bias_in_norms": False, **NO_BIASES},
    **{"activation": "swiglu", "mlp_multiple_of": 256, "precision": "bfloat16", "bf16": {"enabled": True}},
    **{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "train_iters": 1000},
}


def parsed(conversion: Conversion) -> Config:
    """Configuration of the command, as a shell and the trainer read it."""
    command = shlex.split(conversion.command().replace("\\\n", " "))
    words = split(command[2:])[1]
    assert words == conversion.words()
    return parse_arguments(words)


def converted(**changes: Any) -> Conversion:
    return convert(LEAST | changes)


def test_models_are_the_published_ones() -> None:
    files = {key: LEAST[key] for key in ("data_path", "vocab_file", "merge_file")}
    published = parse_arguments([*convert(LLAMA | files).words(), "--vocab-size", "32000"]).model
    assert (published.ffn_hidden_size, flops.model_parameters(published)) == (11008, 6_738_415_616)
    pythia = {**ROTARY, "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 2048}
    pythia |= {"max_position_embeddings": 2048, "no_weight_tying": True, "gpt_j_residual": True}
    ours = parsed(converted(**pythia, attention_config=[[["flash"], 12]])).model
    flags = "--model-preset pythia-160m --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data"
    preset = parse_arguments(flags.split()).model
    differing = {each.name for each in fields(ours) if getattr(ours, each.name) != getattr(preset, each.name)}
    assert differing <= {"vocab_size"}


def test_settings_left_out_have_neoxs_defaults() -> None:
    config = parsed(converted())
    model, optimizer = config.model, config.optimizer
    assert (model.hidden_dropout, model.attention_dropout, model.activation) == (0.0, 0.0, "gelu-exact")
    assert (optimizer.weight_decay, OptimizerConfig(lr=1).weight_decay) == (0.1, 0.01)
    assert (optimizer.lr, optimizer.lr_warmup_fraction, optimizer.zero_stage) == (0.001, 0.01, 0)
    assert (config.logging.log_interval, config.logging.eval_iters, config.data.num_workers) == (100, 100, 2)
    older = parsed(convert(LEAST, defaults=BEFORE_2023_12))
    assert (older.model.hidden_dropout, older.model.attention_dropout) == (0.1, 0.1)
    assert older.optimizer.weight_decay == 0.01
    assert parsed(convert({**LEAST, "weight_decay": 0.5}, defaults=BEFORE_2023_12)).optimizer.weight_decay == 0.5


WIDE = {"hidden_size": 256}
FLAGS: list[tuple[dict[str, Any], str]] = [
    # Settings, and the flags that follow one another in the command.
    ({"fp16": {"enabled": True, "type": "bfloat16"}}, "--bf16 --zero-stage 1"),
    ({"deepspeed_extra_args": {"bf16": {"enabled": True}}}, "--bf16"),
    ({"precision": "bfloat16", "zero_optimization": {"stage": 3}}, "--bf16 --zero-stage 1"),
    (
        {"fp16": {"enabled": True, "loss_scale_window": 500}, "data_types": {"grad_accum_dtype": "fp32"}},
        "--zero-stage 1 --fp16 --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 65536 --loss-scale-window 500 "
        "--hysteresis 2 --min-loss-scale 1.0",
    ),
    ({"fp16": {"enabled": True, "loss_scale": 128}}, "--fp16 --loss-scale 128"),
    ({"zero_optimization": {"stage": 1, "reduce_bucket_size": "5e8"}}, "--zero-reduce-bucket-size 500000000"),
    ({"pipe_parallel_size": 0}, "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"),
    ({"pipe_parallel_size": 2, "pipe_partition_method": "parameters"}, "--stage-partition parameters"),
    ({"pipe_parallel_size": 2}, "--pipeline-model-parallel-size 2 --stage-partition uniform"),
    ({"optimizer": {"type": "SGD", "params": {"momentum": 0.5}}}, "--optimizer sgd --sgd-momentum 0.5"),
    (
        {"optimizer": {"params": {"betas": [0.8, 0.95], "eps": "1e-6"}}},
        "--adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-06",
    ),
    ({"optimizer": {"params": {"weight_decay": 0.3, "lr": "6e-4"}}}, "--weight-decay 0.3 --clip-grad 1.0"),
    ({"optimizer": {"params": {"lr": "6e-4"}}}, "--lr 0.0006"),
    ({"optimizer": {"params": {"adam_w_mode": False, "weight_decay": 0}}}, "--weight-decay 0"),
    ({"optimizer": {"params": {"lr": 0.5}}, "decay_lr_to": 0.1, "lr_decay_style": "cosine"}, "--lr 0.5 --min-lr 0.05"),
    ({"warmup_iters": 5}, "--lr-warmup-fraction 0.05"),
    ({"use_wandb": True, "wandb_run_name": "x"}, "--wandb-project neox --wandb-exp-name x"),
    ({"save": "a b", "checkpoint_factor": 5, "keep_last_n_checkpoints": 3}, "--save-interval 5"),
    ({"save": "a", "checkpoint_factor": 50, "extra_save_iters": [4, 0, 1]}, "--extra-save-iterations 0 1 4"),
    ({"profile": True, "profile_step_stop": 15}, "--profile --profile-step-start 10 --profile-step-end 15"),
    ({"checkpoint_activations": True}, "--recompute-granularity full --recompute-num-layers 1"),
    ({"split": "90, 5, 5"}, "--data-path corpus_text_document --split 90,5,5"),
    (
        {"data_path": None, "train_data_paths": ["a", "b"], "train_data_weights": [1.0, 2.5], "valid_data_paths": "c"},
        "--train-data-path 1.0 a 2.5 b --valid-data-path c",
    ),
    ({"tokenizer_type": "SPMTokenizer"}, "--tokenizer-type SPMTokenizer --tokenizer-model vocab.json"),
    ({}, "--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt"),
    ({"norm": "rmsnorm", "rms_norm_epsilon": 0.5}, "--normalization rmsnorm --layernorm-epsilon 0.5"),
    ({"norm": "te_layernorm"}, "--normalization layernorm --layernorm-epsilon 1e-05"),
    ({"norm": "rmsnorm", "use_bias_in_norms": False}, "--normalization rmsnorm --layernorm-epsilon 1e-08"),
    ({"use_bias_in_norms": False}, "--normalization layernorm-no-bias"),
    ({"pos_emb": "none"}, "--position-embedding-type none"),
    (ROTARY, "--position-embedding-type rope --rotary-base 10000 --rotary-percent 0.25"),
    ({"gpt_j_residual": True, "gpt_j_tied": True}, "--parallel-residual --shared-block-norm"),
    (NO_BIASES, "--disable-bias-linear --hidden-dropout"),
    ({"use_bias_in_attn_linear": False}, "--disable-bias-linear --add-mlp-bias"),
    ({"use_bias_in_mlp": False}, "--disable-bias-linear --add-attention-bias"),
    (NO_BIASES | {"te_mha": True}, "--disable-bias-linear --add-attention-bias"),
    (NO_BIASES | {"te_layernorm_mlp": True}, "--disable-bias-linear --add-mlp-bias"),
    ({"sliding_window_width": 64, "attention_config": [[["flash"], 4]]}, "--sliding-window 65"),
    (
        {"sliding_window_width": 64, "attention_config": [[["flash", "global"], "all"]]},
        "--sliding-window 65 --window-attn-skip-freq [1,0,1,0]",
    ),
    (
        {"sliding_window_width": 64, "attention_config": [[["flash", "global"], 1], [["global"], 2]]},
        "--window-attn-skip-freq [1,0,0,0]",
    ),
    (
        {"sliding_window_width": 64, "attention_config": ["flash", "global", "global", "flash"]},
        "--window-attn-skip-freq [1,0,0,1]",
    ),
    ({"num_kv_heads": 2, "attention_type": "groupedquery"}, "--num-key-value-heads 2"),
    (
        EXPERTS | {"moe_top_k": 2, "moe_jitter_eps": 0.1, "model_parallel_size": 2},
        "--num-experts 8 --moe-router-topk 2 --moe-router-pre-softmax "
        "--moe-layer-freq 1 --moe-ffn-hidden-size 256 --moe-input-jitter-eps 0.1 --expert-model-parallel-size 2 "
        "--disable-bias-linear --add-attention-bias",
    ),
    (EXPERTS | {"model_parallel_size": 2}, "--sequence-parallel"),
    (
        EXPERTS | {"moe_expert_interval": 2, "use_bias_in_mlp": False, "intermediate_size": 100},
        "--moe-router-topk 1 --moe-router-pre-softmax --moe-layer-freq 2 --moe-ffn-hidden-size 100",
    ),
    # The MLP has NeoX's width.
    (WIDE, "--activation gelu-exact --ffn-hidden-size 1024"),
    (WIDE | {"bias_gelu_fusion": True}, "--activation gelu --ffn-hidden-size 1024"),
    (
        WIDE | {"activation": "relu", "intermediate_size": 100, "mlp_multiple_of": 64},
        "--activation relu --ffn-hidden-size 128",
    ),
    (WIDE | {"expansion_factor": 3.5}, "--ffn-hidden-size 896"),
    (WIDE | {"activation": "swiglu"}, "--activation swiglu --ffn-hidden-size 341"),
    (WIDE | {"activation": "geglu", "mlp_multiple_of": 64}, "--activation geglu-exact --ffn-hidden-size 384"),
    (WIDE | {"activation": "swiglu", "intermediate_size": 2048, "mlp_multiple_of": 64}, "--ffn-hidden-size 704"),
    (WIDE | {"te_layernorm_mlp": True}, "--activation gelu --ffn-hidden-size 1024"),
    (WIDE | {"te_layernorm_mlp": True, "activation": "geglu"}, "--activation geglu --ffn-hidden-size 682"),
    (WIDE | {"te_layernorm_mlp": True, "activation": "srelu"}, "--activation squared-relu"),
    # Initial weights, to the last digit.
    ({}, f"--init-method-std 0.02 --output-layer-init-std {0.02 / 8**0.5}"),
    ({"output_layer_init_method": "single_residual_scaled_normal"}, f"--output-layer-init-std {0.02 / 2}"),
    (
        {"init_method": "small_init", "output_layer_init_method": "wang_init"},
        f"--init-method-std {(2 / (5 * 64)) ** 0.5} --output-layer-init-std {2 / (4 * 64**0.5)}",
    ),
    # Batches, which depend on the number of processes.
    ({"train_batch_size": 16}, "--micro-batch-size 2 --global-batch-size 16"),
    ({"gradient_accumulation_steps": 2, "global_num_gpus": 4}, "--micro-batch-size 2 --global-batch-size 16"),
    (
        {"gradient_accumulation_steps": 2, "num_nodes": 2, "num_gpus": 4, "pipe_parallel_size": 2},
        "--micro-batch-size 2 --global-batch-size 16",
    ),
    (
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": None, "global_num_gpus": 4},
        "--micro-batch-size 4 --global-batch-size 16",
    ),
    ({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, "--micro-batch-size 2 --optimizer"),
]


@pytest.mark.parametrize(("changes", "words"), FLAGS)
def test_settings_and_their_flags(changes: dict[str, Any], words: str) -> None:
    conversion = converted(**changes)
    assert f" {words} " in f" {' '.join(conversion.words())} "
    parsed(conversion)


REFUSED: list[tuple[dict[str, Any], str]] = [
    # Settings, and what the line about them has: their value, and the other setting or the rule.
    ({"optimizer": {"type": "sm3", "params": {}}}, 'optimizer.type to "sm3"'),
    ({"optimizer": {"params": {"freeze_step": 3}}}, "optimizer.params.freeze_step to 3"),
    ({"optimizer": {"params": {"adam_w_mode": False}}}, "optimizer.params.adam_w_mode to false"),
    ({"soft_prompt_tuning": {"enabled": True}}, f"prompts are not trained: {MODEL}"),
    ({"tokenizer_type": "CharLevelTokenizer"}, 'tokenizer_type to "CharLevelTokenizer"'),
    ({"train_epochs": 2}, f"train_epochs to 2, and the length is a number of iterations, train_iters: {TRAINING}"),
    ({"train_impl": "dpo"}, 'train_impl to "dpo"'),
    ({"fp16": {"enabled": True, "auto_cast": True, "consecutive_hysteresis": True}}, "fp16.consecutive_hysteresis"),
    ({"num_experts": 4}, "num_experts to 4"),
    ({"use_mup": True}, "use_mup to true"),
    ({"no_such_key": 1}, "no_such_key to 1, and this is not a known setting of NeoX"),
    ({"pos_emb": "alibi"}, 'pos_emb to "alibi"'),
    ({"checkpoint_scale": "log"}, 'checkpoint_scale to "log"'),
    ({"mlp_type": "llama"}, 'mlp_type to "llama"'),
    ({"moe_num_experts": 8}, 'moe_router_type to "sinkhorn", and the choice of a token would depend on later tokens'),
    (EXPERTS | {"activation": "swiglu"}, 'activation to "swiglu", and experts of NeoX have no gates'),
    (EXPERTS | {"moe_expert_interval": 2}, "use_bias_in_mlp to true, and experts of NeoX have no biases"),
    (EXPERTS | {"hidden_dropout": 0.1}, "hidden_dropout to 0.1"),
    ({"norm": "scalenorm"}, 'norm to "scalenorm"'),
    ({"activation": "mish", "intermediate_size": 128, "mlp_multiple_of": 64}, 'activation to "mish"'),
    (
        {"attention_config": [[["mamba"], 4]], "activation": "silu"},
        'attention_config to "mamba", and Mamba 1 is not in',
    ),
    ({"attention_config": [[["global", "rwkv"], 2]]}, 'attention_config to "rwkv"'),
    ({"attention_config": [[["global", "local"], 2]]}, 'attention_config to "local"'),
    ({"sliding_window_width": 8, "te_mha": True}, "sliding_window_width to 8"),
    ({"init_method": "orthogonal"}, 'init_method to "orthogonal"'),
    ({"output_layer_init_method": "no"}, 'output_layer_init_method to "no"'),
    ({"te_layernorm_mlp": True, "layernorm_epsilon": 1e-6}, "layernorm_epsilon to 1e-06, and with te_layernorm_mlp "),
    ({"hidden_dropout": 0.1, "use_bias_in_mlp": False}, "hidden_dropout to 0.1"),
    ({"hidden_dropout": 0.1, "gpt_j_residual": True, "use_bias_in_attn_linear": False}, "hidden_dropout to 0.1"),
    ({"lr_decay_style": "exponential"}, 'lr_decay_style to "exponential"'),
    # Values that are wrong.
    ({"train_batch_size": 7}, "train_batch_size 7, train_micro_batch_size_per_gpu 2 do not fit each other"),
    (
        {"global_num_gpus": 2, "train_batch_size": 16, "gradient_accumulation_steps": 2},
        "train_batch_size 16, train_micro_batch_size_per_gpu 2, gradient_accumulation_steps 2 do not fit 2 data-",
    ),
    ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps 4 depends on the number of processes"),
    ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": None}, "train_batch_size 16 depends on "),
    ({"global_num_gpus": 3, "pipe_parallel_size": 2}, "3 processes are not a multiple of the 2 ranks"),
    ({"num_layers": "many"}, 'num_layers to "many", and it must be a whole number'),
    ({"num_layers": 20_000}, "num_layers to 20000, and it must be a whole number above 0, 10,000 at most"),
    ({"optimizer": "Adam"}, "optimizer 'Adam' is not a mapping"),
    ({"optimizer": {"params": {"betas": 0.9}}}, "optimizer.params.betas to 0.9"),
    ({"save": "x", "extra_save_iters": [1.5]}, "extra_save_iters to [1.5]"),
    ({"fp16": {"enabled": True, "initial_scale_power": 64}}, "fp16.initial_scale_power to 64"),
    ({"deepspeed_extra_args": {"train_iters": 3}}, "train_iters is in deepspeed_extra_args and outside"),
    ({"train_data_paths": ["a", "b"], "train_data_weights": [1]}, "train_data_weights has 1 entries and "),
    ({"attention_config": "flash"}, "attention_config describes 5 layers and num_layers is 4"),
    ({"attention_config": 3}, "attention_config 3 is not a list"),
    ({"attention_config": [[["flash"], "some"]]}, "attention_config [[['flash'], 'some']] is not a list"),
    ({"intermediate_size": 8, "expansion_factor": 2}, "intermediate_size 8 and expansion_factor 2 "),
    ({"rotary_pct": True}, "rotary_pct to true"),
    ({"lr_decay_iters": 5, "lr_decay_fraction": 0.5}, "lr_decay_iters 5 and lr_decay_fraction 0.5 "),
    ({"min_lr": 0.1, "decay_lr_to": 0.1}, "min_lr 0.1 and decay_lr_to 0.1 "),
    ({"warmup": 0.1, "warmup_iters": 5}, "warmup 0.1 and warmup_iters 5 "),
    ({"master_addr": "a;touch x"}, 'master_addr: "a;touch x" is not a host name'),
]


@pytest.mark.parametrize(("changes", "line"), REFUSED)
def test_refusals(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        converted(**changes)
    assert str(caught.value).removeprefix("the configuration sets ").startswith(line) or f", and {line}" in str(
        caught.value
    )
    assert ": " in str(caught.value) and "\n" not in str(caught.value) and "; " not in str(caught.value)


REMARKED: list[tuple[dict[str, Any], set[str]]] = [
    (
        {"num_experts": 1, "moe_top_k": 2, "te_fp8_format": "hybrid", "te_fp8_mha": False},
        {"moe_top_k", "te_fp8_format"},
    ),
    ({"zero_optimization": {"stage": 2}}, {"zero_optimization.stage"}),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "reduce_scatter": False, "x": True}},
        {"zero_optimization.offload_optimizer", "zero_optimization.x"},
    ),
    ({"deepspeed_extra_args": {"compile": {"deepcompile": True}}}, {"compile"}),
    ({"flops_profiler": {"enabled": False}, "wall_clock_breakdown": False}, set()),
    (
        {"bf16": {"bf16": True, "enabled": True, "loss_scale": 0}},
        {"bf16.bf16", "bf16.loss_scale", "zero_optimization.stage"},
    ),
    ({"optimizer": {"type": "cpu_torch_adam"}}, {"optimizer.type"}),
    # Parts that NeoX drops.
    ({"sliding_window_width": 64}, {"sliding_window_width"}),
    ({"gpt_j_residual": True, "use_bias_in_mlp": False}, {"gpt_j_residual"}),
    ({"pipe_parallel_size": 2, "pipe_partition_method": "uniform"}, {"pipe_partition_method"}),
    ({"load": "there", "hostfile": "/mock_path", "force_multi": True}, {"load", "hostfile /mock_path", "force_multi"}),
]


@pytest.mark.parametrize(("changes", "keys"), REMARKED)
def test_settings_without_a_flag_are_remarked(changes: dict[str, Any], keys: set[str]) -> None:
    conversion = converted(**changes)
    assert conversion.remarks.keys() == keys
    assert {key for line in conversion.comments() for key in line.split(": ")[0].split(", ")} == keys
    assert changes.get("hostfile") is None or conversion.command().startswith("terapipe train \\\n")


def test_all_refusals_are_in_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        converted(train_epochs=2, pos_emb="alibi")
    assert [part.split()[3] for part in str(caught.value).split("; ")] == ["pos_emb", "train_epochs"]


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
    assert conversion.remarks.keys() == ({"lr_decay_iters"} if style == "cosine" and end else set())


def test_a_decay_that_ends_between_iterations_is_remarked() -> None:
    assert cut_off(100, 0.0, highest=1.0, lowest=0.1)[0] == 90
    end, warmup_fraction, exact = cut_off(100, 0.01, highest=1.0, lowest=0.333)
    assert (end, exact) == (67, False)
    assert warmup_fraction * end == pytest.approx(1.0, rel=1e-15)
    assert "lr_decay_style" in converted(optimizer={"params": {"lr": 1.0}}, min_lr=0.333).remarks


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
    assert flags == {"hostfile": str(hostfile), "num_accelerators": "8", "num_nodes": "2", "launcher": "slurm"}


OPERATION = without_counterpart("operation")
REFUSING = {
    key.partition("=")[0] for part in ("another-model", "another-training") for key in without_counterpart(part)
}


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted({*REFUSING, *OPERATION, "xyzzy", "no-such"})),
        st.sampled_from([3, "text", [2], {"a": 1}, False]),
    )
)
def test_every_setting_is_remarked_or_refused(extra: dict[str, Any]) -> None:
    """Settings of operation have their remark; all others end the conversion, unless they are off."""
    extra = {key: value for key, value in extra.items() if "." not in key}
    on = {key for key, value in extra.items() if value is not False}
    try:
        conversion = converted(**extra)
    except ConfigError as error:
        assert on - OPERATION.keys() == {refusal.split()[3] for refusal in str(error).split("; ")}
        return
    assert on <= OPERATION.keys() and conversion.remarks.keys() == on
    parsed(conversion)
