"""Sections and the rules between them: every refusal is one line with the value, the rule and the remedy."""

from dataclasses import fields
from pathlib import Path

import pytest

from deepspeed_ext.plan.text_files import field_texts
from megatron_terapipe.arguments import build_config
from megatron_terapipe.config import Config, ParallelConfig
from megatron_terapipe.config.logging import LoggingConfig
from megatron_terapipe.errors import ConfigError

REQUIRED = {
    **{"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128, "micro_batch_size": 2},
    **{"train_iters": 10, "lr": 1e-3, "data_path": ("corpus",)},
}


def config(**given: object) -> Config:
    return build_config({**REQUIRED, **given})


def test_vocabulary_is_padded() -> None:
    assert config(vocab_size=50257).model.padded_vocab_size() == 50304
    # A tensor-parallel size that divides 128 changes nothing; one that does not must divide the rows as well.
    sizes = {2: 50304, 8: 50304, 128: 50304, 256: 50432, 5: 50560, 6: 50304, 100: 51200}
    for size, rows in sizes.items():
        assert config(vocab_size=50257).model.padded_vocab_size(tensor_parallel_size=size) == rows
    with pytest.raises(ConfigError, match=r"--vocab-size"):
        config().model.padded_vocab_size()


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, (128,)),
        ({"num_token_slices": 3}, (43, 43, 42)),
        ({"token_slices": "64,40,24"}, (64, 40, 24)),
        ({"token_slices": "64, 40, 24", "num_token_slices": 3}, (64, 40, 24)),
        ({"token_slices": "balanced", "num_token_slices": 1}, (128,)),
    ],
)
def test_token_slices(given: dict[str, object], lengths: tuple[int, ...]) -> None:
    assert config(**given).token_slices().lengths == lengths
    assert config(**given).parallel.num_token_slices == len(lengths)


def test_layout_takes_the_rest_of_the_world_for_data() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2, num_token_slices=4)
    layout = parallel.layout(8)
    assert (layout.data_parallel_size, layout.pipeline_parallel_size, layout.num_token_slices) == (4, 2, 4)
    with pytest.raises(ConfigError, match=r"7 is not a multiple of .*launch a multiple of 2"):
        parallel.layout(7)
    with pytest.raises(ConfigError, match=r"--data-parallel-size 2 contradicts the 8 processes .*launch 4 processes"):
        ParallelConfig(pipeline_model_parallel_size=2, data_parallel_size=2).layout(8)


def test_micro_batches() -> None:
    assert config(global_batch_size=16).num_micro_batches(2) == 4
    assert config().num_micro_batches(4) == 1
    assert config().global_batch_size(4) == 8


def test_derived_values_of_sections() -> None:
    for given, save, directory in (
        (None, None, "stalled_pipeline"),
        (None, "there", "there/stalled_pipeline"),
        ("here", "there", "here"),
    ):
        assert LoggingConfig(ledger_directory=given).ledgers(save) == Path(directory)
    for switches, dtype in (({}, "fp32"), ({"fp16": True}, "fp16"), ({"bf16": True}, "bf16")):
        assert config(**switches).precision.dtype == dtype


def test_every_field_has_a_docstring_and_a_name_of_its_own() -> None:
    names: list[str] = []
    for section in Config.sections().values():
        own = [declared.name for declared in fields(section)]
        assert sorted(field_texts(section)) == sorted(own), section
        names += own
    assert len(names) == len(set(names))
