"""`terapipe generate`: its output, and its refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_terapipe.data.tokenizer import ByteTokenizer
from megatron_terapipe.generate import main
from megatron_terapipe.inference import WholeModel, generate
from tests.inference.checkpoints import MODEL, checkpoint_info, write_checkpoint, write_info

PROMPT = "caf\N{LATIN SMALL LETTER E WITH ACUTE}"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(folder)
    return folder


def test_it_prints_the_prompt_and_the_text_of_the_new_tokens(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes that make up no character come out as one replacement character each, however they arrive."""
    assert main(["--load", str(checkpoints), "--prompt", PROMPT, "--max-new-tokens", "30", "--seed", "3"]) == 0
    tokenizer = ByteTokenizer()
    prompt = tokenizer.encode(PROMPT)
    tokens = list(generate(WholeModel(MODEL), prompt, 30, max_positions=40, vocab_size=257, eod=tokenizer.eod, seed=3))
    assert capsys.readouterr().out == PROMPT + tokenizer.decode(tokens) + "\n"
    words = ["--prompt", PROMPT, "--max-new-tokens", "30", "--seed", "3", "--json"]
    assert main(["--load", str(checkpoints), *words]) == 0
    answer = {"prompt": PROMPT, "continuation": tokenizer.decode(tokens)}
    assert json.loads(capsys.readouterr().out) == answer
    assert main(["--load", str(checkpoints), *words, str(checkpoints / "answer.json")]) == 0
    assert capsys.readouterr().out == PROMPT + tokenizer.decode(tokens) + "\n"
    assert json.loads((checkpoints / "answer.json").read_text()) == answer


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--prompt=", "the prompt is empty: "),
        (
            f"--prompt {'a' * 30} --max-new-tokens 11",
            "40 positions of the model: shorten the prompt, or ask for 10 new tokens or fewer",
        ),
        (f"--prompt {'a' * 41}", "41 tokens of prompt and 1 new are more than the 40 positions"),
        ("--prompt a --max-new-tokens 0", "--max-new-tokens 0"),
        ("--prompt a --temperature -1", "--temperature -1"),
        ("--prompt a --temperature nan", "--temperature nan"),
        ("--prompt a --temperature inf", "--temperature inf"),
        ("--prompt a --top-k -2", "--top-k -2"),
        ("--prompt a --top-p 0", "--top-p 0.0"),
        ("--prompt-file nowhere", "--prompt-file nowhere cannot be read"),
        ("--prompt a --load-tag global_step6", "there is no checkpoint global_step6 in"),
        ("--prompt a --load missing", "--load missing holds no checkpoint: "),
        ("--prompt a --load tests", "--load tests holds no checkpoint: "),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    checkpoints: Path, capsys: pytest.CaptureFixture[str], options: str, part: str
) -> None:
    assert main(["--load", str(checkpoints), *options.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and part in captured.err
    assert captured.err.count("\n") == 1


def test_the_prompt_may_be_a_file(tmp_path: Path, checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt").write_text(PROMPT, encoding="utf-8")
    found = []
    for prompt in (["--prompt", PROMPT], ["--prompt-file", str(tmp_path / "prompt")]):
        assert main(["--load", str(checkpoints), *prompt, "--max-new-tokens", "5", "--load-tag", "global_step5"]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]


def test_the_tokenizer_may_be_named(tmp_path: Path, checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a checkpoint without one, as one converted from a directory without."""
    write_info(replace(checkpoint_info(), tokenizer={}), write_checkpoint(tmp_path))
    assert main(["--load", str(tmp_path), "--prompt", "a"]) == 2
    assert "global_step5 has no tokenizer: add --tokenizer-type and its files\n" in capsys.readouterr().err
    found = []
    for words in (["--load", str(checkpoints)], ["--load", str(tmp_path), "--tokenizer-type", "byte"]):
        assert main([*words, "--prompt", PROMPT, "--max-new-tokens", "5", "--temperature", "0"]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]
    assert main(["--load", str(tmp_path), "--prompt", "a", "--tokenizer-type", "GPT2BPETokenizer"]) == 2
    assert capsys.readouterr().err.startswith("error: GPT2BPETokenizer needs --vocab-file: add it")
