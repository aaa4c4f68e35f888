"""Absurd sizes: each ends in one line at once, before anything of its size is made."""

import json
import os
from pathlib import Path

import pytest

import pretrain_gpt
from deepspeed_ext.plan.command import main as plan
from megatron_terapipe.search.__main__ import main as search

TRAIN = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1"
TRAIN += " --train-iters 10 --lr 1e-3 --mock-data --dry-run"
RANK = "rank MODEL CLUSTER --global-batch-size 64"
PREDICT = "predict MODEL CLUSTER --strategies STRATEGY"
PLAN = "--schedule 1f1b"
COMMANDS = {TRAIN: pretrain_gpt.main, RANK: search, PREDICT: search, PLAN: plan}

GPT = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128}
LAYERS = [{"repeat": 10_000, "tokens": 8, "hidden_size": 8, "products": [{"inputs": 8, "outputs": 8}]}] * 1000
LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 10**9},
    **{"num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 256, "rms_norm_eps": 1e-5},
    **{"hidden_act": "silu"},
}
NODE = {"device": "A100-80GB", "devices": 8}
FILES = {"MODEL": GPT, "CLUSTER": {"nodes": [NODE]}, "STRATEGY": {}}
"""Contents of the files in the words of a command."""

ALONE = (
    *("--num-layers 100000000", "--num-layers 10000000000000", "--hidden-size 1000000000000"),
    *("--vocab-size 1000000000000", "--micro-batch-size 1000000000000", "--num-workers 1000000"),
    *("--global-batch-size 2000000000000", f"--data-parallel-size {10**24}"),
)
"""Flags of the trainer that are named in the line with their value."""

SIZES: list[tuple[str, str, str, dict[str, object]]] = [
    *((TRAIN, words, words, {}) for words in ALONE),
    # Command, more words, a part of the line, contents of files.
    (TRAIN, "--seq-length 1000000000 --num-token-slices 100000000", "--num-token-slices 100000000", {}),
    (TRAIN, "--seq-length 100000 --num-token-slices 100000", "--num-token-slices 100000", {}),
    (TRAIN, "--num-token-slices 1000000 --token-slices balanced", "--num-token-slices 1000000", {}),
    (TRAIN, "--global-batch-size 1000000000", "2,000,000,000 forwards", {}),
    (
        TRAIN,
        "--global-batch-size 200000 --pipeline-model-parallel-size 4 --num-token-slices 64 "
        "--pipeline-schedule zero-bubble",
        "102,400,000 forwards",
        {},
    ),
    (TRAIN, "--data-parallel-size 1000000 --pipeline-model-parallel-size 4", "4000000 ranks", {}),
    (TRAIN, "--distributed-timeout-minutes 1e-9", "give 0.1 or more", {}),
    (TRAIN, "--lr 1e10", "--lr 10000000000.0", {}),
    (TRAIN, f"--seed {'9' * 5000}", "--seed", {}),
    *(
        (TRAIN, f"--{flag} {'x' * 300}", "is longer than the name of a file may be", {})
        for flag in ("load", "metrics-file")
    ),
    (TRAIN, f"--model-preset {'x' * 300}", "is not known", {}),
    (TRAIN, "--rampup-batch-size 1 1 10000000000000 --global-batch-size 1000000000", "999,999,999", {}),
    (TRAIN, "--eval-global-batch-size 1000000000", "forwards", {}),
    (TRAIN, "--position-embedding-type rope --no-rope-freq ([1]*100000*100000)", "--no-rope-freq", {}),
    (TRAIN, "--model-preset MODEL", "num_hidden_layers to 1000000000", {"MODEL": LLAMA}),
    (
        TRAIN,
        "--model-preset MODEL",
        "hidden_size to 1e+30",
        {"MODEL": LLAMA | {"num_hidden_layers": 4, "hidden_size": 1e30}},
    ),
    (
        TRAIN,
        "--seq-length 1000000000 --num-token-slices 16 --token-slices auto --pipeline-model-parallel-size 4",
        "20,000,000 tokens",
        {},
    ),
    (RANK, "--num-layers 10000000000000", "num_layers 10000000000000", {}),
    (RANK, "--global-batch-size 2000000000000", "--global-batch-size: 2000000000000", {}),
    (RANK, "--data-parallel-size 20000000", "--data-parallel-size 20000000", {}),
    (RANK, "--num-token-slices 1000000000", "--num-token-slices 1000000000", {}),
    (RANK, "", "10000000 layers", {"MODEL": {"seq_length": 8, "layers": LAYERS}}),
    (RANK, "", "num_hidden_layers to 1000000000", {"MODEL": LLAMA}),
    (RANK, "", "102,400,000 devices", {"CLUSTER": {"nodes": [NODE | {"devices": 1024, "count": 100_000}]}}),
    (RANK, "", "bandwidth", {"CLUSTER": {"nodes": [{"device": "A100-80GB", "network": "1e290 GB/s"}]}}),
    (PREDICT, "", "data_parallel_size 20000000", {"STRATEGY": {"data_parallel_size": 20_000_000}}),
    (PREDICT, "", "num_token_slices 1000000000", {"STRATEGY": {"num_token_slices": 10**9}}),
    (PLAN, "--stages 1000000000 --micro-batches 1", "--stages 1000000000", {}),
    (PLAN, "--stages 2 --micro-batches 1 --token-slices 1000000000000", "--token-slices 1000000000000", {}),
    (PLAN, "--stages 1000 --micro-batches 10000", "20,000,000 forwards", {}),
]


@pytest.mark.parametrize(
    ("command", "words", "part", "files"), SIZES, ids=[f"{words[:40]}-{part[:25]}" for _, words, part, _ in SIZES]
)
def test_an_absurd_size_is_one_line(
    command: str,
    words: str,
    part: str,
    files: dict[str, object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name, content in (FILES | files).items():
        (tmp_path / f"{name.lower()}.json").write_text(json.dumps(content))
    given = f"{command} {words}".split()
    code = COMMANDS[command]([str(tmp_path / f"{word.lower()}.json") if word in FILES else word for word in given])
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert code == 2 and len(lines) == 1
    assert lines[0].startswith("error: ") and part in lines[0]
