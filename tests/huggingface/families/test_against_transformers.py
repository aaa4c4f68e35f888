"""The settings of every family are those of transformers' class of it, with its defaults."""

from typing import Any

import pytest

from megatron_terapipe.huggingface.families.registry import FAMILIES
from megatron_terapipe.huggingface.families.settings import SettingsFile
from tests.huggingface.files import NEEDED

transformers = pytest.importorskip("transformers")

HARMLESS = {
    # Of every class: about the file, and about the results of a call.
    *("_name_or_path", "architectures", "dtype", "id2label", "label2id", "model_type", "problem_type"),
    *("output_attentions", "output_hidden_states", "return_dict", "transformers_version"),
    # Feed-forward layers in pieces: the same result.
    "chunk_size_feed_forward",
    # Generation.
    *("bos_token_id", "eos_token_id", "eod_token_id", "pad_token_id", "sep_token_id", "use_cache"),
    # Written together with the keys that they follow from.
    *("_sliding_window_pattern", "num_key_value_heads"),
}
"""Settings that change no logit."""


def defaults_of(name: str) -> dict[str, Any]:
    """The default settings of a model."""
    return transformers.CONFIG_MAPPING[name](**NEEDED.get(name, {})).to_dict()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_setting_that_transformers_has_is_understood(name: str) -> None:
    assert not defaults_of(name).keys() - HARMLESS - FAMILIES[name].keys


@pytest.mark.parametrize("name", FAMILIES)
def test_missing_keys_have_the_defaults_of_transformers(name: str) -> None:
    family = FAMILIES[name]
    assert family.read(SettingsFile(NEEDED.get(name, {}), "")) == family.read(SettingsFile(defaults_of(name), ""))


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_reads_the_written_file_as_the_same_model(name: str) -> None:
    family = FAMILIES[name]
    model = family.read(SettingsFile(NEEDED.get(name, {}), ""))
    assert not family.differences(model)
    written = {key: value for key, value in family.write(model).items() if key not in ("architectures", "model_type")}
    theirs = transformers.CONFIG_MAPPING[name](**written).to_dict()
    assert family.read(SettingsFile(theirs, "")) == model
    assert (
        family.architecture == transformers.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
        if hasattr(transformers, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
        else hasattr(transformers, family.architecture)
    )
