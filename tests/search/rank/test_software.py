"""Strategies of other trainers: only what they can run is searched."""

from dataclasses import replace

import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.trainers import SOFTWARE
from megatron_terapipe.search.rank.rules import broken_rule
from megatron_terapipe.search.rank.space import all_choices, check_runnable
from megatron_terapipe.strategy import Strategy
from tests.search.problems import small_problem


def test_only_what_a_trainer_can_run_is_searched() -> None:
    choices = all_choices(replace(small_problem(), software=SOFTWARE["megatron-core"]))
    assert choices["num_token_slices"] == (1,)
    assert set(choices["schedule"]) == {"gpipe", "1f1b", "interleaved"}
    assert set(all_choices(small_problem())["schedule"]) > set(choices["schedule"])


def test_a_flag_for_what_it_cannot_run_is_refused() -> None:
    fsdp = SOFTWARE["fsdp"]
    check_runnable({"pipeline_parallel_size": (1,), "micro_batch_size": (2, 4)}, fsdp)
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 2 does not run in fsdp: write 1"):
        check_runnable({"pipeline_parallel_size": (1, 2)}, fsdp)


def test_a_strategy_that_it_cannot_run_says_why() -> None:
    asked = Strategy(data_parallel_size=2, pipeline_parallel_size=2, schedule="zero-bubble", global_batch_size=8)
    assert broken_rule(asked, small_problem()) is None
    reason = broken_rule(asked, replace(small_problem(), software=SOFTWARE["deepspeed"]))
    assert reason == "deepspeed cannot run schedule zero-bubble, but 1f1b"
    reason = broken_rule(asked, replace(small_problem(), software=SOFTWARE["fsdp"]))
    assert reason == "fsdp cannot run pipeline_parallel_size 2, but 1"
