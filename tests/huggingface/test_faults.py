"""Models and files that cannot be converted are refused in one line."""

import json
import resource
from collections.abc import Callable
from dataclasses import replace
from os import mkfifo
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.convert import main
from tests.huggingface.models import GEMMA2, MODELS, save, whole_model
from tests.inference.checkpoints import write_manifest

safetensors_torch = pytest.importorskip("safetensors.torch")

GPT2, LLAMA = MODELS["gpt2"], MODELS["llama"]
WORDS, BIAS = "transformer.wte.weight", "transformer.h.1.attn.c_proj.bias"
UNEVEN = json.dumps({"block_configs": [{}, {"mlp": {"ffn_hidden_size": 64}}, {}]})
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (replace(GPT2, position_embedding_type="none"), "--position-embedding-type none, and Hugging Face's gpt2"),
        (replace(GPT2, normalization="rmsnorm"), "--normalization rmsnorm, and Hugging Face's gpt2 --norm"),
        (replace(GPT2, kv_channels=16), "--kv-channels 16, and Hugging Face's gpt2 --kv-channels 8"),
        (replace(GPT2, num_key_value_heads=2), "--num-key-value-heads 2, and Hugging Face's gpt2 --num-key"),
        (replace(GPT2, layernorm_epsilon=1e-6, kv_channels=16), "--kv-channels 16, and Hugging Face's gpt2 --kv-chan"),
        (replace(LLAMA, qk_norm="head", parallel_residual=True), "--parallel-residual, and Hugging Face's qwen3 no --"),
        (
            replace(LLAMA, rotary_interleaved=True, embedding_multiplier=2.0),
            "--embedding-multiplier 2.0, and Hugging Face's ernie4_5 --embedding-multiplier 1.0",
        ),
        (replace(GEMMA2, softmax_scale=0.31), "--softmax-scale 0.31, and Hugging Face's gemma2 --softmax-scale 0.3162"),
        (
            replace(GEMMA2, qk_norm="head", sliding_window=8, rotary_base_local=50.0),
            "--attention-softcap 2.0, and Hugging Face's gemma3_text no --attention-soft",
        ),
        (replace(LLAMA, heterogeneous_layers_config_path=UNEVEN), "layers of several shapes, and Hugging Face"),
    ],
)
def test_models_without_a_family_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: ModelConfig, said: str
) -> None:
    save(whole_model(model), model, tmp_path / "ours")
    line = refusal(capsys, "to-huggingface", "--load", tmp_path / "ours", "--output", tmp_path / "theirs")
    assert said in line
    assert line.endswith("so keep it in ours\n")
    assert not (tmp_path / "theirs").exists()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with two models in files of Hugging Face, by name."""
    folder = tmp_path_factory.mktemp("exported")
    for name in ("gpt2", "llama"):
        save(whole_model(MODELS[name]), MODELS[name], folder / "ours" / name)
        assert main(["to-huggingface", "--load", str(folder / "ours" / name), "--output", str(folder / name)]) == 0
    return folder


def _with(**settings: Any) -> Callable[[Path], object]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change


def _rewritten(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor], source: str = "") -> Callable[[Path], object]:
    """Return a function that changes a tensor of a folder, or sets it to what another one becomes."""

    def changed(directory: Path) -> None:
        tensors = safetensors_torch.load_file(directory / WEIGHTS)
        safetensors_torch.save_file(tensors | {name: change(tensors[source or name])}, directory / WEIGHTS)

    return changed


def _with_pipe(directory: Path) -> None:
    mkfifo(directory / "pipe.safetensors")
    (directory / INDEX).write_text('{"weight_map": {"a": "pipe.safetensors"}}')


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gpt2", _with(n_layer=4), "has no tensor transformer.h.3.attn.c_attn.bias, "),
        ("gpt2", _with(n_layer=2), "has a tensor transformer.h.2.attn.c_attn.bias, "),
        (
            "gpt2",
            _with(n_embd=96),
            "has transformer.wte.weight (257, 48), which is not the (257, 96) ",
        ),
        (
            "gpt2",
            _with(n_positions=41),
            "has transformer.wpe.weight (40, 48), which is not the (41, 48) ",
        ),
        ("gpt2", _with(tie_word_embeddings=False), "has no tensor lm_head.weight, "),
        ("llama", _with(attention_bias=True), "has no tensor model.layers.0.self_attn.k_proj.bias, "),
        ("llama", _with(num_key_value_heads=3), "self_attn.k_proj.weight (16, 48), which is not the (24, 48)"),
        ("llama", _with(intermediate_size=96), "mlp.gate_proj.weight (80, 48), which is not the (96, 48)"),
        ("gpt2", lambda d: (d / "config.json").unlink(), "config.json cannot be read (No such file or directory)"),
        ("gpt2", _rewritten("config.json", "{"), "config.json is not JSON"),
        ("gpt2", lambda d: (d / WEIGHTS).unlink(), "holds neither model.safetensors nor model.safetensors.index.json"),
        ("gpt2", lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:-5]), f"{WEIGHTS} cannot be read"),
        ("gpt2", _rewritten(WEIGHTS, "these were never tensors\n" * 9), f"{WEIGHTS} cannot be read"),
        ("gpt2", _rewritten(INDEX, '{"weight_map": {"a": "gone.safetensors"}}'), "gone.safetensors cannot be read"),
        ("gpt2", _rewritten(INDEX, "{}"), f"{INDEX} cannot be read"),
        ("gpt2", _rewritten(INDEX, '{"weight_map": [1]}'), f"{INDEX} cannot be read (it has no object weight_map)"),
        ("gpt2", _rewritten(INDEX, '{"weight_map": {"a": 5}}'), f"{INDEX} names 5, which is not a file of this folder"),
        ("gpt2", _rewritten(INDEX, '{"weight_map": {"a": {}}}'), f"{INDEX} names {{}}, which is not a file of this"),
        (
            "gpt2",
            _rewritten(INDEX, '{"weight_map": {"a": "../b"}}'),
            'names "../b", which is not a file of this folder',
        ),
        ("gpt2", _rewritten(INDEX, "[" * 100_000), f"{INDEX} is not JSON"),
        ("gpt2", _with_pipe, "pipe.safetensors cannot be read"),
        (
            "gpt2",
            _tensor("lm_head.weight", lambda words: words + 1e-3, WORDS),
            f"has a tensor lm_head.weight with other values than {WORDS}, and the model that it",
        ),
        ("gpt2", _tensor("lm_head.bias", torch.clone, BIAS), "has a tensor lm_head.bias, for which the gpt2 that"),
        (
            "gpt2",
            _tensor(BIAS, lambda bias: bias / 0),
            "has NaN or infinity in weight 3.attention.projection.bias: conv",
        ),
        ("gpt2", _tensor(BIAS, torch.Tensor.long), f"({BIAS} is in I64, and not in F64, F32, F16 or BF16)"),
    ],
)
def test_damaged_files_and_tensors_that_contradict_the_settings_are_named(
    exported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    change: Callable[[Path], object],
    said: str,
) -> None:
    theirs, back = copytree(exported / name, tmp_path / "theirs"), tmp_path / "back"
    change(theirs)
    assert said in refusal(capsys, "from-huggingface", "--load", theirs, "--output", back)
    assert not back.exists()


def test_numbers_that_are_not_finite_are_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, words = whole_model(GPT2), ("to-huggingface", "--load", tmp_path / "ours", "--output", tmp_path / "theirs")
    for value, more, remedy in (
        (1e6, ("--dtype", "fp16"), "do without --dtype fp16"),
        (float("nan"), (), "convert ano"),
    ):
        whole.state_dict()["layers.3.mlp.down.bias"][0] = value
        save(whole, GPT2, tmp_path / "ours")
        line = refusal(capsys, *words, *more)
        assert f"has NaN or infinity in weight 3.mlp.down.bias: {remedy}" in line
        assert not (tmp_path / "theirs").exists()


def test_invalid_exports_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, output = tmp_path / "ours", tmp_path / "theirs"
    words = ("to-huggingface", "--load", ours, "--output", output)
    ours.mkdir()
    assert refusal(capsys, *words).startswith(f"error: --load {ours} holds no checkpoint")
    layer = save(whole_model(GPT2), GPT2, ours) / "layer_03-model_00-model_states.pt"
    assert refusal(capsys, *words, "--family", "lama").startswith("error: --family lama is unknown: choose gpt2, ")
    torch.save({"weight": torch.zeros(3)}, layer)
    write_manifest(layer.parent)
    assert "cannot load layer 3" in refusal(capsys, *words)
    layer.unlink()
    assert f"lacks {layer.name}" in refusal(capsys, *words)
    assert not output.exists()
    output.mkdir()
    (output / "file").touch()
    for command in ("from-huggingface", "to-huggingface"):
        line = refusal(capsys, command, "--load", ours, "--output", output)
        assert line == f"error: --output {output} is not an empty directory: name another\n"


def test_a_full_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs, output = tmp_path / "ours", tmp_path / "theirs", tmp_path / "output"
    save(whole_model(GPT2), GPT2, ours)
    assert main(["to-huggingface", "--load", str(ours), "--output", str(theirs)]) == 0
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for command, folder in (("to-huggingface", ours), ("from-huggingface", theirs)):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
            line = refusal(capsys, command, "--load", folder, "--output", output)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert line.startswith(f"error: --output {output} could not be written (") and "File too large" in line
        assert not output.exists()
