r"""JSON lines to indexed datasets.

    terapipe preprocess --input corpus.jsonl --output-prefix corpus \
        --tokenizer-type byte --append-eod --workers 2

writes `corpus_text_document.bin` and `.idx`, which Megatron reads too, and `corpus_text_document.tokenizer.json`, by
which the trainer checks that it has the tokenizer of the data.
"""

import argparse
import functools
import gzip
import io
import json
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from deepspeed_ext.plan.terminal import STANDARD_OUTPUT, CommandParser, add_json_flag, command_main, up_to, write_json
from megatron_terapipe.data.indexed_dataset import IndexedDatasetWriter, token_dtype
from megatron_terapipe.data.tokenizer import build_tokenizer
from megatron_terapipe.data.tokenizer_checks import TokenizerRecord
from megatron_terapipe.data.tokenizer_settings import TokenizerSettings, add_tokenizer_flags
from megatron_terapipe.data.workers import WorkerProcesses, map_ahead
from megatron_terapipe.errors import DataError, not_installed

_RUN_BYTES = 1 << 17  # enough work per task that its transfer costs little


class Lines(NamedTuple):
    """Consecutive lines of the input."""

    first: int
    lines: list[bytes]
    """UTF-8, with their line ends."""
    file_position: int
    """Bytes read of the file, compressed ones of a compressed file."""


def read_lines(path: Path) -> Iterator[Lines]:
    """Yield the lines of a file, plain or .gz or .zst, in runs of about `_RUN_BYTES`."""
    try:
        with ExitStack() as stack:
            file = raw = stack.enter_context(path.open("rb"))
            if path.suffix == ".gz":
                file = stack.enter_context(cast("IO[bytes]", gzip.GzipFile(fileobj=raw)))
            elif path.suffix == ".zst":
                file = stack.enter_context(
                    cast("IO[bytes]", io.BufferedReader(_Pieces(_zstandard_bytes(path, raw)), _RUN_BYTES))
                )
            first = 1
            while lines := file.readlines(_RUN_BYTES):
                yield Lines(first, lines, raw.tell())
                first += len(lines)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"cannot read --input {path} ({reason}): give a file of JSON lines, plain, .gz or .zst"
        ) from None


def _zstandard_bytes(path: Path, raw: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of Zstandard frames; the package's own reader takes a truncated file for a whole one."""
    try:
        import zstandard
    except ImportError:
        raise DataError(f"--input {path} needs {not_installed('zstandard')}, or decompress the file") from None
    new_frame = zstandard.ZstdDecompressor().decompressobj
    frame, in_frame = new_frame(), False
    while compressed := raw.read(_RUN_BYTES):
        while compressed:
            try:
                yield frame.decompress(compressed)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            compressed, in_frame = frame.unused_data if frame.eof else b"", not frame.eof
            frame = new_frame() if frame.eof else frame
    if in_frame:
        raise EOFError("it is cut short")


class _Pieces(io.RawIOBase):
    """A file of consecutive pieces."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer with the next bytes, and return their number."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = piece
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


_tokenizer = functools.cache(build_tokenizer)  # one per process: GPT-2's takes 0.2 s to read


class EncodedLines(NamedTuple):
    """The documents of some lines."""

    num_bytes: int
    file_position: int
    documents: list[list[NDArray[np.integer[Any]]]]
    """Per JSON key the documents' ids, each [length]; a text without ids has none."""
    num_empty: int
    """Texts without ids."""
    invalid: list[str]
    """Why lines were left out, an error for each."""


@dataclass(frozen=True, kw_only=True)
class LineEncoder:
    """Encoder of lines; a description that each process turns into its own tokenizer."""

    source: Path
    json_keys: tuple[str, ...]
    append_eod: bool
    tokenizer: TokenizerSettings
    skips_invalid: bool = False
    """Whether a line without its texts is left out; else it ends the work."""

    def __call__(self, lines: Lines) -> EncodedLines:
        """Encode every document of the lines."""
        tokenizer = _tokenizer(self.tokenizer)
        dtype = token_dtype(tokenizer.vocab_size)
        documents: list[list[NDArray[np.integer[Any]]]] = [[] for _ in self.json_keys]
        num_empty, invalid = 0, []
        for number, line in enumerate(lines.lines, start=lines.first):
            if line.isspace():
                continue
            try:
                ids_by_key = [tokenizer.encode(text) for text in self._texts(number, line)]
            except DataError as error:
                if not self.skips_invalid:
                    raise
                invalid.append(str(error))
                continue
            for of_key, ids in zip(documents, ids_by_key, strict=True):
                if not ids:
                    num_empty += 1
                    continue
                if self.append_eod:
                    ids.append(tokenizer.eod)
                of_key.append(np.array(ids, dtype))
        return EncodedLines(sum(map(len, lines.lines)), lines.file_position, documents, num_empty, invalid)

    def _texts(self, number: int, line: bytes) -> list[str]:
        place = f"{self.source}:{number}"
        try:
            # Spreadsheets write a mark before the first line.
            document = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            wrong = f"byte {error.start} of the line is {line[error.start]:#04x}"
            raise DataError(f"{place}: not UTF-8 ({wrong}): convert the file, or remove the line") from None
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{place}: not JSON ({error}): every line is one object such as "
                '{"text": "..."}; repair or remove the line'
            ) from None
        if not isinstance(document, dict):
            raise DataError(f'{place}: JSON but no object: every line is one such as {{"text": "..."}}')
        for key in self.json_keys:
            if key in document and not isinstance(document[key], str):
                raise DataError(
                    f"{place}: {key!r} is {_kind(document[key])}, not text: repair the line, or leave up to N such "
                    "lines out with --skip-invalid N"
                )
            if key not in document:
                raise DataError(
                    f"{place}: no text under the key {key!r}, only the keys {sorted(document)}: "
                    "choose with --json-keys, or repair the line"
                )
        return [document[key] for key in self.json_keys]


def _kind(value: object) -> str:
    """Return the kind of a JSON value that is not a text."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return {int: "a number", float: "a number", list: "a list"}.get(type(value), "an object")


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset that was written."""

    prefix: str
    """Path of its files without .bin and .idx, for --data-path."""
    num_documents: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Result of `preprocess`."""

    datasets: tuple[Dataset, ...]
    num_empty_texts: int
    """Texts without tokens, which were left out."""
    tokenizer: str
    num_bytes: int
    """Bytes of the input's lines."""
    seconds: float
    """Time that it took."""
    num_invalid_lines: int = 0
    """Lines without their texts, which were left out."""
    first_invalid_lines: tuple[str, ...] = ()
    """Errors of the first of them."""

    def sentence(self) -> str:
        """Return all this in one line, for people."""
        num_documents = sum(each.num_documents for each in self.datasets)
        left_out = f" and {self.num_empty_texts:,} empty texts left out" if self.num_empty_texts else ""
        if self.num_invalid_lines:
            left_out += f", {self.num_invalid_lines:,} invalid lines left out"
        return (
            f"wrote {', '.join(each.prefix for each in self.datasets)} (.bin and .idx): {num_documents:,} documents"
            f"{left_out}, {sum(each.num_tokens for each in self.datasets):,} tokens of the tokenizer {self.tokenizer}, "
            f"{self.num_bytes / 1e6:.1f} MB in {self.seconds:.1f} s "
            f"({_speed(num_documents, self.num_bytes, self.seconds)})"
        )


_INVALID_NAMED = 5


def preprocess(encoder: LineEncoder, output_prefix: Path, workers: int, *, most_invalid: int = 0) -> Written:
    """Encode the encoder's source in some processes, and write one indexed dataset per JSON key.

    Documents keep their order, so the files do not depend on the number of workers. Empty texts are left out. The
    record of its tokenizer is written for each dataset.

    Args:
        most_invalid: lines at most that an encoder which skips invalid ones may leave out.
    """
    if not encoder.source.is_file():
        raise DataError(f"--input {encoder.source} is not a file: give a file of JSON lines")
    began = time.perf_counter()
    tokenizer = _tokenizer(encoder.tokenizer)
    names = [f"{output_prefix}_{key}_document" for key in encoder.json_keys]
    try:
        output_prefix.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--output-prefix {output_prefix} cannot be written ({error.strerror}): give another") from None
    num_bytes = num_empty = num_invalid = 0
    first_invalid: list[str] = []
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedDatasetWriter(name, tokenizer.vocab_size)) for name in names]
        batches: Iterator[EncodedLines]
        if workers == 1:
            batches = map(encoder, read_lines(encoder.source))
        else:
            encode = stack.enter_context(WorkerProcesses(encoder, workers))
            threads = stack.enter_context(ThreadPoolExecutor(workers))
            batches = map_ahead(threads, encode, read_lines(encoder.source), 4 * workers)
        progress = stack.enter_context(
            tqdm(
                total=encoder.source.stat().st_size,
                desc="tokenize",
                unit="B",
                unit_scale=True,
                bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}B [{elapsed}<{remaining}{postfix}]",
                file=sys.stderr,
                disable=None,  # silent without a terminal
            )
        )
        for batch in batches:
            for writer, documents in zip(writers, batch.documents, strict=True):
                for ids in documents:
                    writer.add_document(ids)
            num_bytes += batch.num_bytes
            num_empty += batch.num_empty
            num_invalid += len(batch.invalid)
            first_invalid += batch.invalid[: _INVALID_NAMED - len(first_invalid)]
            if num_invalid > most_invalid:
                raise DataError(
                    f"{batch.invalid[most_invalid - num_invalid]} (the first line above --skip-invalid {most_invalid})"
                )
            seconds = time.perf_counter() - began
            progress.set_postfix_str(
                _speed(sum(writer.num_documents for writer in writers), num_bytes, seconds), refresh=False
            )
            progress.update(batch.file_position - progress.n)
        if not all(writer.num_documents for writer in writers):
            raise DataError(f"--input {encoder.source} holds no text: give at least one document")
    for name, writer in zip(names, writers, strict=True):
        TokenizerRecord.of(name, tokenizer, writer.hash.hexdigest(), ends=encoder.append_eod).write(name)
    return Written(
        datasets=tuple(
            Dataset(name, writer.num_documents, writer.num_tokens) for name, writer in zip(names, writers, strict=True)
        ),
        num_empty_texts=num_empty,
        tokenizer=encoder.tokenizer.tokenizer_type,
        num_bytes=num_bytes,
        seconds=time.perf_counter() - began,
        num_invalid_lines=num_invalid,
        first_invalid_lines=tuple(first_invalid),
    )


def _speed(num_documents: int, num_bytes: int, seconds: float) -> str:
    return f"{num_documents / seconds:,.0f} documents/s, {num_bytes / 1e6 / seconds:.1f} MB/s"


DESCRIPTION = """\
Turn a file of texts into the data files of a run: tokenize JSON lines into Megatron's indexed dataset,
PREFIX_KEY_document.bin and .idx for each JSON key. An existing dataset is replaced, once the whole one is written. The
tokenizer is noted in PREFIX_KEY_document.tokenizer.json, and the trainer refuses another one."""

EPILOG = """\
examples:
  %(prog)s --input corpus.jsonl --output-prefix corpus --tokenizer-type byte --append-eod
  %(prog)s --input corpus.jsonl.zst --output-prefix corpus --tokenizer-type HuggingFaceTokenizer \\
      --tokenizer-model llama/ --append-eod --workers 8

A line of the input is one document, such as {"text": "..."}. Train with --data-path corpus_text_document and the same
tokenizer."""


def _prefix(text: str) -> Path:
    if text.endswith("/") or not Path(text).name:
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name the files in it, as {text or '.'}corpus")
    return Path(text)


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the command; `prog` is its name in the help text."""
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    files = parser.add_argument_group("files")
    files.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help="file of JSON lines, one object per document; plain, .gz or .zst",
    )
    files.add_argument(
        "--output-prefix", type=_prefix, required=True, metavar="PREFIX", help="prefix of the output files"
    )
    add_tokenizer_flags(
        parser, default="byte", explained="tokenizer, by the same name as for the trainer (default: byte)"
    )
    documents = parser.add_argument_group("documents")
    documents.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of the texts in each object; each key gives a dataset (default: text)",
    )
    documents.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document id")
    documents.add_argument(
        "--skip-invalid",
        type=up_to(10**12),
        default=0,
        metavar="N",
        help="leave up to N lines out that have no such object or text, and name the first ones (default: 0)",
    )
    documents.add_argument(
        "--workers", type=up_to(1024), default=1, metavar="N", help="processes (default: %(default)s)"
    )
    add_json_flag(files, "the written datasets")
    # Flags of Megatron's scripts: the first two change nothing, the last is for BERT and refused below.
    parser.add_argument("--dataset-impl", choices=("mmap",), help=argparse.SUPPRESS)
    parser.add_argument("--log-interval", help=argparse.SUPPRESS)
    parser.add_argument("--split-sentences", action="store_true", help=argparse.SUPPRESS)
    return parser


def _run(options: argparse.Namespace, prog: str) -> int:
    encoder = LineEncoder(
        source=options.input,
        json_keys=tuple(options.json_keys),
        append_eod=options.append_eod,
        tokenizer=TokenizerSettings.of_flags(options),
        skips_invalid=options.skip_invalid > 0,
    )
    if options.split_sentences:
        raise DataError("--split-sentences is for BERT, and a GPT reads whole documents: drop it")
    if len(set(options.json_keys)) < len(options.json_keys):
        raise DataError(f"--json-keys {' '.join(options.json_keys)} names a key twice: name each once")
    written = preprocess(encoder, options.output_prefix, options.workers, most_invalid=options.skip_invalid)
    for line in written.first_invalid_lines:
        print(f"left out: {line}", file=sys.stderr)
    if options.json is not None:
        write_json(options.json, json.dumps(asdict(written)))
    if options.json != STANDARD_OUTPUT:
        print(written.sentence())
    return 0


main = command_main(build_parser, _run, "python -m megatron_terapipe.data.preprocess")

if __name__ == "__main__":
    sys.exit(main())
