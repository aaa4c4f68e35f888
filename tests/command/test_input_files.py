"""No flag waits for ever for a file, or takes a file without a bound, whatever the file is."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from deepspeed_ext.plan import text_files
from megatron_terapipe.command.main import main, tree
from megatron_terapipe.data.subword_tokenizers import END_OF_DOCUMENT
from tests.command.test_json_flag import parsers_below
from tests.run_report.made_up import START, iteration

TRAIN = (
    "train --num-accelerators 2 --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --lr 1 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 2 --dry-run"
)
HOSTS = "llama2-7b {hosts} --device A100-80GB"
RANK = f"search rank {HOSTS} --global-batch-size 4"
PREPROCESS = "preprocess --input {corpus} --output-prefix out --tokenizer-type"
STAGES = f"{TRAIN} --mock-data --pipeline-model-parallel-size 2"

COMMANDS = (
    *(f"{TRAIN} --mock-data {flag} {{}}" for flag in ("--strategy", "--deepspeed-config", "--model-preset")),
    *(f"{TRAIN} --mock-data {flag} {{}}" for flag in ("--hostfile", "--heterogeneous-layers-config-path")),
    *(f"{TRAIN} {flag} {{}}" for flag in ("--data-args-path", "--per-split-data-args-path")),
    *(f"{STAGES} {flag} {{}}" for flag in ("--stage-partition", "--pipeline-schedule")),
    *(f"{STAGES} --token-slices auto {flag} {{}}" for flag in ("--cluster", "--op-profile", "--op-calibration")),
    *("report {}", "report {metrics} --search {}", "report {metrics} --timeline {}"),
    *("plan --schedule {}", "plan --timeline {}"),
    *(
        f"plan --schedule 1f1b --stages 2 --micro-batches 2 {flag} {{}}"
        for flag in ("--costs", "--seq-length 64 --token-bytes")
    ),
    *(f"search {each} {{}} {{hosts}} --global-batch-size 4" for each in ("rank", "trial")),
    *("search predict {} {hosts} --strategies {}", "search slices {} {hosts} --strategy {}", "search measure {}"),
    *("search rank llama2-7b {} --global-batch-size 4", f"{RANK} --explain {{}}"),
    *(f"{RANK} {flag} {{}}" for flag in ("--profile", "--calibrate", "--calibration")),
    *(f"search predict {HOSTS} --strategies {{}}", f"search slices {HOSTS} --strategy {{}}"),
    *("search validate --trials {}", "search validate --trials nowhere --trainers {}"),
    *("search measure llama2-7b --hostfile {}", "doctor --hostfile {}"),
    *("neox {}.yml", "generate --load nowhere --prompt-file {}"),
    f"{PREPROCESS} GPT2BPETokenizer --vocab-file {{}} --merge-file nowhere",
    f"{PREPROCESS} GPT2BPETokenizer --vocab-file {{vocabulary}} --merge-file {{}}",
    *(f"{PREPROCESS} {kind} --tokenizer-model {{}}" for kind in ("HuggingFaceTokenizer", "SentencePieceTokenizer")),
    f"{PREPROCESS} TikTokenizer --tiktoken-pattern v1 --tokenizer-model {{}}",
)
"""A command for each flag that takes a file; `{}` is the file."""

REASONS = (
    "it has no end after 0.02 s",
    "it has more than 536,870,912 bytes",
    "is not a file",
    "neither",
    "SentencePiece model",
)

OTHERS = {
    *("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"),  # data files, read by columns
    *("--save", "--metrics-file", "--report", "--json", "--output", "--svg", "--html", "--trace", "--write-schedule"),
    *("--propose-trials", "--save-calibration"),
    *("--input", "--trainer", "--program"),  # a corpus, read line by line, and scripts
}
"""Flags of files that are written, or that have rules of their own."""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text_files, "LONGEST_READ_S", 0.02)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe.yml").symlink_to("pipe")
    with open(tmp_path / "sparse", "wb") as sparse:
        sparse.truncate(text_files.MOST_BYTES + 1)
    (tmp_path / "sparse.yml").symlink_to("sparse")
    bytes_of_gpt2 = [*pre_tokenizers.ByteLevel.alphabet(), END_OF_DOCUMENT]
    made = {
        "hosts": "a slots=4\n",
        "corpus": '{"text": "a"}\n',
        "metrics": "".join(f"{json.dumps(each.as_json())}\n" for each in (START, iteration(1))),
        "vocabulary": json.dumps({each: number for number, each in enumerate(bytes_of_gpt2)}),
    }
    for name, text in made.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return {name: tmp_path / name for name in made}


@pytest.mark.parametrize("command", COMMANDS)
def test_files_that_cannot_be_read(command: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("pipe", "sparse"):
        assert main(command.format(*[name] * command.count("{}"), **files).split()) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and name in error, error
        assert any(reason in error for reason in REASONS), error


def test_every_flag_of_a_file_is_tried() -> None:
    tried = {word for command in COMMANDS for word in command.split()}
    missing = {
        f"{parser.prog}: {flag}"
        for parser in parsers_below(tree("terapipe"))
        for action in parser._actions
        for flag in action.option_strings
        if any(word in str(action.metavar) for word in ("FILE", "PATH", "S.json", "Y.json"))
        if flag == action.option_strings[0] and flag not in tried | OTHERS
    }
    assert not missing
