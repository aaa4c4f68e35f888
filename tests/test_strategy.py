"""Strategies: their JSON is the contract between the search and the trainer."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning import check_trainable
from megatron_terapipe.strategy import DIMENSIONS, Strategy

FIELDS = """data_parallel_size sequence_parallel_size tensor_parallel_size pipeline_parallel_size num_token_slices
token_slices micro_batch_size global_batch_size schedule num_model_chunks sequence_parallel recompute offload
key_value_gradients zero_stage stage_partition vocabulary_stages placement""".split()


@draw.composite
def any_strategy(drawn: draw.DrawFn) -> Strategy:
    size = draw.integers(1, 8)
    lengths = drawn(draw.none() | draw.lists(size, min_size=1, max_size=8).map(tuple))
    micro, data = drawn(size), drawn(size)
    batches = drawn(draw.none() | size)
    return Strategy(
        data_parallel_size=data,
        tensor_parallel_size=drawn(size),
        pipeline_parallel_size=drawn(size),
        num_token_slices=len(lengths) if lengths else drawn(size),
        token_slices=lengths,
        micro_batch_size=micro,
        global_batch_size=batches and batches * micro * data,
        num_model_chunks=drawn(size),
        sequence_parallel=drawn(draw.booleans()),
        key_value_gradients=drawn(draw.sampled_from(("fp32", "bf16"))),
        zero_stage=drawn(draw.integers(0, 3)),
        stage_partition=drawn(draw.just("parameters") | draw.lists(size).map(tuple)),
        placement=drawn(draw.none() | draw.lists(size).map(tuple)),
    )


@given(any_strategy())
def test_json_and_back(strategy: Strategy) -> None:
    document = json.loads(json.dumps(strategy.to_json()))
    assert list(document) == FIELDS
    assert Strategy.from_json(document) == strategy


def test_fields_left_out_have_defaults() -> None:
    assert Strategy.from_json({}) == Strategy()
    assert Strategy().num_micro_batches == 1
    strategy = Strategy(data_parallel_size=2, pipeline_parallel_size=4, micro_batch_size=2, global_batch_size=16)
    assert (strategy.world_size, strategy.num_micro_batches) == (8, 4)


def test_cut() -> None:
    assert Strategy(num_token_slices=2).cut(5).lengths == (3, 2)
    assert Strategy(num_token_slices=2, token_slices=(1, 4)).cut(5).lengths == (1, 4)
    with pytest.raises(ConfigError, match=r"strategy: token slices 1,4 sum to 5, but .* 6 tokens"):
        Strategy(num_token_slices=2, token_slices=(1, 4)).cut(6)
    # Each tensor-parallel rank has as many tokens of each.
    shared = Strategy(tensor_parallel_size=4, sequence_parallel=True, num_token_slices=3)
    assert shared.cut(32).lengths == (12, 12, 8)


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ([], "strategy: [] is not a JSON object"),
        ({"pp": 2}, "strategy: field 'pp' is not known: choose among data_parallel_size, "),
        ({"micro_batch_size": 0}, "strategy: micro_batch_size 0 "),
        ({"zero_stage": True}, "strategy: zero_stage true "),
        ({"sequence_parallel": 1}, "strategy: sequence_parallel 1 "),
        ({"schedule": 5}, "strategy: schedule 5 "),
        ({"stage_partition": [0, -1]}, "strategy: stage_partition -1 "),
        ({"token_slices": "1,2"}, 'strategy: token_slices "1,2" '),
        ({"token_slices": [1, 2]}, "strategy: num_token_slices 1 contradicts token_slices, which lists 2"),
        ({"global_batch_size": 7, "micro_batch_size": 2}, "strategy: global_batch_size 7 is not a multiple of micro_"),
        # Values that the trainer does not have.
        ({"schedule": "dual"}, 'strategy: schedule "dual" cannot be trained yet: use "gpipe" or "1f1b" or "interleave'),
        (
            {"zero_shard_size": 1, "data_parallel_size": 2},
            "strategy: zero_shard_size 1 cannot be trained yet: use null",
        ),
        ({"zero_shard_size": 3, "data_parallel_size": 4}, "strategy: zero_shard_size 3 is not a divisor of "),
        ({"zero_stage": 2}, "strategy: zero_stage 2 cannot be trained yet: use 0 or 1"),
        ({"placement": [1, 0]}, "strategy: placement "),
    ],
)
def test_wrong_documents_end_in_one_line(document: object, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Strategy.from_json(document).settings()
    assert str(caught.value).startswith(line)
    assert ": " in str(caught.value) and "\n" not in str(caught.value)


def test_settings() -> None:
    settings = Strategy(num_token_slices=2, token_slices=(3, 2), stage_partition=(0, 1), zero_stage=0).settings()
    assert set(settings) == {each.setting for each in DIMENSIONS} - {""}
    assert (settings["token_slices"], settings["stage_partition"], settings["zero_stage"]) == ("3,2", "0,1", 0)
    assert settings["tensor_model_parallel_size"] == 1
    # A placement in order is that of the launcher.
    settings = Strategy(tensor_parallel_size=2, placement=(0, 1), recompute="selective").settings()
    assert (settings["tensor_model_parallel_size"], settings["recompute_granularity"]) == (2, "selective")


MODEL = ModelConfig(num_layers=4, hidden_size=32, num_attention_heads=4, seq_length=32, vocab_size=256)


@pytest.mark.parametrize(
    ("strategy", "line"),
    [
        (Strategy(pipeline_parallel_size=5), "--pipeline-model-parallel-size 5 is more than --num-layers 4: "),
        (Strategy(tensor_parallel_size=8), "--num-attention-heads 4 is not a multiple of --tensor-model-parallel"),
        (Strategy(num_token_slices=2, token_slices=(8, 16)), "--token-slices: token slices 8,16 sum to 24, but"),
        (
            Strategy(pipeline_parallel_size=2, num_model_chunks=2, schedule="1f1b"),
            "--pipeline-schedule 1f1b: ",
        ),
        (Strategy(stage_partition=(0, 4), pipeline_parallel_size=2), "--stage-partition"),
        (
            Strategy(tensor_parallel_size=4, sequence_parallel=True, num_token_slices=2, token_slices=(15, 17)),
            "--sequence-parallel deals each token slice to 4 ranks, but one has 15 tokens",
        ),
    ],
)
def test_the_trainers_checks_without_the_trainer(strategy: Strategy, line: str) -> None:
    with pytest.raises(UserError) as caught:
        check_trainable(strategy, MODEL)
    assert str(caught.value).startswith(line)
    shape = {"data_parallel_size": 3, "pipeline_parallel_size": 4, "num_token_slices": 5}
    check_trainable(Strategy(**shape, global_batch_size=6), MODEL)


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(global_batch_size=2),
        Strategy(data_parallel_size=2, pipeline_parallel_size=2, micro_batch_size=2, global_batch_size=8, zero_stage=0),
        Strategy(pipeline_parallel_size=2, stage_partition=(0, 3, 4), schedule="optimised", global_batch_size=4),
        Strategy(tensor_parallel_size=2, sequence_parallel=True, recompute="full", global_batch_size=1),
        Strategy(pipeline_parallel_size=6, stage_partition=(0, 0, 1, 2, 3, 4, 4), global_batch_size=1),
        Strategy(pipeline_parallel_size=2, num_model_chunks=2, schedule="interleaved", global_batch_size=2),
        Strategy(num_token_slices=2, token_slices=(24, 8), stage_partition="parameters", global_batch_size=1),
    ],
)
def test_a_configuration_gives_its_strategy_back(strategy: Strategy) -> None:
    config = strategy.config(MODEL)
    expected = replace(strategy, token_slices=strategy.cut(MODEL.seq_length).lengths)
    assert Strategy.of_config(config, strategy.data_parallel_size) == expected


def test_uneven_ends_and_open_choices_as_a_strategy() -> None:
    config = Strategy(pipeline_parallel_size=2, global_batch_size=1).config(MODEL)
    ends = replace(config, parallel=replace(config.parallel, stage_partition="0,3,4"))
    assert Strategy.of_config(ends, 1).stage_partition == (0, 3, 4)
    open_ = replace(config.parallel, token_slices="auto", num_token_slices=None, stage_partition="auto")
    found = Strategy.of_config(replace(config, parallel=open_), 1)
    assert found == Strategy(pipeline_parallel_size=2, global_batch_size=1)


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("tensor_parallel_size", "2,4,2", (2, 4)),
        ("token_slices", "96,160", (96, 160)),
        ("sequence_parallel", "on, off", (True, False)),
        ("stage_partition", "uniform,solved", ("uniform", "solved")),
        ("stage_partition", "0,0,3,6", ((0, 0, 3, 6),)),
        ("zero_stage", "2", "--zero-stage 2 is not whole numbers among 0, 1, 3 "),
        ("micro_batch_size", "1,x", "--micro-batch-size 1,x is not whole numbers from 1 "),
        ("token_slices", "0,4", "--token-slices 0,4 is not lengths "),
        ("schedule", "dual", "--schedule dual is not known: choose among gpipe, 1f1b, interleaved, zero-bubble, "),
        ("sequence_parallel", "yes", "--sequence-parallel yes is not known: choose among off, on"),
    ],
)
def test_values_of_a_flag(name: str, text: str, values: tuple[object, ...] | str) -> None:
    (dimension,) = (each for each in DIMENSIONS if each.name == name)
    if not isinstance(values, str):
        assert dimension.parse(text) == values
        return
    with pytest.raises(ConfigError) as caught:
        dimension.parse(text)
    assert str(caught.value).startswith(values)


def test_declarations_of_dimensions_are_complete() -> None:
    """Dimensions with a flag are searched, or decided by the search; no two have one place in ties."""
    assert len({each.tie for each in DIMENSIONS}) == len(DIMENSIONS)
    assert {each.name for each in DIMENSIONS if each.flag_help} == {
        each.name for each in DIMENSIONS if each.tried is not None
    } | {"token_slices"}
    assert all(each.default in each.trained for each in DIMENSIONS if each.trained)
