"""Text of tokens that arrive one by one."""

from collections.abc import Sequence

from megatron_terapipe.data.tokenizer import Tokenizer

UNDECODED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns tokens into pieces of text, which joined are the text of all of them.

    Tokens may end within a character, so text that may still change is held back. A tokenizer may write the first
    token of a text unlike the same token later on, without the space before the word: so each piece is what the text
    of the tokens before it grows by.

    Example:
        >>> stream = TextStream(tokenizer, prompt)
        >>> pieces = [*map(stream.push, tokens), stream.rest()]
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        """Begin after some tokens."""
        self._tokenizer = tokenizer
        self._written = list(before)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that one more token completes; empty while it completes none.

        Raises:
            DataError: the id is outside the vocabulary.
        """
        self._pending.append(token)
        return "" if self._growth().endswith(UNDECODED) else self.rest()

    def rest(self) -> str:
        """Return the text held back, complete or not."""
        text = self._growth()
        if self._pending:
            # The last piece is enough of what came before: text further back changes nothing.
            self._written, self._pending = self._pending, []
        return text

    def _growth(self) -> str:
        before = self._tokenizer.decode(self._written)
        return self._tokenizer.decode([*self._written, *self._pending])[len(before) :]
