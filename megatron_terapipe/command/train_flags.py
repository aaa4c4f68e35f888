"""The flags of `terapipe train`: those that most runs need for its help, and all of them."""

import argparse
import re

from deepspeed_ext.plan.text.command_line import CommandParser
from megatron_terapipe.arguments.flags import Flag, flags
from megatron_terapipe.arguments.parser import CommandLine, add_trainer_flags, spellings
from megatron_terapipe.command.launcher_flags import add_launcher_flags

OF_THE_LAUNCHER = ("hostfile",)
"""Fields of the trainer whose flag is the launcher's here; a dry run gets it back."""

MOST_USED = {
    "model": (
        *("model_preset", "num_layers", "hidden_size", "num_attention_heads", "seq_length"),
        *("max_position_embeddings", "recompute_granularity"),
    ),
    "data": ("data_path", "mock_data", "tokenizer_type", "tokenizer_model", "split"),
    "pipeline and ranks": (
        *("pipeline_model_parallel_size", "num_token_slices", "token_slices", "pipeline_schedule"),
        *("tensor_model_parallel_size", "sequence_parallel", "ds_sequence_parallel_size", "zero_stage", "strategy"),
    ),
    "batch and learning rate": (
        *("micro_batch_size", "global_batch_size", "train_iters", "lr", "min_lr", "lr_warmup_iters"),
        *("lr_decay_style", "bf16"),
    ),
    "checkpoints and logs": (
        *("save", "save_interval", "load", "finetune", "log_interval", "eval_interval", "metrics_file"),
        *("tensorboard_dir", "wandb_project", "timeline"),
    ),
    "before a run": ("dry_run",),
}
"""Fields whose flags most runs need, by what they are about."""

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

These are the flags that most runs need. All flags: %(prog)s --help-all, or docs/reference/arguments.md. Launchers, one
command each: docs/how-to/launching.md."""


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the flags that most runs need, for help; `prog` is what people type before them."""
    parser = _begun(prog)
    by_name = {each.name: each for each in flags()}
    for title, names in MOST_USED.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add(group, by_name[name])
    return parser


def whole_parser(prog: str) -> CommandParser:
    """Return the parser of all flags, for help and for shells; `prog` is what people type before them."""
    parser = _begun(prog)
    add_trainer_flags(parser, CommandLine(), without=OF_THE_LAUNCHER)
    return parser


def _begun(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog, usage=f"{prog} [flags of the launcher] flags of the trainer", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("--help-all", action="store_true", help="show all flags of the trainer")
    add_launcher_flags(parser)
    return parser


def _add(group: argparse._ArgumentGroup, each: Flag) -> None:
    """Add a flag with the first sentence of its help; of one that lists its values, without what each means."""
    names, settings = next(spellings(each))
    sentence = re.split(r"[.:;](?: |$)" if each.choices else r"\.(?: |$)", each.help, maxsplit=1)[0]
    default = f" (default: {each.default_text})" if each.default_text not in ("", "required") else ""
    settings = {"metavar": settings["metavar"]} if "metavar" in settings else {"action": "store_true"}
    group.add_argument(names[0], help=f"{sentence}{default}".replace("%", "%%"), **settings)
