"""The command line: flags follow from fields, and every wrong word ends in one line."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.layout import StagePartition
from megatron_terapipe.arguments import flags, parse_arguments
from megatron_terapipe.arguments.parser import MOST_USED, groups, sections
from megatron_terapipe.arguments.spellings import Spellings
from megatron_terapipe.config import Config
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, ConfigError

REQUIRED = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --data-path corpus"
)


def parse(words: str = "") -> Config:
    return parse_arguments(f"{REQUIRED} {words}".split())


def refusal(words: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(words)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_every_field_is_a_flag_and_takes_the_default_of_its_field() -> None:
    config = parse()
    for each in flags():
        section = getattr(config, each.section, Spellings())
        if f"--{each.name.replace('_', '-')}" not in REQUIRED and not each.option.derived:
            assert getattr(section, each.name) == each.default
    names = [declared.name for section in sections().values() for declared in fields(section)]
    assert [each.name for each in flags()] == names


def test_wrong_flags_are_all_named_in_one_line_each_once() -> None:
    line = refusal(
        "--embed-layernorm --num-layer 4 --seed 1 --mtp_standalone --mtp-num-layers=8 --embed-layernorm --qqqqq"
        " --xyzzy 1 --mup"
    )
    reasons = line.split("; ")
    assert [reason.partition(":")[0] for reason in reasons] == [
        *("--embed-layernorm", "--num-layer is not a flag", "--mtp-standalone"),
        *("--qqqqq is not a flag, --xyzzy is not a flag", "--mup"),
    ]
    assert "--num-layers?" in reasons[1] and MODEL_CANNOT_BE_TRAINED in reasons[2] and "--help all" in reasons[3]
    # Flags with one reason share it.
    reasons = refusal("--sft --mhc-first-thing 8 --mhc-second-thing").split("; ")
    assert [reason.partition(":")[0] for reason in reasons] == ["--sft", "--mhc-first-thing, --mhc-second-thing"]
    with pytest.raises(ConfigError, match=r"^--micro-batch-size, --lr must be given: add them$"):
        parse_arguments("--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8".split())


def help_for(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(words.split())
    assert caught.value.code == 0
    return capsys.readouterr().out


def shown(text: str) -> set[str]:
    return {each.name for each in flags() if re.search(rf"^  --{each.name.replace('_', '-')}\b", text, re.MULTILINE)}


def test_help_is_short_and_names_its_groups(capsys: pytest.CaptureFixture[str]) -> None:
    short = help_for("--help", capsys)
    assert shown(short) == {name for names in MOST_USED.values() for name in names}
    assert len(short.splitlines()) < 120
    for name in groups():
        assert re.search(rf"\b{name}\b", short.split("GROUP is one of")[1])
    assert shown(help_for("--num-layers 2 --help all", capsys)) == {each.name for each in flags()}


@pytest.mark.parametrize("words", ["--help batch", "--help=batch"])
def test_help_for_one_group_of_flags(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(help_for(words, capsys)) == {each.name for each in flags() if each.section == "batch"}
    assert "--exit-duration-in-mins" not in help_for("--help accepted", capsys)
    with pytest.raises(ConfigError, match=r"--help flags .*: give one of model, parallel, "):
        parse_arguments(["--help", "flags"])


def test_stage_partition_file(tmp_path: Path) -> None:
    path = tmp_path / "partition.json"
    path.write_text("[0, 3, 4]")
    assert parse(f"--pipe-parallel-size 2 --stage-partition {path}").parallel.stage_bounds() == StagePartition(
        (0, 3, 4)
    )
    path.write_text('{"stages": 2}')
    assert "does not hold a list of whole numbers: write [0, 5, 12]" in refusal(f"--stage-partition {path}")
    path.write_text("[0, 3")
    assert "not JSON" in refusal(f"--stage-partition {path}")


def strategy_file(directory: Path, **document: object) -> Path:
    path = directory / "strategy.json"
    path.write_text(json.dumps(document))
    return path


def test_a_strategy_fills_in_fields_without_flags(tmp_path: Path) -> None:
    sizes = {"data_parallel_size": 2, "pipeline_parallel_size": 2, "micro_batch_size": 2, "global_batch_size": 16}
    slices = {"num_token_slices": 2, "token_slices": [72, 56], "stage_partition": [0, 1, 4]}
    path = strategy_file(tmp_path, **sizes, **slices, schedule="gpipe", recompute="full", zero_stage=0)
    config = parse(f"--strategy {path}")
    assert config.token_slices().lengths == (72, 56)
    assert config.parallel.layout(4).data_parallel_size == 2
    assert config.num_micro_batches(2) == 4
    assert (config.parallel.pipeline_schedule, config.training.recompute_granularity) == ("gpipe", "full")
    assert (config.optimizer.zero_stage, config.parallel.stage_bounds()) == (0, StagePartition((0, 1, 4)))
    assert parse(f"--strategy {path} --token-slices 72,56 --num-token-slices 2") == config
    with pytest.raises(ConfigError, match="--data-parallel-size 2 contradicts the 8 processes"):
        config.parallel.layout(8)


def test_flags_and_a_strategy(tmp_path: Path) -> None:
    path = strategy_file(tmp_path, micro_batch_size=4)
    words = REQUIRED.replace("--micro-batch-size 2", "") + f" --zero-stage 0 --strategy {path}"
    config = parse_arguments(words.split())
    assert (config.batch.micro_batch_size, config.optimizer.zero_stage) == (4, 0)
    path = strategy_file(tmp_path, pipeline_parallel_size=2, num_token_slices=2, token_slices=None)
    for flag in ("--pipeline-model-parallel-size 4", "--token-slices balanced"):
        assert refusal(f"--strategy {path} {flag}").startswith(f"{flag} contradicts --strategy {path}, where it is ")


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("--strategy {}", "stages or less (--pipeline-model-parallel-size from --strategy {})"),
        ("--pipe-parallel-size 5", "stages or less (--pipeline-model-parallel-size from --pipe-parallel-size)"),
        ("--pipeline-model-parallel-size 5", "stages or less"),
        ("--model-preset llama3.1-8b", "its divisors (--num-key-value-heads from --model-preset llama3.1-8b)"),
        (
            "--hybrid-layer-pattern M-*|M --mamba-head-dim 16 --pipeline-model-parallel-size 3",
            "the end (--stage-partition from --hybrid-layer-pattern M-*|M)",
        ),
    ],
)
def test_an_error_names_the_source_of_a_value_that_was_not_typed(words: str, end: str, tmp_path: Path) -> None:
    path = strategy_file(tmp_path, pipeline_parallel_size=5)
    assert refusal(words.format(path)).endswith(end.format(path))


def test_unreadable_strategy_file(tmp_path: Path) -> None:
    assert refusal(f"--strategy {tmp_path}/none.json").startswith(f"--strategy {tmp_path}/none.json cannot be read (No")
    (tmp_path / "broken.json").write_text('{"zero_stage": 0, "zero_stage": 1}')
    assert "is not JSON (key 'zero_stage' appears twice): fix it" in refusal(f"--strategy {tmp_path}/broken.json")
