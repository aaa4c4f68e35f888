"""Command lines by table: `meanings.txt`, and `refusals.txt`, each one line with the value, the rule and a remedy."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.arguments import Flag, build_config, flags, parse_arguments
from megatron_terapipe.config import CheckpointConfig, DataConfig
from megatron_terapipe.config.options import flag
from megatron_terapipe.errors import ConfigError

BASE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --lr 1e-3"
GIVEN = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128, "micro_batch_size": 2}
GIVEN |= {"train_iters": 10, "lr": 1e-3, "mock_data": True}


def rows(name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the words of each command line of a table; and fields with their values, or parts of the refusal."""
    more = ""
    for row in Path(__file__).with_name(name).read_text().splitlines():
        if row.startswith("["):
            more = row.strip("[]")
        elif row and not row.startswith("#"):
            words, _, parts = row.partition(" => ")
            yield f"{BASE} {more} {words}", parts.split(" | ")


@pytest.mark.parametrize(("words", "parts"), list(rows("refusals.txt")))
def test_a_refusal_is_one_line(words: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_arguments(shlex.split(words)).evaluation_batch(2)
    line = str(caught.value)
    assert all(part in line for part in parts), line
    assert ": " in line and "\n" not in line


@pytest.mark.parametrize(("words", "parts"), list(rows("meanings.txt")))
def test_flags_set_fields(words: str, parts: list[str]) -> None:
    config = parse_arguments(shlex.split(words))
    found = {name: str(value) for each in config.sections() for name, value in asdict(getattr(config, each)).items()}
    for name, _, value in (part.partition(" ") for part in parts):
        assert found[name] == value


NUMBERS = [each for each in flags() if each.kind in (int, float) and not each.choices]


@pytest.mark.parametrize("each", NUMBERS, ids=lambda each: each.name)
def test_a_number_out_of_its_bounds_is_refused(each: Flag) -> None:
    bounds = each.option
    numbers = [10**30, 10**400] if each.kind is int else [1e300, float("inf"), float("nan")]
    numbers += [] if bounds.least is None else [bounds.least - 1]
    numbers += [bound for bound in (bounds.above, bounds.below) if bound is not None]
    for number in numbers:
        with pytest.raises(ConfigError) as caught:
            build_config(GIVEN | {each.name: (number,) if each.repeated else number})
        line = str(caught.value)
        assert line.startswith(f"{flag(each.name)} ") and ": give " in line and "\n" not in line


def test_help_and_the_list_of_flags_state_the_bounds() -> None:
    texts = {each.name: each.help for each in NUMBERS}
    assert texts["num_layers"].endswith("Transformer layers. 1 to 10,000.")
    assert texts["lr"].endswith(" Above 0, up to 100.")
    assert texts["hidden_dropout"].endswith(" 0 or more, below 1.")
    assert all(each.option.bounds for each in NUMBERS)


def test_sections_refuse_values_that_no_command_line_gives_them() -> None:
    for words, line in (
        ({"fp16": True}, "--fp16 with --zero-stage 0 would train on wrongly scaled gradients: use --zero-stage 1"),
        (
            {"bf16": True, "accumulate_allreduce_grads_in_fp32": True},
            "--accumulate-allreduce-grads-in-fp32 with",
        ),
    ):
        with pytest.raises(ConfigError, match=f"^{line}"):
            build_config(GIVEN | words | {"zero_stage": 0})
    with pytest.raises(ConfigError, match=r"^--data-path \(empty\) "):
        DataConfig(data_path=())
    with pytest.raises(ConfigError, match=r"^--extra-save-iterations \(empty\) "):
        CheckpointConfig(save="x", extra_save_iterations=())
