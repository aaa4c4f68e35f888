"""`python -m megatron_terapipe.generate`: continues a prompt with a trained model."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from math import inf

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.command_parser import CommandParser
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.data.tokenizer_flags import add_tokenizer_flags, tokenizer_settings
from megatron_terapipe.errors import CheckpointError, ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prompt and its continuation. Returns the exit code: 2 for bad input, said in one line."""
    try:
        options = _parser().parse_args(argv)
        if options.max_new_tokens < 1 or not 0 <= options.temperature < inf or options.top_k < 0:
            raise ConfigError(
                f"--max-new-tokens {options.max_new_tokens}, --temperature {options.temperature}, --top-k "
                f"{options.top_k}: give at least 1, 0 and 0"
            )
        if not 0 < options.top_p <= 1:
            raise ConfigError(f"--top-p {options.top_p} is out of range: give more than 0, up to 1")
        for text in _continuation(options):
            print(text, end="", flush=True)
        print()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(prog="python -m megatron_terapipe.generate", description=__doc__)
    parser.add_argument("--load", required=True, metavar="CHECKPOINTS", help="directory that a run saved to")
    parser.add_argument("--load-tag", metavar="TAG", help="checkpoint, such as global_step100 (default: the newest)")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help="file of the text to continue, in UTF-8")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="tokens to add (default: 200)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="0 takes the most likely token, 1 samples from the model's distribution (default: 1)",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens (default: all)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens whose probabilities add up to P (default: all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    add_tokenizer_flags(
        parser,
        default=None,
        explained="tokenizer, if the checkpoint names none or its files have moved (default: that of the checkpoint)",
    )
    return parser


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt_file is None:
        return str(options.prompt)
    return read_text(options.prompt_file, "--prompt-file")


def _continuation(options: argparse.Namespace) -> Iterator[str]:
    """Yield the prompt, then the new text as it comes."""
    text_before = _prompt(options)
    # Imported once the flags are known to be good: torch and DeepSpeed take seconds.
    import torch

    from megatron_terapipe.checkpoint.directories import existing_checkpoint
    from megatron_terapipe.checkpoint.info import CheckpointInfo
    from megatron_terapipe.data.text_stream import TextStream
    from megatron_terapipe.data.tokenizer import TokenizerSettings, build_tokenizer
    from megatron_terapipe.inference.generation import generate
    from megatron_terapipe.inference.whole_model import WholeModel

    directory = existing_checkpoint(options.load, options.load_tag)
    info = CheckpointInfo.read(directory)
    if options.tokenizer_type is not None:
        settings = tokenizer_settings(options)
    elif info.tokenizer:
        settings = TokenizerSettings(**info.tokenizer)
    else:
        raise CheckpointError(f"checkpoint {directory} knows no tokenizer: add --tokenizer-type and its files")
    tokenizer = build_tokenizer(settings)
    config = ModelConfig(**info.model)
    # On `meta` nothing is drawn only to be overwritten.
    with torch.device("meta"):
        model = WholeModel(config)
    model = model.load(directory, info.tensor_parallel_size).float().eval()
    prompt = tokenizer.encode(text_before)
    text = TextStream(tokenizer, prompt)
    tokens = generate(
        model,
        prompt,
        options.max_new_tokens,
        max_positions=config.max_position_embeddings,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    yield text_before
    for token in tokens:
        yield text.push(token)
    yield text.rest()


if __name__ == "__main__":
    sys.exit(main())
