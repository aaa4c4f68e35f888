"""`python -m megatron_terapipe.generate`: continues a prompt with a trained model."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import CheckpointError, ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prompt and its continuation. Returns the exit code: 2 for bad input, said in one line."""
    options = _parser().parse_args(argv)
    try:
        if options.max_new_tokens < 1 or options.temperature < 0 or options.top_k < 0:
            raise ConfigError(
                f"--max-new-tokens {options.max_new_tokens}, --temperature {options.temperature}, --top-k "
                f"{options.top_k}: give at least 1, 0 and 0"
            )
        for text in _continuation(options):
            print(text, end="", flush=True)
        print()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_terapipe.generate", description=__doc__)
    parser.add_argument("--load", required=True, metavar="CHECKPOINTS", help="directory that a run saved to")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="tokens to add (default: 200)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0 takes the likeliest token, 1 draws as trained (default: 1)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    return parser


def _continuation(options: argparse.Namespace) -> Iterator[str]:
    """Yield the prompt, then the new text as it comes."""
    # Imported once the flags are known to be good: torch and DeepSpeed take seconds.
    from megatron_terapipe.data.tokenizer import build_tokenizer
    from megatron_terapipe.inference.generation import generate
    from megatron_terapipe.inference.whole_model import WholeModel
    from megatron_terapipe.training.checkpoint import CheckpointInfo, latest_checkpoint

    directory = latest_checkpoint(options.load)
    if directory is None:
        raise CheckpointError(f"--load {options.load} holds no checkpoint: give a directory that a run saved to")
    info = CheckpointInfo.read(directory)
    files = (Path(name) if name else None for name in (info.tokenizer["vocab_file"], info.tokenizer["merge_file"]))
    tokenizer = build_tokenizer(str(info.tokenizer["tokenizer_type"]), *files)
    config = ModelConfig(**info.model)
    model = WholeModel(config).load(directory).float().eval()
    yield options.prompt
    # Tokens may end within a character: hold back what does not decode yet.
    pending: list[int] = []
    for token in generate(
        model,
        tokenizer.encode(options.prompt),
        options.max_new_tokens,
        max_positions=config.max_position_embeddings,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    ):
        pending.append(token)
        text = tokenizer.decode(pending)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text
            pending = []
    yield tokenizer.decode(pending)


if __name__ == "__main__":
    sys.exit(main())
