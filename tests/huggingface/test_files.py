"""Tensors in several files, and the files of tokenizers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_terapipe.checkpoint.conversion import export_checkpoint, import_model
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.manifest import Manifest
from megatron_terapipe.checkpoint.model_files import files_of_run, tokenizer_in
from megatron_terapipe.convert import main
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.huggingface.families.registry import tokenizer_of
from megatron_terapipe.huggingface.folder_weights import SavedTensors, write_tensors
from megatron_terapipe.huggingface.weight_rules import vocabulary
from tests.huggingface.models import MODELS, save, whole_model

pytest.importorskip("safetensors")
from tests.inference.checkpoints import write_info


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8), shard_bytes=st.integers(1, 200))
def test_tensors_come_back_from_as_many_files_as_they_need(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], shard_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("tensors")
    tensors = {f"t{number}": torch.full((size,), float(number)) for number, size in enumerate(sizes)}
    write_tensors(folder, iter(tensors.items()), shard_bytes=shard_bytes)
    files = list(folder.glob("*.safetensors"))
    largest = 4 * max(sizes)
    assert len(files) == 1 or 4 * sum(sizes) > shard_bytes
    assert not list(folder.glob("*.partial"))
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        found = json.loads(index.read_text())
        assert found["metadata"]["total_size"] == 4 * sum(sizes)
        for file in files:
            held = [name for name, where in found["weight_map"].items() if where == file.name]
            assert sum(4 * len(tensors[name]) for name in held) <= max(shard_bytes, largest)
    saved = SavedTensors(folder)
    assert saved.names == tensors.keys()
    assert all(torch.equal(saved.read(name), tensor) for name, tensor in tensors.items())


def test_padding_of_the_vocabulary_is_as_likely_as_an_average_word() -> None:
    rule = vocabulary("ours", "theirs", words=3, rows=5)
    words = torch.tensor([[3.0, 0.0], [0.0, 3.0], [-6.0, 0.0]])
    padded = rule.join([words])
    assert torch.equal(padded[:3], words)
    assert torch.equal(padded[3:], torch.tensor([[-1.0, 1.0]]).expand(2, 2))


def test_numbers_in_mxfp4_are_exact(tmp_path: Path) -> None:
    """Two numbers a byte, the first in the low half, times a power of 2 for each 32, as transformers reads them."""
    integrations = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 250, (3, 10, 2), generator=generator, dtype=torch.uint8)
    blocks[0, 0, 0, :2], scales[0, 0, 0] = torch.tensor([0x1F, 0xA7]), 130
    write_tensors(tmp_path, [("w_blocks", blocks), ("w_scales", scales), ("v_blocks", torch.ones(2))])
    saved = SavedTensors(tmp_path)
    assert (saved.names, saved.shape("w"), saved.shape("v_blocks")) == ({"w", "v_blocks"}, (3, 64, 10), (2,))
    weight = saved.read("w")
    assert weight[0, :4, 0].tolist() == [-48.0, 4.0, 48.0, -8.0]
    assert torch.equal(weight, integrations._convert_moe_packed_tensors(blocks, scales))


@pytest.mark.parametrize(
    ("kind", "files", "settings"),
    [
        ("GPT2BPETokenizer", ("vocab.json", "merges.txt"), {"vocab_file": "vocab.json", "merge_file": "merges.txt"}),
        ("HuggingFaceTokenizer", ("tokenizer.json", "tokenizer_config.json"), {"tokenizer_model": "tokenizer.json"}),
        ("SentencePieceTokenizer", ("tokenizer.model",), {"tokenizer_model": "tokenizer.model"}),
    ],
)
def test_the_tokenizer_is_converted(
    tmp_path: Path, kind: str, files: tuple[str, ...], settings: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    model, source = MODELS["llama"], tmp_path / "tokenizer"
    source.mkdir()
    for name in files:
        (source / name).write_text(json.dumps({"name": name}))
    checkpoints = tmp_path / "ours"
    directory = save(whole_model(model), model, checkpoints)
    paths = {field: str(source / name) for field, name in settings.items()}
    fields = dict.fromkeys(("vocab_file", "merge_file", "tokenizer_model"))
    info = CheckpointInfo.read(directory)
    write_info(replace(info, tokenizer={"tokenizer_type": kind, **fields, **paths}), directory)
    theirs = str(tmp_path / "theirs")
    assert main(["to-huggingface", "--load", str(checkpoints), "--output", theirs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "output": theirs,
        "source": str(directory),
        "remarks": [],
        "tokenizer_files": found["tokenizer_files"],
    }
    assert {*files} <= {*found["tokenizer_files"]}
    for name in files:
        assert json.loads((tmp_path / "theirs" / name).read_text()) == {"name": name}
    assert main(["from-huggingface", "--load", str(tmp_path / "theirs"), "--output", str(tmp_path / "back")]) == 0
    moved = (tmp_path / "back" / "global_step0").rename(tmp_path / "global_step0")
    found = tokenizer_in(moved, CheckpointInfo.read(moved).tokenizer)
    assert found["tokenizer_type"] == kind
    for field, name in settings.items():
        assert json.loads(Path(found[field]).read_text()) == {"name": name}


BESIDE = {
    "generation_config.json": '{"eos_token_id": [2, 11], "bos_token_id": 1, "temperature": 0.6}',
    **{"tokenizer.json": '{"version": "1.0"}', "tokenizer_config.json": '{"chat": 1}', "chat_template.jinja": "{{x}}"},
    **{"special_tokens_map.json": "{}", "added_tokens.json": "{}", "LICENSE": "\u00a9 all", "README.md": "# a model\n"},
}


def test_files_beside_the_weights_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After conversion and a change of place, and after training with the folder's tokenizer or another one."""
    model, theirs = MODELS["llama"], tmp_path / "theirs"
    export_checkpoint(save(whole_model(model), model, tmp_path / "first"), theirs)
    config = json.loads((theirs / "config.json").read_text())
    ids = {"bos_token_id": 1, "eos_token_id": [2, 11]}
    (theirs / "config.json").write_text(json.dumps({**config, **ids}))
    for name, text in BESIDE.items():
        (theirs / name).write_text(text)
    (theirs / "original").mkdir()
    assert main(["from-huggingface", "--load", str(theirs), "--output", str(tmp_path / "ours")]) == 0
    assert f"note: {theirs} also has original, not kept" in capsys.readouterr().out
    checkpoint = (tmp_path / "ours" / "global_step0").rename(tmp_path / "global_step0")
    theirs.rename(tmp_path / "elsewhere")
    names, _ = export_checkpoint(checkpoint, theirs)
    assert set(names) == BESIDE.keys()
    assert {name: (theirs / name).read_text() for name in names} == BESIDE
    assert json.loads((theirs / "config.json").read_text()) == {**config, **ids}
    own, any_file = tokenizer_of(theirs), tmp_path / "any.json"
    kept, _ = files_of_run(theirs, own)
    assert (kept, []) == files_of_run(theirs, {"tokenizer_type": "NullTokenizer"})
    assert kept.keys() == files_of_run(checkpoint, own)[0].keys() == {*BESIDE, "config.json"}
    any_file.write_text("{}")
    files, left = files_of_run(theirs, {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(any_file)})
    assert files == {"LICENSE": kept["LICENSE"], "README.md": kept["README.md"], "tokenizer.json": b"{}"}
    assert {*left} == kept.keys() - files.keys() | {"tokenizer.json"}
    Manifest.read(checkpoint).check_sizes(checkpoint)
    (checkpoint / "model_files" / "LICENSE").unlink()
    with pytest.raises(CheckpointError, match="lacks model_files/LICENSE"):
        Manifest.read(checkpoint).check_sizes(checkpoint)


def test_a_tokenizer_without_a_limit_is_found(tmp_path: Path) -> None:
    """Hugging Face writes the limit that there is not as 10^30."""
    for name, text in {"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": f'{{"n": {10**30}}}'}.items():
        (tmp_path / name).write_text(text)
    assert tokenizer_of(tmp_path)["tokenizer_type"] == "GPT2BPETokenizer"


def test_without_a_tokenizer_the_checkpoint_has_none(tmp_path: Path) -> None:
    model = MODELS["gpt2"]
    export_checkpoint(save(whole_model(model), model, tmp_path / "ours"), tmp_path / "theirs")
    directory, left = import_model(tmp_path / "theirs", tmp_path / "back")
    assert (CheckpointInfo.read(directory).tokenizer, left) == ({}, [])
