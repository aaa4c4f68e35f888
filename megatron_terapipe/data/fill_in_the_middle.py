"""Documents rearranged to fill in the middle, as by Megatron-LM's `GPTFIMDataset`; in capital letters tokens of flags.

PREFIX beginning SUFFIX end MIDDLE middle
PREFIX SUFFIX end MIDDLE beginning middle      with the probability of `--fim-spm-rate`
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.config.data import DataConfig
from megatron_terapipe.config.options import with_value
from megatron_terapipe.data.datasets import SampleDataset, prepare_samples
from megatron_terapipe.data.subword_tokenizers import PackageTokenizer, Tokenizer
from megatron_terapipe.errors import DataError

Tokens = NDArray[np.int64]


class FillInTheMiddle:
    """Samples, rearranged with random numbers that depend on the seed and the number of the sample only."""

    def __init__(self, samples: SampleDataset, data: DataConfig, tokenizer: Tokenizer, seed: int) -> None:
        """Find the tokens of the flags in the tokenizer."""
        if not isinstance(tokenizer, PackageTokenizer):
            raise DataError(f"--fim-data does not go with {tokenizer.name}: use HuggingFaceTokenizer")
        self._samples, self._data, self._tokenizer, self._seed = samples, data, tokenizer, seed
        names = [f"fim_{each}_token" for each in ("prefix", "middle", "suffix", "pad", "eod")]
        names += ["fim_split_sample"] if data.fim_split_sample else []
        self._ids = {name: tokenizer.id_of(getattr(data, name)) for name in names}
        for name in [name for name, found in self._ids.items() if found is None]:
            raise DataError(
                f"{with_value(name, getattr(data, name))} is not in {tokenizer.name}: name one of its tokens"
            )

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        """Return a sample, cut or padded to its length before."""
        # Megatron's generator, seeded for each sample: there its state depends on the order of reading.
        random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((self._seed, sample))))
        tokens, pad = self._samples[sample], self._ids["fim_pad_token"]
        parts = _by_part(tokens, self._ids["fim_eod_token"], lambda part: self._document(part, random))[: len(tokens)]
        return np.concatenate([parts, np.full(len(tokens) - len(parts), pad, np.int64)])

    def prepare(self, sample: int) -> None:
        """Draw the orders that a run from a sample on begins with."""
        prepare_samples(self._samples, sample)

    def _document(self, tokens: Tokens, random: np.random.RandomState) -> Tokens:
        rate, of_fragment, split = self._data.fim_rate, self._data.fim_fragment_rate, self._ids.get("fim_split_sample")
        if split is None or split not in tokens:
            return self._permuted(tokens, rate, random)
        if not random.binomial(1, rate):
            return tokens
        return _by_part(tokens, split, lambda part: self._permuted(part, of_fragment or 0.0, random))

    def _permuted(self, tokens: Tokens, rate: float, random: np.random.RandomState) -> Tokens:
        text = self._tokenizer.plain_text(tokens.tolist()) if random.binomial(1, rate) else None
        if text is None or (self._data.fim_no_prefix is not None and text.startswith(self._data.fim_no_prefix)):
            return tokens
        first, end = sorted(random.randint(0, len(text) + 1, size=2).tolist())
        prefix, middle, suffix = map(self._tokenizer.encode, (text[:first], text[first:end], text[end:]))
        before, between, last = (self._ids[f"fim_{each}_token"] for each in ("prefix", "middle", "suffix"))
        if random.binomial(1, self._data.fim_spm_rate):
            return np.array([before, last, *suffix, between, *prefix, *middle], np.int64)
        return np.array([before, *prefix, last, *suffix, between, *middle], np.int64)


def _by_part(tokens: Tokens, separator: int | None, rearrange: Callable[[Tokens], Tokens]) -> Tokens:
    """Rearrange the parts between separators; an empty one goes, together with the separator after it."""
    parts, first = [], 0
    for end in np.flatnonzero(tokens == separator).tolist():
        parts += [rearrange(tokens[first:end]), tokens[end : end + 1]] if end > first else []
        first = end + 1
    return np.concatenate([*parts, rearrange(tokens[first:])])
