"""`terapipe generate` from a folder of Hugging Face."""

from pathlib import Path

import pytest
import torch

from megatron_terapipe.generate import main
from tests.huggingface.tiny import tiny_model

PROMPT = "9 4 55 20"


@pytest.mark.parametrize("name", ["gemma2", "glm4_moe", "qwen3_next"])
def test_the_likeliest_tokens_are_those_of_transformers(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tiny_model(name).eval()
    theirs.save_pretrained(tmp_path)
    tokens = torch.tensor([[int(word) for word in PROMPT.split()]])
    with torch.no_grad():
        for _ in range(12):
            tokens = torch.cat([tokens, theirs(tokens).logits[:, -1:].argmax(-1)], dim=1)
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(theirs.config.vocab_size)]
    greedy = ["--max-new-tokens", "12", "--temperature", "0"]
    assert main(["--load", str(tmp_path), "--prompt", PROMPT, *greedy, *tokenizer]) == 0
    found = capsys.readouterr().out.splitlines()[-1].split()
    assert [int(word) for word in found] == tokens[0].tolist()


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    for more, said in (
        ([], f"error: --load {tmp_path} has no tokenizer: add --tokenizer-type and its files\n"),
        (
            ["--load-tag", "global_step5"],
            f"names a checkpoint, and --load {tmp_path} is a model of Hugging Face: drop it\n",
        ),
    ):
        assert main(["--load", str(tmp_path), "--prompt", PROMPT, *more]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.endswith(said)
