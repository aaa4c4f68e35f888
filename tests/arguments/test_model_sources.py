"""Models from a `config.json`, and runs that begin with a folder of Hugging Face."""

import json
from math import log
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.arguments import parse_arguments, read_arguments
from megatron_terapipe.config import Config

REST = "--micro-batch-size 1 --lr 1e-3 --train-iters 5".split()
SETTINGS = {
    **{"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 300},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1},
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "attention_factor": 1.5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of Hugging Face, as far as flags look into it."""
    made = tmp_path / "theirs"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(SETTINGS))
    (made / "tokenizer.json").write_text("{}")
    return made


def parsed(*words: object) -> Config:
    return parse_arguments([*REST, *(str(word) for word in words)])


def refusal(*words: object) -> str:
    with pytest.raises(UserError) as caught:
        parsed(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("file", ["", "config.json"])
def test_a_preset_may_be_a_file_of_hugging_face(folder: Path, file: str) -> None:
    model = parsed("--mock-data", "--model-preset", folder / file, "--seq-length", 64, "--num-layers", 2).model
    assert (model.num_layers, model.hidden_size, model.seq_length) == (2, 32, 64)
    assert (model.max_position_embeddings, model.has_qkv_bias, model.has_mlp_bias) == (32768, True, False)
    # Dropout is a matter of training.
    assert model.attention_dropout == 0
    assert model.model_preset is None


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--model-preset {}/gone.json", "gone.json cannot be read"),
        ("--model-preset Qwen/Qwen2.5-7B", "--model-preset Qwen/Qwen2.5-7B is not here"),
        ("--load Qwen/Qwen2.5-7B", "--load Qwen/Qwen2.5-7B holds no model: neither a checkpoint, nor"),
        ("--model-preset llama2-7q", "--model-preset llama2-7q is not known: did you mean llama2-7b?"),
        ("--model-preset {}", "--seq-length must be given: add it"),
        ("--load {}", "--seq-length must be given: add it"),
        ("--load {} --seq-length 16 --load-tag a", "--load-tag a names a checkpoint, and --load"),
        ("--load {} --seq-length 16 --ckpt-step 3", "--ckpt-step 3 names a checkpoint, and --load"),
        ("--load {} --seq-length 16 --save {}", "holds a model of Hugging Face: name another directory"),
        ("--load {} --seq-length 99999", "--seq-length 99999 is more than --max-position-embeddings 32768"),
    ],
)
def test_sources_that_are_refused(folder: Path, words: str, parts: str) -> None:
    assert parts in refusal("--mock-data", *words.format(*[folder] * 2).split())


def test_a_file_that_is_nested_without_end_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)
    assert "config.json is not JSON (maximum recursion depth exceeded" in refusal("--model-preset", folder)


def test_a_run_begins_with_a_folder(folder: Path) -> None:
    config = parsed("--data-path", "unread", "--load", folder, "--seq-length", 64)
    assert config.model.hidden_size == 32
    assert (config.checkpoint.load, config.checkpoint.finetune) == (str(folder), True)
    assert config.data.tokenizer_type == "HuggingFaceTokenizer"
    assert config.data.tokenizer_model == str(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("of_folder", "flags", "expected"),
    [
        (None, "", ("none", 1.0, 1.0)),
        (None, "--rotary-scaling yarn --rotary-scaling-factor 4", ("yarn", 4.0, 0.1 * log(4) + 1)),
        (None, "--rotary-seq-len-interpolation-factor 8", ("linear", 8.0, 1.0)),
        ({"rope_type": "linear", "factor": 2.0}, "", ("linear", 2.0, 1.0)),
        ({"rope_type": "linear", "factor": 2.0}, "--rotary-scaling-factor 6", ("linear", 6.0, 1.0)),
        (YARN, "", ("yarn", 4.0, 1.5)),
        (YARN, "--rotary-scaling-factor 16", ("yarn", 16.0, 0.1 * log(16) + 1)),
    ],
)
def test_flags_scale_the_rotations_of_a_folder(
    folder: Path, of_folder: dict[str, Any] | None, flags: str, expected: tuple[str, float, float]
) -> None:
    (folder / "config.json").write_text(json.dumps(SETTINGS | {"rope_scaling": of_folder}))
    words = ("--seq-length", 64, "--max-position-embeddings", 8192, "--extend-positions", *flags.split())
    model = parsed("--mock-data", "--load", folder, *words).model
    assert model.rotary_scaling == expected[0]
    assert (model.rotary_scaling_factor, model.rotary_attention_factor) == pytest.approx(expected[1:])


def test_a_tokenizer_may_be_another(folder: Path) -> None:
    config = parsed("--data-path", "unread", "--load", folder, "--seq-length", 64, "--tokenizer-type", "byte")
    assert (config.data.tokenizer_type, config.data.tokenizer_model) == ("byte", None)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"tokenizer.model": ""}, "SentencePieceTokenizer"),
        ({"vocab.json": "{}", "merges.txt": ""}, "GPT2BPETokenizer"),
        (
            {"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '{"tokenizer_class": "Qwen2Tokenizer"}'},
            None,
        ),
        ({"vocab.json": "{}"}, None),
    ],
)
def test_a_folder_may_have_other_tokenizers(folder: Path, files: dict[str, str], found: str | None) -> None:
    (folder / "tokenizer.json").unlink()
    for name, text in files.items():
        (folder / name).write_text(text)
    words: tuple[Any, ...] = ("--data-path", "unread", "--load", folder, "--seq-length", 64)
    if found is None:
        assert "has no tokenizer that can be read: add --tokenizer-type" in refusal(*words)
        assert parsed("--mock-data", *words[2:]).data.tokenizer_type == "byte"
    else:
        assert parsed(*words).data.tokenizer_type == found


def test_a_run_that_has_saved_resumes_from_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    words = ("--mock-data", "--load", folder, "--seq-length", 64, "--save", tmp_path / "ours", "--finetune")
    assert parsed(*words).checkpoint.load == str(folder)
    (tmp_path / "ours" / "global_step3").mkdir(parents=True)
    (tmp_path / "ours" / "latest").write_text("global_step3")
    config = parsed(*words)
    assert (config.checkpoint.load, config.checkpoint.finetune) == (str(tmp_path / "ours"), False)
    assert config.model.hidden_size == 32


def test_a_model_that_our_models_cannot_be_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SETTINGS | {"model_type": "deepseek_v32"}))
    for name in ("--load", "--model-preset"):
        assert "is a model of type deepseek_v32, whose attention chooses" in refusal("--mock-data", name, folder)


@pytest.mark.parametrize(
    ("source", "flags", "said"),
    [
        ("--model-preset", "", ""),
        (
            "--model-preset",
            "--attention-softcap 1.5",
            "the model has --attention-softcap 1.5, and Hugging Face's qwen2 no",
        ),
        ("--load", "--rotary-scaling dynamic --rotary-original-length 32 --max-position-embeddings 64", ""),
        ("--load", "--qk-norm all-heads --normalization rmsnorm", "and Hugging Face's qwen2 --qk-norm none: it cannot"),
    ],
)
def test_a_model_that_cannot_be_exported_is_named_at_the_start(
    folder: Path, source: str, flags: str, said: str
) -> None:
    words = ("--mock-data", source, folder, "--seq-length", 64, *flags.split())
    about = [
        line
        for line in read_arguments([*REST, *map(str, words)]).notices
        if line.startswith("This run's checkpoints cannot be exported to Hugging Face: the model has --")
    ]
    assert [said in line for line in about] == [True] * bool(said)
