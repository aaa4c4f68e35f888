"""Continues a text, one token after the other, on the keys and values that training keeps for token slices."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.sequence.sequence_state import SequenceState
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.inference.whole_model import WholeModel


def generate(
    model: WholeModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    max_positions: int,
    vocab_size: int,
    eod: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[int]:
    """Check what is asked for, then yield new tokens until `eod`, or as many as asked for.

    A growing text is a cut of its own: the prompt is the first token slice, each new token one more.

    Args:
        prompt: token ids, at least one.
        vocab_size: tokens of the tokenizer; the padding of the vocabulary is never drawn.
        eod: id that ends the text; None to go on for ever.
        temperature: divides the logits; 0 takes the likeliest token always.
        top_k: draw from the k likeliest tokens; 0 from all.
        top_p: draw from the likeliest tokens whose chances, at this temperature, add up to this.

    Raises:
        ConfigError: if prompt and new tokens are more than `max_positions`, or there is no prompt.
    """
    if not prompt:
        raise ConfigError("the prompt is empty: give at least one character")
    if len(prompt) + max_new_tokens > max_positions:
        raise ConfigError(
            f"{len(prompt)} tokens of prompt and {max_new_tokens} new are more than the {max_positions} positions "
            f"of the model: {_fewer(max_positions - len(prompt))}"
        )
    draw = partial(_draw, temperature=temperature, top_k=top_k, top_p=top_p, draws=torch.Generator().manual_seed(seed))
    return _new_tokens(model, prompt, max_new_tokens, vocab_size=vocab_size, eod=eod, draw=draw)


def _fewer(room: int) -> str:
    """Return the remedy where the model has positions for so many new tokens."""
    return f"shorten the prompt, or ask for {room} new tokens or fewer" if room > 0 else "shorten the prompt"


@torch.no_grad()
def _new_tokens(
    model: WholeModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    vocab_size: int,
    eod: int | None,
    draw: Callable[[torch.Tensor], int],
) -> Iterator[int]:
    state = SequenceState(TokenSlices((len(prompt),) + (1,) * max_new_tokens), forward_only=True)
    tokens = torch.tensor([list(prompt)])
    for token_slice in range(max_new_tokens):
        logits = model(tokens, state, token_slice)[0, -1, :vocab_size].float()
        token = draw(logits)
        if token == eod:
            return
        yield token
        tokens = torch.tensor([[token]])


def _draw(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, draws: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    chances = (logits / temperature).softmax(-1)
    if top_p < 1:
        chances = _nucleus(chances, top_p)
    return int(torch.multinomial(chances, 1, generator=draws))


def _nucleus(chances: torch.Tensor, top_p: float) -> torch.Tensor:
    """Chances without the tail (Holtzman et al., arXiv 1904.09751): a token stays if those before it fall short."""
    descending, order = chances.sort(descending=True)
    tail = descending.cumsum(-1) - descending >= top_p
    return chances.index_fill(0, order[tail], 0.0)
