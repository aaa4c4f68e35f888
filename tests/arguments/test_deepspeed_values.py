"""Values of a DeepSpeed file: they take the place of defaults, and must not contradict flags."""

import json
from pathlib import Path

import pytest

from megatron_terapipe.arguments import parse_arguments, read_arguments
from megatron_terapipe.config import Config
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.training.deepspeed_config import deepspeed_config

BARE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --train-iters 10 --data-path corpus"


def of_file(directory: Path, file: object, words: str) -> Config:
    path = directory / "ds.json"
    path.write_text(json.dumps(file))
    return parse_arguments(f"{words} --deepspeed_config {path}".split())


@pytest.mark.parametrize(
    ("words", "file", "parts"),
    [
        # Flags, a file, and parts of the line: the setting with its value, the flag that differs, or the kind of value.
        ("--zero-stage 1", {"zero_optimization": {"stage": 0}}, "zero_optimization.stage to 0|--zero-stage makes it 1"),
        ("--bf16", {"bf16": {"enabled": False}}, "bf16.enabled to false|--bf16 makes it true"),
        ("--clip-grad 1", {"gradient_clipping": 0.5}, "gradient_clipping to 0.5|--clip-grad makes it 1.0"),
        (
            "--fp16 --hysteresis 3",
            {"fp16": {"enabled": True, "hysteresis": 2}},
            "fp16.hysteresis to 2|--hysteresis makes",
        ),
        (
            "--fp16",
            {"bfloat16": {"enabled": True}},
            "--fp16 and --bf16|(--bf16 from bf16.enabled of --deepspeed-config FILE)",
        ),
        ("--zero-stage 0", {"zero_optimization": {"stage": 3}}, "zero_optimization.stage to 3|--zero-stage makes it 0"),
        (
            "",
            {"zero_optimization": {"stage": 4}},
            "--zero-stage 4|(--zero-stage from zero_optimization.stage of --deepspeed-config FILE)",
        ),
        (
            "--use-distributed-optimizer",
            {"zero_optimization": {"stage": 0}},
            "--use-distributed-optimizer|--zero-stage 0|FILE",
        ),
        ("", {"gradient_clipping": "much"}, 'gradient_clipping to "much"|a number'),
        ("", {"fp16": {"enabled": 1}}, "fp16.enabled to 1|true or false"),
        ("", {"fp16": {"initial_scale_power": 400}}, "fp16.initial_scale_power to 400|from 0 to 63"),
        ("", {"optimizer": {"params": {"betas": [0.9]}}}, "optimizer.params.betas to [0.9]|a list of two numbers"),
    ],
)
def test_a_file_that_contradicts_flags(tmp_path: Path, words: str, file: object, parts: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config = of_file(tmp_path, file, f"{BARE} --lr 1 --micro-batch-size 2 {words}")
        deepspeed_config(config, config.parallel.layout(1))
    line = str(caught.value).replace(str(tmp_path / "ds.json"), "FILE")
    assert all(part in line for part in (*parts.split("|"), "--deepspeed-config FILE", ": ")), line
    assert "\n" not in line


def test_a_value_of_the_file_wins_over_a_default(tmp_path: Path) -> None:
    file = {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1},
        "fp16": {
            **{"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 11},
            "hysteresis": 4,
        },
        "optimizer": {"type": "Adam", "params": {"lr": 0.25, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0}},
    }
    config = of_file(tmp_path, file, BARE)
    assert (config.batch.global_batch_size, config.batch.micro_batch_size) == (24, 3)
    assert config.precision.dtype == "fp16"
    assert (config.precision.loss_scale, config.precision.initial_loss_scale) == (None, 2048.0)
    assert (config.precision.loss_scale_window, config.precision.hysteresis) == (500, 4)
    optimizer = config.optimizer
    assert (optimizer.clip_grad, optimizer.lr, optimizer.adam_eps, optimizer.weight_decay) == (0.5, 0.25, 1e-6, 0.0)
    assert (optimizer.adam_beta1, optimizer.adam_beta2) == (0.8, 0.9)
    assert deepspeed_config(config, config.parallel.layout(2))["gradient_accumulation_steps"] == 4


def test_a_file_that_counts_micro_batches(tmp_path: Path) -> None:
    file = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5}
    config = of_file(tmp_path, file, f"{BARE} --lr 1")
    assert [config.global_batch_size(ranks) for ranks in (1, 3)] == [10, 30]
    # A flag for the same thing decides, and is held against the file later.
    config = of_file(tmp_path, file, f"{BARE} --lr 1 --global-batch-size 8")
    with pytest.raises(ConfigError, match="gradient_accumulation_steps to 5, but --global-batch-size makes it 4"):
        deepspeed_config(config, config.parallel.layout(1))


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "bf16": {"enabled": "auto"}}
    config = of_file(tmp_path, file, f"{BARE} --lr 1 --micro-batch-size 4 --bf16")
    assert (config.batch.micro_batch_size, config.precision.bf16) == (4, True)


def test_settings_without_effect_are_listed_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    file = {
        "activation_checkpointing": {"partition_activations": True, "profile": False, "number_checkpoints": 4},
        "flops_profiler": {"enabled": True},
    }
    path.write_text(json.dumps(file))
    arguments = read_arguments([*BARE.split(), *"--lr 1 --micro-batch-size 2".split(), "--deepspeed_config", str(path)])
    (line,) = [line for line in arguments.notices if "settings" in line]
    named = ("partition_activations", "number_checkpoints")
    assert [part.split(" (")[0] for part in line.partition("here: ")[2].split("; ")] == [
        *("flops_profiler", *(f"activation_checkpointing.{name}" for name in named))
    ]
    deepspeed_config(arguments.config, arguments.config.parallel.layout(2))


Z3 = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}, "cpu_offload": True}
MORE_MEMORY = "ZeRO 1, which trains the same with more memory"


@pytest.mark.parametrize(
    ("words", "file", "scale", "lines"),
    [
        ("--zero-stage 3", {}, None, f"--zero-stage 3 is run as {MORE_MEMORY}"),
        ("", {"zero_optimization": {"stage": 2}}, None, f"zero_optimization.stage 2 (run as {MORE_MEMORY}"),
        (
            "--zero-stage 1 --cpu-optimizer --use-torch-fsdp2 --ds-sequence-parallel-fpdt-chunk-size 65536",
            {"zero_optimization": Z3, "zero_allow_untested_optimizer": False},
            None,
            "--cpu-optimizer, --use-torch-fsdp2, --ds-sequence-parallel-fpdt-chunk-size|zero_optimization.cpu_offload|"
            f"zero_optimization.offload_optimizer (weights and states|zero_optimization.stage 3 (run as {MORE_MEMORY}",
        ),
        (
            "--deepspeed --fp16 --loss-scale 12",
            {"fp16": {"enabled": True, "loss_scale": 0}},
            None,
            "--loss-scale 12 has no effect beside the fp16 section",
        ),
        ("--deepspeed --fp16 --loss-scale 12", {"fp16": {"enabled": True, "loss_scale": 64}}, 64.0, "--loss-scale 12 "),
        ("--deepspeed --fp16 --loss-scale 12", {"fp16": {"enabled": "auto"}}, 12.0, ""),
        ("--fp16 --loss-scale 12", {"fp16": {"enabled": True}}, 12.0, ""),
    ],
)
def test_scripts_of_megatron_deepspeed_train_the_same(
    tmp_path: Path, words: str, file: object, scale: float | None, lines: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(file))
    more = f"{BARE} --lr 1 --micro-batch-size 2 {words} --deepspeed_config {path}".split()
    arguments = read_arguments(more)
    said = "\n".join(arguments.notices)
    assert all(line in said for line in lines.split("|"))
    assert ("--loss-scale" in lines) == ("--loss-scale" in said)
    assert (arguments.config.optimizer.zero_stage, arguments.config.precision.loss_scale) == (1, scale)
    # DeepSpeed gets what is run.
    settings = deepspeed_config(arguments.config, arguments.config.parallel.layout(2))
    assert settings["zero_optimization"]["stage"] == 1 and settings["zero_allow_untested_optimizer"] is True
    assert not any("offload" in name for name in settings["zero_optimization"])


FP16, OFF = "DeepSpeed needs it for fp16", {"zero_optimization": {"stage": 0}}


@pytest.mark.parametrize(
    ("words", "file", "line"),
    [
        ("--fp16 --zero-stage 0", None, FP16),
        ("--fp16", OFF, FP16),
        (
            "--bf16 --zero-stage 0",
            {**OFF, "data_types": {"grad_accum_dtype": "fp32"}},
            "bf16 with gradients that add up",
        ),
        ("--bf16 --zero-stage 0", None, ""),
        ("--zero-stage 0", None, ""),
    ],
)
def test_zero_0_is_run_as_zero_1_only_where_deepspeed_needs_it(
    tmp_path: Path, words: str, file: object, line: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(file))
    more = [] if file is None else ["--deepspeed_config", str(path)]
    arguments = read_arguments([*BARE.split(), *"--lr 1 --micro-batch-size 2".split(), *words.split(), *more])
    assert arguments.config.optimizer.zero_stage == bool(line)
    notices = [notice for notice in arguments.notices if "--zero-stage 0 is run as --zero-stage 1" in notice]
    assert len(notices) == bool(line) and line in "".join(notices)
    settings = deepspeed_config(arguments.config, arguments.config.parallel.layout(1))
    assert settings["zero_optimization"]["stage"] == bool(line)
