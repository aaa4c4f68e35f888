"""Parts of the model: derived settings, and settings that are refused."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import BlockShape

PATH = "--heterogeneous-layers-config-path"
USUAL = BlockShape(num_key_value_heads=8, ffn_hidden_size=256)


def model(**given: Any) -> ModelConfig:
    return ModelConfig(**({"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 128} | given))


def described(*entries: Any) -> str:
    return json.dumps({"block_configs": entries})


def with_layers(text: str, **given: Any) -> ModelConfig:
    return model(heterogeneous_layers_config_path=text, **given)


FILES: list[tuple[bytes, str]] = [
    *((text, " is not a JSON object: ") for text in (b"[]", b"3", b'"block_configs"')),
    (b"{", " is not JSON"),
    (b"\xff\xfe{", " is not UTF-8 text"),
]


@pytest.mark.parametrize(("text", "rule"), FILES)
def test_files_that_are_refused(text: bytes, rule: str, tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    file.write_bytes(text)
    with pytest.raises(UserError) as caught:
        with_layers(str(file))
    line = str(caught.value)
    assert line.startswith(f"{PATH} {file}{rule}") and ": " in line and "\n" not in line, line


def test_layers_without_a_description_are_alike() -> None:
    assert model(num_layers=3).blocks == (USUAL,) * 3


def test_a_file_is_read_once_and_its_text_kept(tmp_path: Path) -> None:
    text = described({"attention": {"num_query_groups": 2}}, {"mlp": {"no_op": True}})
    file = tmp_path / "layers.json"
    file.write_text(json.dumps(json.loads(text), indent=4))
    by_path, inline = with_layers(str(file)), with_layers(f"  {text}\n")
    file.unlink()
    assert by_path == inline
    assert json.loads(by_path.heterogeneous_layers_config_path) == json.loads(text)
    # As in a checkpoint, and as in an evaluation.
    longer = replace(by_path, seq_length=256, max_position_embeddings=256)
    assert longer.blocks == by_path.blocks
    assert longer.heterogeneous_layers_config_path == by_path.heterogeneous_layers_config_path
    assert ModelConfig(**json.loads(json.dumps(asdict(by_path)))) == by_path


def test_rotated_channels() -> None:
    rope = {"position_embedding_type": "rope", "kv_channels": 64}
    assert [model(rotary_percent=part, **rope).rotary_channels for part in (1.0, 0.5, 0.25)] == [64, 32, 16]
    # Without rotations an odd width is allowed.
    assert model(kv_channels=5).kv_channels == 5
