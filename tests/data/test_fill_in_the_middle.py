"""Samples rearranged to fill in the middle, compared with a table of results of Megatron-LM's `GPTFIMDataset`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import DataConfig
from megatron_terapipe.data.fill_in_the_middle import FillInTheMiddle
from megatron_terapipe.data.indexed_dataset import IndexedDatasetWriter
from megatron_terapipe.data.subword_tokenizers import HuggingFaceTokenizer
from megatron_terapipe.data.tokenizer import ByteTokenizer
from megatron_terapipe.errors import ConfigError, DataError
from megatron_terapipe.training.auto_plan import without_files
from megatron_terapipe.training.run import prepare
from tests.training.gpt_runs import FLAGS

SPECIAL = ["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<file_sep>", "<P>"]
END = SPECIAL[0]
TEXT = f"the cat and the hen{END}{END}a<file_sep>then the other<file_sep><file_sep>#the end{END}on the"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    """Bytes and a few longer tokens, so that parts of a text have other tokens than the whole."""
    longer = [("t", "h"), ("th", "e"), ("h", "e"), ("Ġ", "the")]
    vocabulary = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in longer:
        vocabulary[left + right] = len(vocabulary)
    whole = Tokenizer(models.BPE(vocabulary, longer))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens(SPECIAL)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    whole.save(str(path))
    return HuggingFaceTokenizer(path)


def ids_of(tokenizer: HuggingFaceTokenizer, text: str) -> np.ndarray:
    """Return the ids of a text, with special tokens for their spellings."""
    tokenizer._tokenizer.encode_special_tokens = False
    ids = tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
    tokenizer._tokenizer.encode_special_tokens = True
    return np.array(ids, np.int64)


def data_of(**fim: Any) -> DataConfig:
    return DataConfig(data_path=("corpus",), fim_data=True, **fim)


SPLIT = {"fim_split_sample": "<file_sep>", "fim_fragment_rate": 0.75}
CASES: dict[str, dict[str, Any]] = {
    "half": {},
    "none": {"fim_rate": 0.0},
    "all, end first": {"fim_rate": 1.0, "fim_spm_rate": 1.0},
    "all, end last": {"fim_rate": 1.0, "fim_spm_rate": 0.0},
    "fragments": {"fim_rate": 1.0, **SPLIT},
    "some fragments": {"fim_rate": 0.5, **SPLIT},
    "not all": {"fim_rate": 1.0, "fim_no_prefix": "#", **SPLIT},
    "other tokens": {"fim_rate": 1.0, "fim_prefix_token": "<P>", "fim_pad_token": "a"},
}


E, P, M, S, F = "<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<file_sep>"
GOLDEN = {
    "half": f"the cat and the hen{E}{P}athen the other#the {S}{M}end{E}{P}{S} the{M}",
    "none": f"the cat and the hen{E}a{F}then the other{F}{F}#the end{E}on the<fim_pad>",
    "all, end first": f"{P}{S}hen{M}the cat and the {E}{P}{S} end{M}athen the other",
    "all, end last": f"{P}the cat and t{S}hen{M}he {E}{P}athen th{S} end{M}e other",
    "fragments": f"{P}the cat and t{S}hen{M}he {E}{P}{S}{M}a{F}{P}{S} other{M}then the{F}{P}",
    "some fragments": f"the cat and the hen{E}{P}{S}a{M}{F}{P}{S}e other{M}then th{F}{P}{S}{M}#",
    "not all": f"{P}the cat and t{S}hen{M}he {E}{P}{S}{M}a{F}{P}{S} other{M}then the{F}#",
    "other tokens": f"<P>the cat and t{S}hen{M}he {E}<P>{S} end{M}athen the other",
}


@pytest.mark.parametrize("name", CASES)
def test_golden_samples(tokenizer: HuggingFaceTokenizer, name: str) -> None:
    tokens = ids_of(tokenizer, TEXT)
    ours = FillInTheMiddle([tokens] * 10, data_of(**CASES[name]), tokenizer, seed=7)
    assert tokenizer.decode(ours[9].tolist()) == GOLDEN[name]
    # Each sample is the same in any order of reading.
    again = FillInTheMiddle([tokens] * 10, data_of(**CASES[name]), tokenizer, seed=7)
    assert all(np.array_equal(again[sample], ours[sample]) for sample in (9, 0, 8, 9))
    assert ours[0].dtype == np.int64 and len(ours[0]) == len(tokens)


def test_a_run_reads_them(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    prefix, file = tmp_path / "corpus", tmp_path / "tokenizer.json"
    tokenizer._tokenizer.save(str(file))
    with IndexedDatasetWriter(prefix, vocab_size=tokenizer.vocab_size) as writer:
        for number in range(20):
            writer.add_document(ids_of(tokenizer, f"the cat and the hen {number}{END}"))
    of_tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {file}"
    words = FLAGS.replace("--data-path unread", f"--data-path {prefix} --split 8,2,0 --eval-iters 1 {of_tokenizer}")
    plain, filled = (
        prepare(parse_arguments(f"{words} --vocab-size 512 {more}".split()), LaunchEnvironment.first_of(1)).datasets
        for more in ("", "--fim-data --fim-rate 1")
    )
    assert plain.train is not None and filled.valid is not None
    for each, before in ((filled.train, plain.train), (filled.valid, plain.valid)):
        assert isinstance(each, FillInTheMiddle) and len(each) == len(before)
        assert tokenizer.id_of("<fim_middle>") in each[0] and tokenizer.id_of("<fim_middle>") not in before[0]


def test_flags_that_are_wrong(tokenizer: HuggingFaceTokenizer) -> None:
    for fim, line in (
        ({"fim_split_sample": "<file_sep>"}, "--fim-split-sample <file_sep> has no effect without --fim-fragment-rate"),
        ({"fim_rate": 1.5}, "--fim-rate 1.5 is more than 1"),
    ):
        with pytest.raises(ConfigError, match=line):
            data_of(**fim)
    with pytest.raises(ConfigError, match=r"--fim-rate 0\.25 has no effect without --fim-data"):
        DataConfig(data_path=("corpus",), fim_rate=0.25)
    with pytest.raises(ConfigError, match="--mock-data and --fim-data exclude each other"):
        DataConfig(mock_data=True, fim_data=True)
    with pytest.raises(DataError, match="--fim-pad-token <pad> is not in HuggingFaceTokenizer: name one of its tokens"):
        FillInTheMiddle([], data_of(fim_pad_token="<pad>"), tokenizer, seed=1)
    with pytest.raises(DataError, match="--fim-data does not go with byte: use HuggingFaceTokenizer"):
        FillInTheMiddle([], data_of(), ByteTokenizer(), seed=1)


def test_a_dry_run_without_files_needs_no_tokens() -> None:
    words = "--vocab-file v.json --merge-file m.txt --fim-data --fim-rate 0.25 --fim-prefix-token <P>"
    data = without_files(parse_arguments(f"{FLAGS} {words}".split())).data
    assert data == DataConfig(mock_data=True)
