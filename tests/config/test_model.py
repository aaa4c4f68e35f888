"""Parts of the model: what follows from the settings, and what they may not be."""

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


def assert_refused(rule: str, remedy: str, **given: Any) -> None:
    with pytest.raises(UserError) as caught:
        model(**given)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(rule), line
    assert remedy in line.removeprefix(rule), line


@pytest.mark.parametrize(
    ("text", "rule", "remedy"),
    [
        ("nowhere.json", f"{PATH} nowhere.json cannot be read (No such file or directory)", "give a file that can"),
        ('{"block_configs": [', f"{PATH} is not JSON", "fix it"),
        ('{"block_configs": [], "block_configs": []}', f"{PATH} is not JSON (key 'block_configs' appears twice", "fix"),
        ('{"blocks": []}', f"{PATH} has unknown key 'blocks'", 'write {"block_configs": [{'),
        ('{"block_configs": [{}, {}], "x": 1}', f"{PATH} has unknown key 'x'", 'write {"block_configs": [{'),
        ("{}", f"{PATH} has no list `block_configs`", 'write {"block_configs": [{'),
        ('{"block_configs": []}', f"{PATH} has no list `block_configs`", 'write {"block_configs": [{'),
        ('{"block_configs": {"0": {}}}', f"{PATH} has no list `block_configs`", 'write {"block_configs": [{'),
        (described({}), f"{PATH} describes 1 layers, but --num-layers is 2", "set --num-layers 1"),
        (described({}, {}, {}), f"{PATH} describes 3 layers, but --num-layers is 2", "set --num-layers 3"),
        (described({}, 7), f"{PATH}: layer 1 is 7, not an object", "write {} for a layer as usual"),
        (described({}, {"mlp": 7}), f"{PATH}: layer 1 mlp is 7, not an object", "write {} for one as usual"),
        (described({"attention": []}, {}), f"{PATH}: layer 0 attention is [], not an object", "write {} for one"),
        (described({}, {"moe": {}}), f"{PATH}: layer 1 has unknown key 'moe'", "use attention or mlp"),
        (
            described({}, {"mlp": {"width": 3}}),
            f"{PATH}: layer 1 mlp has unknown key 'width'",
            "use ffn_hidden_size or ffn_mult or no_op",
        ),
        (
            described({"attention": {"ffn_mult": 3}}, {}),
            f"{PATH}: layer 0 attention has unknown key 'ffn_mult'",
            "use n_heads_in_group or no_op or num_query_groups",
        ),
        (described({"mlp": {"no_op": 1}}, {}), f"{PATH}: layer 0 mlp.no_op is 1", "give true or false"),
        (
            described({"attention": {"replace_with_linear": True}}, {}),
            f"{PATH}: layer 0 attention.replace_with_linear: linear layers in its place",
            "use no_op",
        ),
        *(
            (
                described({"attention": {"num_query_groups": count}}, {}),
                f"{PATH}: layer 0 attention.num_query_groups {json.dumps(count)} is not a whole number above 0",
                "give one, or no_op",
            )
            for count in (0, -2, True, "2", 2.5)
        ),
        (
            described({"attention": {"num_query_groups": 3}}, {}),
            f"{PATH}: layer 0: 3 key and value heads do not divide --num-attention-heads 8",
            "give one of its divisors",
        ),
        (
            described({"attention": {"n_heads_in_group": 3}}, {}),
            f"{PATH}: layer 0 attention.n_heads_in_group 3 does not divide --num-attention-heads 8",
            "give one of its divisors",
        ),
        (
            described({}, {"mlp": {"ffn_hidden_size": 0}}),
            f"{PATH}: layer 1 mlp.ffn_hidden_size 0 is not a whole number above 0",
            "give one, or no_op",
        ),
        (
            described({}, {"mlp": {"ffn_hidden_size": 10**18}}),
            f"{PATH}: layer 1 mlp.ffn_hidden_size {10**18} is more than 10,000,000",
            "give 10,000,000 or less",
        ),
        *(
            (
                described({}, {"mlp": {"ffn_mult": mult}}),
                f"{PATH}: layer 1 mlp.ffn_mult {json.dumps(mult)} is not a number above 0",
                "give one",
            )
            for mult in (0, -1, True, "4")
        ),
    ],
)
def test_refused_layers(text: str, rule: str, remedy: str) -> None:
    assert_refused(rule, remedy, heterogeneous_layers_config_path=text)


@pytest.mark.parametrize("text", ["[]", "3", '"block_configs"'])
def test_a_file_that_holds_no_object(tmp_path: Path, text: str) -> None:
    file = tmp_path / "layers.json"
    file.write_text(text)
    rule = f"{PATH} {file} is not a JSON object"
    assert_refused(rule, "write one with a list `block_configs`", heterogeneous_layers_config_path=str(file))


def test_a_file_that_is_broken_is_named(tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    file.write_text("{")
    assert_refused(f"{PATH} {file} is not JSON", "fix it", heterogeneous_layers_config_path=str(file))
    file.write_bytes(b"\xff\xfe{")
    assert_refused(f"{PATH} {file} is not UTF-8 text", "fix the file", heterogeneous_layers_config_path=str(file))


@pytest.mark.parametrize(
    ("entry", "groups", "width"),
    [
        ({}, 8, 256),
        ({"attention": {}, "mlp": {}}, 8, 256),
        ({"attention": {"num_query_groups": 2}}, 2, 256),
        ({"attention": {"n_heads_in_group": 4}}, 2, 256),
        ({"attention": {"n_heads_in_group": 8}, "mlp": {"ffn_hidden_size": 40}}, 1, 40),
        ({"attention": {"no_op": True}}, 0, 256),
        ({"attention": {"no_op": True, "num_query_groups": 2}}, 0, 256),
        ({"attention": {"no_op": False, "replace_with_linear": False}}, 8, 256),
        ({"mlp": {"no_op": True}}, 8, 0),
        ({"attention": {"no_op": True}, "mlp": {"no_op": True}}, 0, 0),
    ],
)
def test_an_entry_is_a_layer(entry: dict[str, Any], groups: int, width: int) -> None:
    usual, found = with_layers(described({}, entry)).blocks
    assert usual == USUAL
    assert found == BlockShape(num_key_value_heads=groups, ffn_hidden_size=width)


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
    # As a checkpoint keeps it, and as evaluation changes it.
    longer = replace(by_path, seq_length=256, max_position_embeddings=256)
    assert longer.blocks == by_path.blocks
    assert longer.heterogeneous_layers_config_path == by_path.heterogeneous_layers_config_path
    assert ModelConfig(**json.loads(json.dumps(asdict(by_path)))) == by_path


@pytest.mark.parametrize(
    ("hidden_size", "width"),
    [(4096, 10880), (768, 2048), (64, 128), (8, 64), (24, 64), (32, 64), (2048, 5440)],
)
def test_the_default_width_with_a_gate_is_two_thirds_of_four_rounded_down(hidden_size: int, width: int) -> None:
    found = model(hidden_size=hidden_size, num_attention_heads=8, activation="swiglu").ffn_hidden_size
    assert found == width
    assert width % 64 == 0
    assert 0 <= 8 / 3 * hidden_size - width < 64 or width == 64
    assert model(hidden_size=hidden_size, num_attention_heads=8).ffn_hidden_size == 4 * hidden_size
    assert model(activation="swiglu", ffn_hidden_size=100).ffn_hidden_size == 100


def test_rotated_channels() -> None:
    rope = {"position_embedding_type": "rope", "kv_channels": 64}
    assert [model(rotary_percent=part, **rope).rotary_channels for part in (1.0, 0.5, 0.25)] == [64, 32, 16]
    # Nothing turns, so nothing must come in pairs.
    assert model(kv_channels=5).kv_channels == 5
