"""The schema of a strategy takes what the trainer and the search read."""

from megatron_terapipe.config.parsing import parse_json
from megatron_terapipe.file_formats.table import FILE_FORMATS
from megatron_terapipe.strategy import DIMENSIONS, Strategy
from tests.file_formats.forms import check_reader, validate

FULL = Strategy(
    data_parallel_size=2,
    pipeline_parallel_size=2,
    num_token_slices=2,
    token_slices=(5, 3),
    global_batch_size=4,
    stage_partition=(0, 5, 12),
    placement=(0, 1, 2, 3),
)


def test_what_is_read_and_what_is_not() -> None:
    relations = ("is not a multiple of", "contradicts token_slices", "do not go together")
    for strategy in (Strategy(), FULL):
        read = lambda text: Strategy.from_json(parse_json(text, "it"))  # noqa: E731
        check_reader("strategy", strategy.to_json(), read, relations=relations)


def test_what_is_written() -> None:
    validate("strategy", FULL.to_json())
    schema = FILE_FORMATS["strategy"].json_schema()
    assert [*schema["properties"]] == [each.name for each in DIMENSIONS]
    assert all(each["description"].endswith(".") for each in schema["properties"].values())
    # Strategies in answers are the same, and whole.
    in_answers = FILE_FORMATS["answer"].json_schema()["$defs"]["Entry"]["properties"]["strategy"]
    assert in_answers["properties"] == schema["properties"] and in_answers["required"] == [*schema["properties"]]
