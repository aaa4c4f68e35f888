"""`terapipe convert`: models to and from the files of Hugging Face and of Megatron-LM."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.terminal import (
    STANDARD_OUTPUT,
    CommandParser,
    ProgressLine,
    add_json_flag,
    command_main,
    write_json,
)
from deepspeed_ext.runtime.cuda_environment import expect_cpu
from megatron_terapipe.errors import ConfigError

DESCRIPTION = """\
Convert models to and from the files of Hugging Face (config.json, safetensors and a tokenizer) and checkpoints of
Megatron-LM (torch and torch_dist)."""

EPILOG = """\
examples:
  %(prog)s to-huggingface --load checkpoints --output exported
  %(prog)s from-huggingface --load qwen2.5-7b/ --output checkpoints
  %(prog)s from-megatron --load megatron-checkpoints --output checkpoints

Read on: docs/how-to/huggingface.md, with the families of models that can be converted, and docs/how-to/migrating.md."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """Answer of `convert`."""

    output: str
    source: str
    tokenizer_files: tuple[str, ...] = ()
    """Files beside the weights, of the tokenizer and others, that `to-huggingface` wrote."""
    remarks: tuple[str, ...] = ()
    """Differences of an export, and the versions of transformers that read it, a sentence each."""


def _run(options: argparse.Namespace, prog: str) -> int:
    output = Path(options.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} is not an empty directory: name another")
    expect_cpu()
    with _removed_on_failure(output), ProgressLine() as line:
        written, sentence = options.convert(options, output, line)
    if options.json is not None:
        write_json(options.json, json.dumps(asdict(written)))
    if options.json != STANDARD_OUTPUT:
        print(sentence)
    return 0


@contextmanager
def _removed_on_failure(output: Path) -> Iterator[None]:
    """Leave an output that was empty or not there as it was, if the conversion into it fails."""
    was_there = output.exists()
    try:
        yield
    except BaseException as error:
        rmtree(output, ignore_errors=True)
        if was_there:
            output.mkdir()
        if not isinstance(error, OSError) or not Path(error.filename or output).is_relative_to(output):
            raise
        reason = error.strerror or error
        raise ConfigError(f"--output {output} could not be written ({reason}): make room, or name another") from None


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the command; `prog` is the command as users type it."""
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    exported = _add_command(
        commands, "to-huggingface", _to_huggingface, "write a checkpoint as a model of Hugging Face"
    )
    exported.add_argument(
        "--family",
        metavar="NAME",
        help="model_type to write, such as mistral (default: as the model that the run began with, or else the "
        "first that can express the model)",
    )
    imported = _add_command(
        commands, "from-huggingface", _from_huggingface, "write a model of Hugging Face as a checkpoint"
    )
    imported.add_argument(
        "--load", required=True, metavar="HF_DIR", help="directory with config.json and weights as safetensors"
    )
    imported.add_argument(
        "--mtp-num-layers",
        type=int,
        default=0,
        metavar="N",
        help="layers that predict further tokens, which are read, too (default: 0)",
    )
    to_megatron = _add_command(
        commands,
        "to-megatron",
        _to_megatron,
        "write the weights of a checkpoint as one of Megatron-LM, in its format torch_dist",
    )
    from_megatron = _add_command(
        commands,
        "from-megatron",
        _from_megatron,
        "write a checkpoint of Megatron-LM as one of this trainer, with its optimizer state",
    )
    from_megatron.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="tokens before padding (default: as in its arguments, or all rows of the embedding)",
    )
    for command in (exported, to_megatron, from_megatron):
        command.add_argument("--load", required=True, metavar="CHECKPOINTS", help="directory that a run saved to")
        command.add_argument(
            "--load-tag", metavar="TAG", help="checkpoint, such as global_step100 (default: the newest)"
        )
    for command in (exported, imported, to_megatron, from_megatron):
        command.add_argument("--output", required=True, metavar="DIR", help="directory to write, empty or new")
        command.add_argument(
            "--dtype", choices=("fp32", "bf16", "fp16"), help="type of the weights (default: unchanged)"
        )
        add_json_flag(command, "paths that were written")
    return parser


_Convert = Callable[[argparse.Namespace, Path, ProgressLine], tuple[Converted, str]]
"""Converts into a directory, and returns the answer for programs and the sentence for people."""


def _add_command(
    commands: "argparse._SubParsersAction[CommandParser]", name: str, convert: _Convert, summary: str
) -> CommandParser:
    parser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.set_defaults(convert=convert)
    return parser


def _to_huggingface(options: argparse.Namespace, output: Path, line: ProgressLine) -> tuple[Converted, str]:
    # Imported once the flags are known to be good: torch and DeepSpeed take seconds.
    from megatron_terapipe.checkpoint.conversion import export_checkpoint
    from megatron_terapipe.checkpoint.directories import existing_checkpoint

    directory = existing_checkpoint(options.load, options.load_tag)
    files, remarks = export_checkpoint(
        directory,
        output,
        family=options.family,
        dtype=options.dtype,
        eod=_eod(directory),
        progress=line.part("writing the model"),
    )
    known = f"with {', '.join(files)}" if files else "without a tokenizer"
    lines = [f"wrote {output} from {directory}, {known}", *(f"note: {each}" for each in remarks)]
    paths = {"output": str(output), "source": str(directory)}
    return Converted(**paths, tokenizer_files=tuple(files), remarks=tuple(remarks)), "\n".join(lines)


def _eod(directory: Path) -> int | None:
    """The token that ends a document; None if the tokenizer is not known or its files are gone."""
    from megatron_terapipe.checkpoint.directories import checkpoint_info
    from megatron_terapipe.checkpoint.model_files import tokenizer_in
    from megatron_terapipe.data.tokenizer import build_tokenizer
    from megatron_terapipe.data.tokenizer_settings import TokenizerSettings

    settings = tokenizer_in(directory, checkpoint_info(directory).tokenizer)
    try:
        return build_tokenizer(TokenizerSettings(**settings)).eod if settings else None
    except UserError:
        return None


def _from_huggingface(options: argparse.Namespace, output: Path, line: ProgressLine) -> tuple[Converted, str]:
    from megatron_terapipe.checkpoint.conversion import import_model

    progress = line.part("writing the checkpoint")
    settings = {"mtp_num_layers": options.mtp_num_layers, "dtype": options.dtype}
    checkpoint, remarks = import_model(Path(options.load), output, **settings, progress=progress)
    sentence = (
        f"wrote {checkpoint} from {options.load}: train it with --load {output} --finetune --use-checkpoint-args "
        f"--seq-length N, or generate with --load {output}"
    )
    written = Converted(output=str(checkpoint), source=options.load, remarks=tuple(remarks))
    return written, "\n".join([sentence, *(f"note: {each}" for each in remarks)])


def _to_megatron(options: argparse.Namespace, output: Path, line: ProgressLine) -> tuple[Converted, str]:
    from megatron_terapipe.checkpoint.conversion import export_megatron
    from megatron_terapipe.checkpoint.directories import existing_checkpoint

    directory = existing_checkpoint(options.load, options.load_tag)
    written = export_megatron(directory, output, dtype=options.dtype, progress=line.part("writing the weights"))
    return Converted(output=str(written), source=str(directory)), (
        f"wrote {written} from {directory}, without the state of the optimizer: load it in Megatron-LM with --load "
        f"{output} --use-checkpoint-args and --finetune or --no-load-optim --no-load-rng"
    )


def _from_megatron(options: argparse.Namespace, output: Path, line: ProgressLine) -> tuple[Converted, str]:
    from megatron_terapipe.checkpoint.conversion import import_megatron
    from megatron_terapipe.checkpoint.foreign import MEGATRON, foreign_origin, megatron_checkpoint

    if foreign_origin(options.load) != MEGATRON:
        raise ConfigError(
            f"--load {options.load} holds no checkpoint of Megatron-LM: give a directory that it saved to"
        )
    directory = megatron_checkpoint(options.load, options.load_tag)
    checkpoint, no_states = import_megatron(
        directory,
        output,
        vocab_size=options.vocab_size,
        dtype=options.dtype,
        progress=line.part("writing the checkpoint"),
    )
    state = f"without the state of the optimizer ({no_states})" if no_states else "with the state of the optimizer"
    weights = " --finetune" if no_states else ""
    return Converted(output=str(checkpoint), source=str(directory)), (
        f"wrote {checkpoint} from {directory}, {state}: continue it with --load {output} --use-checkpoint-args{weights}"
    )


main = command_main(build_parser, _run, "python -m megatron_terapipe.convert")

if __name__ == "__main__":
    sys.exit(main())
