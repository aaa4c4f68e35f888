"""`terapipe generate`: continues a prompt with a trained model."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deepspeed_ext.plan.terminal import (
    STANDARD_OUTPUT,
    CommandParser,
    Progress,
    ProgressLine,
    add_json_flag,
    command_main,
    exact_output,
    write_json,
)
from deepspeed_ext.plan.text_files import read_text
from deepspeed_ext.runtime.cuda_environment import expect_cpu
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.rotation import for_length
from megatron_terapipe.data.tokenizer_settings import TokenizerSettings, add_tokenizer_flags
from megatron_terapipe.errors import CheckpointError, ConfigError
from megatron_terapipe.huggingface.families.registry import is_model_folder, read_model

if TYPE_CHECKING:
    from megatron_terapipe.inference import WholeModel

_MOST_UNASKED = 200
"""New tokens without `--max-new-tokens`."""

DESCRIPTION = """\
Continue a text with a trained model: print the text, then each new token as it comes."""

EPILOG = """\
examples:
  %(prog)s --load checkpoints --prompt "The state of the Union"
  %(prog)s --load qwen2.5-7b/ --prompt-file question.txt --temperature 0 --max-new-tokens 50

One process computes, on one device. Read on: docs/how-to/huggingface.md."""


VERIFIED = 0.5
"""Share of the time to load a checkpoint after which it has been verified, about."""


def _run(options: argparse.Namespace, prog: str) -> int:
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {options.max_new_tokens} is too few: give 1 or more")
    if not 0 <= options.temperature < inf or options.top_k < 0:
        raise ConfigError(f"--temperature {options.temperature}, --top-k {options.top_k}: give 0 or more for both")
    if not 0 < options.top_p <= 1:
        raise ConfigError(f"--top-p {options.top_p} is out of range: give more than 0, up to 1")
    expect_cpu()
    said = []
    for text in _continuation(options):
        said.append(text)
        if options.json != STANDARD_OUTPUT:
            print(text, end="", flush=True, file=exact_output())
    if options.json != STANDARD_OUTPUT:
        print()
    if options.json is not None:
        prompt, *continuation = said
        answer = {"prompt": prompt, "continuation": "".join(continuation)}
        write_json(options.json, json.dumps(answer, ensure_ascii=False))
    return 0


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the command; `prog` is the command as users type it."""
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    model = parser.add_argument_group("model and text")
    model.add_argument(
        "--load",
        required=True,
        metavar="CHECKPOINTS",
        help="directory that a run saved to, or a folder of Hugging Face",
    )
    model.add_argument("--load-tag", metavar="TAG", help="checkpoint, such as global_step100 (default: the newest)")
    prompt = model.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help="file of the text to continue, in UTF-8")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"tokens to add (default: {_MOST_UNASKED}, or as many as the model has positions for)",
    )
    sampling.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        default=1.0,
        help="0 takes the most likely token, 1 samples from the model's distribution (default: 1)",
    )
    sampling.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens (default: all)"
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens whose probabilities add up to P (default: all)",
    )
    sampling.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)")
    add_tokenizer_flags(
        parser,
        default=None,
        explained="tokenizer, if the checkpoint has none (default: the checkpoint's)",
    )
    add_json_flag(parser.add_argument_group("output"), "prompt and continuation, once all is there,")
    return parser


def _continuation(options: argparse.Namespace) -> Iterator[str]:
    """Yield the prompt, then the new text as it comes."""
    text_before = options.prompt if options.prompt_file is None else read_text(options.prompt_file, "--prompt-file")
    # Imported once the flags are known to be good: torch and DeepSpeed take seconds.
    from megatron_terapipe.data.tokenizer import TextStream, build_tokenizer
    from megatron_terapipe.inference import generate

    source = _model_folder(options) if is_model_folder(options.load) else _checkpoint(options)
    if options.tokenizer_type is not None:
        settings = TokenizerSettings.of_flags(options)
    elif source.tokenizer:
        settings = TokenizerSettings(**source.tokenizer)
    else:
        raise CheckpointError(f"{source.name} has no tokenizer: add --tokenizer-type and its files")
    tokenizer = build_tokenizer(settings)
    prompt = tokenizer.encode(text_before)
    rows = source.model.vocab_size or tokenizer.vocab_size
    if max(prompt, default=0) >= rows:
        raise CheckpointError(
            f"the prompt has the token id {max(prompt)} of {tokenizer.name}, and {source.name} has {rows} ids from 0: "
            "give the tokenizer of the model, or leave this token out"
        )
    num_new_tokens = options.max_new_tokens
    if num_new_tokens is None:
        # A prompt that is too long leaves no room; `generate` refuses it.
        room = source.model.max_position_embeddings - len(prompt)
        num_new_tokens = max(1, min(_MOST_UNASKED, room))
    model = _loaded(source, len(prompt) + num_new_tokens)
    text = TextStream(tokenizer, prompt)
    tokens = generate(
        model,
        prompt,
        num_new_tokens,
        max_positions=source.model.max_position_embeddings,
        vocab_size=min(rows, tokenizer.vocab_size),
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


class _Source(NamedTuple):
    """A model, its tokenizer and its weights."""

    name: str
    model: ModelConfig
    tokenizer: Mapping[str, Any]
    """Settings of its tokenizer; empty if it names none."""
    weights: Callable[[ProgressLine], tuple[Callable[..., Mapping[str, Any]], Progress]]
    """Checks the weights; returns a layer's weights by number and layer, and the progress for loading them."""


def _checkpoint(options: argparse.Namespace) -> _Source:
    from megatron_terapipe.checkpoint.directories import checkpoint_info, existing_checkpoint
    from megatron_terapipe.checkpoint.model_files import tokenizer_in

    directory = existing_checkpoint(options.load, options.load_tag)
    info = checkpoint_info(directory).of_gpt(directory)
    model = ModelConfig(**info.model)

    def weights(line: ProgressLine) -> tuple[Callable[..., Mapping[str, Any]], Progress]:
        from megatron_terapipe.checkpoint.saved_weights import weights_of
        from megatron_terapipe.checkpoint.verify import verify_weights

        verify_weights(directory, info, model, line.part("verifying the checkpoint", 0.0, VERIFIED))
        return weights_of(directory, info).whole, line.part("loading the model", VERIFIED, 1.0)

    return _Source(f"checkpoint {directory}", model, tokenizer_in(directory, info.tokenizer), weights)


def _model_folder(options: argparse.Namespace) -> _Source:
    from megatron_terapipe.huggingface.families.registry import tokenizer_of
    from megatron_terapipe.huggingface.folder_weights import FolderWeights

    if options.load_tag is not None:
        raise ConfigError(
            f"--load-tag {options.load_tag} names a checkpoint, and --load {options.load} is a model of Hugging Face: "
            "drop it"
        )
    folder = Path(options.load)
    family, model = read_model(folder, "--load")
    found = FolderWeights(folder, family, model)
    found.check()

    def weights(line: ProgressLine) -> tuple[Callable[..., Mapping[str, Any]], Progress]:
        return found.whole, line.part("loading the model")

    return _Source(f"--load {folder}", model, tokenizer_of(folder), weights)


def _loaded(source: _Source, tokens: int) -> "WholeModel":
    """Return the model for so many tokens; it is built on `meta`, so that no initial weights are drawn."""
    import torch

    from megatron_terapipe.inference import WholeModel

    with ProgressLine() as line:
        weights, progress = source.weights(line)
        with torch.device("meta"):
            empty = WholeModel(replace(for_length(source.model, tokens), mtp_num_layers=0))
        return empty.take(weights, progress).float().eval()


main = command_main(build_parser, _run, "python -m megatron_terapipe.generate")

if __name__ == "__main__":
    sys.exit(main())
