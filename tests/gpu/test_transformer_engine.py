"""megatron-core's layers with Transformer Engine's kernels, in bf16 and in FP8: token slices beside one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.architecture.sources import ROOT
from tests.end_to_end.launching import losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FLAGS = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --swiglu --normalization RMSNorm --disable-bias-linear"
    " --use-rotary-position-embeddings --untie-embeddings-and-output-weights --seq-length 128"
    " --max-position-embeddings 128 --mock-data --micro-batch-size 4 --global-batch-size 8 --train-iters 5 --lr 1e-3"
    " --bf16 --log-interval 1"
)


def test_token_slices_train_as_one_with_kernels_of_transformer_engine(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformer_engine")

    def trained(name: str, words: str) -> list[float]:
        metrics = tmp_path / f"{name}.jsonl"
        program = ROOT / "examples" / "pretrain_megatron_core.py"
        command = [sys.executable, program, *f"{FLAGS} {words} --metrics-file {metrics}".split()]
        subprocess.run(command, cwd=ROOT, check=True, timeout=300)
        return losses(metrics)

    whole, sliced = trained("whole", "--num-token-slices 1"), trained("sliced", "--num-token-slices 4")
    eight_bits = trained("eight-bits", "--num-token-slices 4 --fp8-format hybrid")
    assert sliced == pytest.approx(whole, rel=1e-2)
    assert eight_bits == pytest.approx(sliced, rel=5e-2)
    assert eight_bits != sliced
