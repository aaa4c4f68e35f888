"""Absurd sizes: each ends in one line at once, before anything of its size is made."""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults.campaign import Outcome, Settings

TRAIN = "pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1"
TRAIN += " --train-iters 10 --lr 1e-3 --mock-data --dry-run"
RANK = "-m megatron_terapipe.search rank MODEL CLUSTER --global-batch-size 64"
PREDICT = "-m megatron_terapipe.search predict MODEL CLUSTER --strategies STRATEGY"
PLAN = "-m deepspeed_ext.plan --schedule 1f1b"

PROMISED_S = 20.0
"""Time to the line, from the start of Python on; most of it is Python's, which imports."""

MEMORY = 8 << 30
"""Address space that a command may take; most of it is torch's, which uses little of it."""

GPT = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128}
LAYERS = [{"repeat": 10_000, "tokens": 8, "hidden_size": 8, "products": [{"inputs": 8, "outputs": 8}]}] * 1000
LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 10**9},
    **{"num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 256, "rms_norm_eps": 1e-5},
    **{"hidden_act": "silu"},
}


@dataclass(frozen=True)
class Size:
    """A size that nobody means."""

    command: str
    """What is run; capital letters stand for files."""
    words: str
    line: str
    """Part of the line that it ends in."""
    model: object = None
    """Contents of the model's file."""
    cluster: object = None
    """Contents of the cluster's file."""
    strategy: object = None
    """Contents of the strategy's file."""

    @property
    def fault(self) -> str:
        """The size in words."""
        name = self.command.split()[0 if self.command == TRAIN else 1].rpartition(".")[2]
        files = (self.model, self.cluster, self.strategy)
        return f"{name} {self.words or next(json.dumps(each)[:60] for each in files if each is not None)}"

    def argv(self, folder: Path) -> list[str]:
        """Write the files, and return the words behind `python`."""
        contents = {
            "MODEL": self.model or GPT,
            "CLUSTER": self.cluster or {"nodes": [{"device": "A100-80GB", "devices": 8}]},
            "STRATEGY": self.strategy or {},
        }
        words = [*self.command.split(), *self.words.split()]
        for name, content in contents.items():
            (folder / f"{name.lower()}.json").write_text(json.dumps(content))
        return [str(folder / f"{word.lower()}.json") if word in contents else word for word in words]


TRAINED = (
    Size(TRAIN, "--num-layers 100000000", "--num-layers 100000000 is more than 10,000: give 10,000 or less"),
    Size(TRAIN, "--num-layers 10000000000000", "--num-layers 10000000000000 is more than 10,000"),
    Size(TRAIN, "--seq-length 1000000000 --num-token-slices 100000000", "--num-token-slices 100000000 is more than"),
    Size(TRAIN, "--seq-length 100000 --num-token-slices 100000", "--num-token-slices 100000 is more than 16,384"),
    Size(TRAIN, "--num-token-slices 1000000 --token-slices balanced", "--num-token-slices 1000000 is more than"),
    Size(TRAIN, "--global-batch-size 2000000000000", "--global-batch-size 2000000000000 is more than 1,000,000,000"),
    Size(TRAIN, "--global-batch-size 1000000000", "make a step of 2,000,000,000 forwards and backwards"),
    Size(
        TRAIN,
        "--global-batch-size 200000 --pipeline-model-parallel-size 4 --num-token-slices 64 "
        "--pipeline-schedule zero-bubble",
        "make a step of 102,400,000 forwards and backwards, more than the 33,554,432 that can be planned",
    ),
    Size(TRAIN, "--hidden-size 1000000000000", "--hidden-size 1000000000000 is more than 1,000,000"),
    Size(TRAIN, "--vocab-size 1000000000000", "--vocab-size 1000000000000 is more than 100,000,000"),
    Size(TRAIN, "--micro-batch-size 1000000000000", "--micro-batch-size 1000000000000 is more than 1,000,000"),
    Size(TRAIN, f"--data-parallel-size {10**24}", f"--data-parallel-size {10**24} is more than 1,000,000"),
    Size(TRAIN, "--data-parallel-size 1000000 --pipeline-model-parallel-size 4", "4000000 ranks are more than"),
    Size(TRAIN, "--num-workers 1000000", "--num-workers 1000000 is more than 1,024"),
    Size(TRAIN, "--lr 1e10", "--lr 10000000000.0 is more than 100"),
    Size(TRAIN, f"--seed {'9' * 5000}", "is not a whole number"),
    Size(TRAIN, "--rampup-batch-size 1 1 10000000000000 --global-batch-size 1000000000", "rises in 999,999,999 incr"),
    Size(TRAIN, "--position-embedding-type rope --no-rope-freq ([1]*100000*100000)", "is no pattern of layers"),
    Size(TRAIN, "--model-preset MODEL", "makes no model: --num-layers 1000000000 is more than 10,000", model=LLAMA),
    Size(
        TRAIN,
        "--model-preset MODEL",
        "sets hidden_size to 1e+30, and it must be a whole number above 0",
        model=LLAMA | {"num_hidden_layers": 4, "hidden_size": 1e30},
    ),
    Size(
        TRAIN,
        "--seq-length 1000000000 --num-token-slices 16 --token-slices auto --pipeline-model-parallel-size 4",
        "lengths are found for sequences of 20,000,000 tokens and 512 token slices at most",
    ),
)
"""Sizes given to the trainer."""

SEARCHED = (
    Size(RANK, "--num-layers 10000000000000", "num_layers 10000000000000 is more than 10,000"),
    Size(RANK, "--global-batch-size 2000000000000", "--global-batch-size 2000000000000 is more than 1,000,000,000"),
    Size(RANK, "--data-parallel-size 20000000", "--data-parallel-size 20000000 is more than 1,000,000"),
    Size(RANK, "--num-token-slices 1000000000", "--num-token-slices 1000000000 is more than 16,384"),
    Size(RANK, "", "10000000 layers are more than 10,000", model={"seq_length": 8, "layers": LAYERS}),
    Size(RANK, "", "--num-layers 1000000000 is more than 10,000", model=LLAMA),
    Size(
        RANK,
        "",
        "has 102,400,000 devices, more than 1,000,000",
        cluster={"nodes": [{"device": "A100-80GB", "devices": 1024, "count": 100_000}]},
    ),
    Size(
        RANK,
        "",
        "is no bandwidth of any machine",
        cluster={"nodes": [{"device": "A100-80GB", "network": "1e290 GB/s"}]},
    ),
    Size(
        PREDICT, "", "data_parallel_size 20000000 is more than 1,000,000", strategy={"data_parallel_size": 20_000_000}
    ),
    Size(PREDICT, "", "num_token_slices 1000000000 is more than", strategy={"num_token_slices": 10**9}),
)
"""Sizes given to the search."""

PLANNED = (
    Size(PLAN, "--stages 1000000000 --micro-batches 1", "--stages 1000000000 is more than 10,000"),
    Size(
        PLAN, "--stages 2 --micro-batches 1 --token-slices 1000000000000", "--token-slices 1000000000000 is more than"
    ),
    Size(PLAN, "--stages 1000 --micro-batches 10000", "make a step of 20,000,000 forwards and backwards"),
)
"""Sizes given to the simulator of schedules."""


def campaign(settings: Settings) -> Iterator[Outcome]:
    """Yield an outcome for each size, given to the real command."""
    for size in (*TRAINED, *SEARCHED, *PLANNED)[:: 4 if settings.quick else 1]:
        yield _outcome(size, settings.folder)


def _outcome(size: Size, folder: Path) -> Outcome:
    start = time.monotonic()
    words = [sys.executable, *size.argv(folder)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, preexec_fn=_limit_memory)
    except subprocess.TimeoutExpired:
        return Outcome(fault=size.fault[:100], tried=1, broken=("still running after 60 s",))
    seconds = time.monotonic() - start
    said = [line for line in done.stderr.splitlines() if line.startswith("error:")] or done.stderr.splitlines()[-1:]
    broken = [] if done.returncode == 2 else [f"exit code {done.returncode}"]
    if len(said) != 1 or size.line not in said[0] or "Traceback" in done.stderr:
        broken.append("not the line that was promised")
    return Outcome(
        fault=size.fault[:100],
        tried=1,
        longest_s=seconds,
        promised_s=PROMISED_S,
        said=" ".join(said)[:300],
        broken=tuple(broken),
    )


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
