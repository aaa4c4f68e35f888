"""`python -m megatron_terapipe.neox`: the command that trains what GPT-NeoX's files describe."""

import sys
from collections.abc import Sequence

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.text_files import write_text
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.command_parser import CommandParser
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.conversion import Conversion, Effect
from megatron_terapipe.neox.convert import convert
from megatron_terapipe.neox.settings_files import read_settings


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, print, list. Returns the exit code: 2 for bad input, or with `--strict` for another training."""
    try:
        options = _parser().parse_args(argv)
        if options.world_size is not None and options.world_size < 1:
            raise ConfigError(f"--world-size {options.world_size} is not positive: give 1 or more")
        conversion = convert(read_settings(options.files), options.world_size)
        comments = [*conversion.comments(), *_unfinished(conversion)]
        text = "".join(f"# {comment}\n" for comment in comments) + conversion.command()
        if options.output is None:
            print(text, end="")
        else:
            write_text(options.output, text, "--output")
        for comment in comments:
            print(comment, file=sys.stderr)
        changed = [note.key for note in conversion.notes if note.effect is Effect.CHANGES]
        if options.strict and changed:
            raise ConfigError(
                f"{', '.join(changed)} would not be trained as NeoX does: change the files, or leave out --strict"
            )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(prog="python -m megatron_terapipe.neox", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="CONFIG.yml", help="configuration files of NeoX, which are merged")
    parser.add_argument("--output", metavar="FILE", help="write the command to a file instead of printing it")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="number of processes, if the batch size depends on it"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 2 if a setting changes what is trained")
    return parser


def _unfinished(conversion: Conversion) -> list[str]:
    """Say what the trainer itself has against the command, as where a file holds only the model."""
    try:
        parse_arguments(conversion.words())
    except UserError as error:
        return [f"the trainer does not take this as it is: {error}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
