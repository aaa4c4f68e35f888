"""The flags of `terapipe train`: those that most runs need for its help, and all of them."""

from deepspeed_ext.plan.text.command_line import CommandParser
from megatron_terapipe.arguments.help_text import ALL, add_flags_of, other_flags
from megatron_terapipe.command.launcher_flags import add_launcher_flags

OF_THE_LAUNCHER = ("hostfile",)
"""Fields of the trainer whose flag is the launcher's here; a dry run gets it back."""

DESCRIPTION = """\
Train a GPT, here or on the hosts of a hostfile.

Starts pretrain_gpt.py with DeepSpeed's launcher, as `deepspeed pretrain_gpt.py` does. If torchrun, srun or mpirun has
started this command already, it trains as one of their ranks. With --dry-run it starts nothing: it checks everything
and prints what would run."""

EPILOG = """\
examples:
  %(prog)s --num-accelerators 2 --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 512 \\
      --pipeline-model-parallel-size 2 --num-token-slices 4 --micro-batch-size 1 --global-batch-size 4 \\
      --train-iters 20 --lr 1e-3 --vocab-size 1000 --mock-data
  %(prog)s --hostfile hostfile --model-preset llama2-7b --seq-length 4096 ... --dry-run
  srun --nodes 2 --ntasks-per-node 8 %(prog)s --model-preset llama2-7b --seq-length 4096 ...

Launchers, one command each: docs/how-to/launching.md."""


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the flags that most runs need, for help; `prog` is what people type before them."""
    return help_parser(prog, "")


def help_parser(prog: str, group: str) -> CommandParser:
    """Return the parser of the flags that a help shows.

    Args:
        prog: what people type before them.
        group: a group of the trainer's flags, or "" for those that most runs need.
    """
    parser = _begun(prog)
    if not group:
        parser.epilog = f"{EPILOG}\n\n{other_flags(prog)}"
    add_flags_of(parser, group, without=OF_THE_LAUNCHER)
    return parser


def whole_parser(prog: str) -> CommandParser:
    """Return the parser of all flags, for help and for shells; `prog` is what people type before them."""
    return help_parser(prog, ALL)


def _begun(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog, usage=f"{prog} [flags of the launcher] flags of the trainer", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("--help-all", action="store_true", help="show all flags of the trainer, as --help all does")
    add_launcher_flags(parser)
    return parser
