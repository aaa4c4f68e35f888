"""Files of data: indexed datasets, the cache of their orders, texts, tokenizers."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np

from megatron_terapipe.data import datasets
from megatron_terapipe.data.datasets import GPTDataset
from megatron_terapipe.data.file_arrays import IndexCache
from megatron_terapipe.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, data_file, index_file
from megatron_terapipe.data.preprocess import LineEncoder, preprocess
from megatron_terapipe.data.tokenizer import ByteTokenizer, build_tokenizer
from megatron_terapipe.data.tokenizer_checks import check_token_ids
from megatron_terapipe.data.tokenizer_settings import TokenizerSettings
from tests.faults.fuzzing.target import Target

_TEXT = "It is; isn't it?\n 12 \N{SNOWMAN} <|endoftext|></s>"
_NUM_SAMPLES = 9


def _files(write: Callable[[Path], object]) -> dict[str, bytes]:
    """Return the files that a function writes into a folder, by name."""
    with TemporaryDirectory() as folder:
        write(Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def _write_dataset(folder: Path) -> None:
    with IndexedDatasetWriter(folder / "d", 257) as writer:
        for length in (5, 0, 7, 1, 12):
            writer.add_document(range(length))


_DATASET = _files(_write_dataset)


def _order(folder: Path) -> GPTDataset:
    indexed, kept = IndexedDataset(folder / "d"), IndexCache(folder / "cache")
    size = ByteTokenizer.vocab_size
    documents = range(len(indexed))
    with patch.object(datasets, "_STORED_FROM", 0):  # The order of a few documents, too.
        return GPTDataset(
            indexed, documents, seq_length=4, num_samples=_NUM_SAMPLES, seed=1, vocab_size=size, cache=kept
        )


def _read_dataset(folder: Path) -> None:
    """Do all that the trainer does with a dataset."""
    dataset = _order(folder)
    check_token_ids([str(folder / "d")], ByteTokenizer(), IndexCache(None))
    for sample in range(_NUM_SAMPLES):
        tokens = dataset[sample]
        assert tokens.shape == (5,) and 0 <= tokens.min() <= tokens.max() < ByteTokenizer.vocab_size


def _read_index(data: bytes, folder: Path) -> None:
    index_file(folder / "d").write_bytes(data)
    data_file(folder / "d").write_bytes(_DATASET["d.bin"])
    _read_dataset(folder)


def _read_data(data: bytes, folder: Path) -> None:
    index_file(folder / "d").write_bytes(_DATASET["d.idx"])
    data_file(folder / "d").write_bytes(data)
    _read_dataset(folder)


def _read_index_of_the_data(data: bytes, folder: Path) -> None:
    """Read an index whose data has the size that it describes, so that more of it is looked at."""
    index_file(folder / "d").write_bytes(data)
    try:
        end = int(np.frombuffer(data[34 : 34 + 20], "<i4").clip(0, 1 << 16).sum()) * 2
    except ValueError:
        end = 0
    data_file(folder / "d").write_bytes(bytes(end))
    _read_dataset(folder)


@cache
def _cached() -> tuple[dict[str, bytes], list[list[int]]]:
    """Return the files of a cached order, and the samples in it."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        _write_dataset(folder)
        dataset = _order(folder)
        samples = [dataset[sample].tolist() for sample in range(_NUM_SAMPLES)]
        files = {path.name: path.read_bytes() for path in (folder / "cache").iterdir() if path.name != ".lock"}
        return files, samples


def _read_cache(data: bytes, folder: Path) -> None:
    """Put bytes in the place of one of the files of a cached order, which must not change any sample."""
    files, samples = _cached()
    for name, content in _DATASET.items():
        (folder / name).write_bytes(content)
    (folder / "cache").mkdir(exist_ok=True)
    replaced = min(files, key=lambda name: abs(len(files[name]) - len(data)))
    for name, content in files.items():
        (folder / "cache" / name).write_bytes(data if name == replaced else content)
    dataset = _order(folder)
    assert [dataset[sample].tolist() for sample in range(_NUM_SAMPLES)] == samples


def _read_lines(data: bytes, folder: Path) -> None:
    (folder / "lines.jsonl").write_bytes(data)
    settings = TokenizerSettings()
    encoder = LineEncoder(source=folder / "lines.jsonl", json_keys=("text",), append_eod=True, tokenizer=settings)
    preprocess(encoder, folder / "d", 1)
    IndexedDataset(folder / "d_text_document")


def _tokenize(settings: TokenizerSettings) -> None:
    tokenizer = build_tokenizer(settings)
    ids = tokenizer.encode(_TEXT)
    assert all(0 <= token < tokenizer.vocab_size for token in [*ids, tokenizer.eod])
    assert isinstance(tokenizer.decode(ids), str)


def _write_gpt2(folder: Path) -> None:
    from tokenizers import pre_tokenizers

    from megatron_terapipe.data.subword_tokenizers import END_OF_DOCUMENT

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "it", END_OF_DOCUMENT, "It"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\ni t\nI t\n")


def _write_hugging_face(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {"<|endoftext|>": 0, "It": 1, "is": 2, "?": 3, "[UNK]": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split("i+", "isolated")]
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "b")])
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_byte_level(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    _write_gpt2(folder)
    tokenizer = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


_GPT2 = _files(_write_gpt2)
_HUGGING_FACE = [_files(write)["tokenizer.json"] for write in (_write_hugging_face, _write_byte_level)]


def _read_gpt2(data: bytes, folder: Path, changed: str) -> None:
    for name, content in _GPT2.items():
        (folder / name).write_bytes(data if name == changed else content)
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    _tokenize(TokenizerSettings(tokenizer_type="GPT2BPETokenizer", **files))


def _read_hugging_face(data: bytes, folder: Path, changed: str) -> None:
    (folder / "tokenizer.json").write_bytes(_HUGGING_FACE[0])
    (folder / changed).write_bytes(data)
    _tokenize(TokenizerSettings(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)))


def _read_tik(data: bytes, folder: Path) -> None:
    (folder / "tik.json").write_bytes(data)
    model = str(folder / "tik.json")
    sizes = {"vocab_size": 260, "tiktoken_num_special_tokens": 3, "tiktoken_pattern": "v2"}
    _tokenize(TokenizerSettings(tokenizer_type="TikTokenizer", tokenizer_model=model, **sizes))  # type: ignore[arg-type]


def _tik_vocabulary() -> bytes:
    from base64 import b64encode

    tokens = [*(bytes([byte]) for byte in range(256)), b"It"]
    entries = [
        {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None} for rank, token in enumerate(tokens)
    ]
    return json.dumps(entries).encode()


def _read_sentence_piece(data: bytes, folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(data)
    model = str(folder / "tokenizer.model")
    _tokenize(TokenizerSettings(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model))


def _write_sentence_piece(folder: Path) -> None:
    from tests.data.trained_tokenizers import train_sentence_piece

    train_sentence_piece(folder)


TARGETS = (
    Target(
        name="idx",
        read=_read_index,
        seeds=(_DATASET["d.idx"],),
        found=(_DATASET["d.idx"][:34] + b"\xfb\xff\xff\xff" + _DATASET["d.idx"][38:],),
        words=(b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\xff" * 8, b"\x01\x00\x00\x00\x00\x00\x00\x00", b"MMIDIDX"),
    ),
    Target(
        name="idx, with data of its size",
        read=_read_index_of_the_data,
        seeds=(_DATASET["d.idx"],),
        words=(b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\xff" * 8, b"\x01\x00\x00\x00\x00\x00\x00\x00"),
    ),
    Target(name="bin", read=_read_data, seeds=(_DATASET["d.bin"],), words=(b"\xff\xff", b"\x01\x01")),
    Target(name="index cache", read=_read_cache, seeds=tuple(_cached()[0].values())),
    Target(
        name="text to preprocess",
        read=_read_lines,
        seeds=(b'{"text": "It is."}\n\n{"text": "\\u00e4", "id": 5}\n', b'{"text": "a"}'),
        found=(b'{"text": ' + b"[" * 100_000, b'{"text": ' + b"7" * 5000 + b"}", b'{"text": "a", "\\ud800": 1}'),
    ),
    Target(
        name="vocabulary of GPT-2",
        read=lambda data, folder: _read_gpt2(data, folder, "vocab.json"),
        seeds=(_GPT2["vocab.json"],),
        found=(b'{"a": 1' + b"0" * 5000 + b"}",),
    ),
    Target(
        name="merges of GPT-2",
        read=lambda data, folder: _read_gpt2(data, folder, "merges.txt"),
        seeds=(_GPT2["merges.txt"],),
        words=(b"i t", b"it", "Ġ".encode()),
    ),
    Target(
        name="tokenizer.json",
        read=lambda data, folder: _read_hugging_face(data, folder, "tokenizer.json"),
        seeds=tuple(_HUGGING_FACE),
    ),
    Target(
        name="tokenizer_config.json",
        read=lambda data, folder: _read_hugging_face(data, folder, "tokenizer_config.json"),
        seeds=(
            b'{"eos_token": "is", "model_max_length": 1000000000000000019884624838656}',
            b'{"eos_token": {"content": "is"}}',
        ),
        found=(b'{"eos_token": "\\ud800"}', b"[" * 100_000),
    ),
    Target(name="vocabulary of TikTokenizer", read=_read_tik, seeds=(_tik_vocabulary(),)),
    Target(
        name="model of SentencePiece",
        read=_read_sentence_piece,
        seeds=tuple(content for name, content in _files(_write_sentence_piece).items() if name.endswith(".model")),
    ),
)
