"""Does continued pretraining learn what a plain loop over transformers learns? The same folder, samples and AdamW.

    python -m benchmarks.continued_pretraining --output runs/continued [--folder FOLDER] [--seq-length 64]

    ours    `pretrain_gpt.py --load FOLDER` on two stages, with four token slices
    theirs  a loop over the model of transformers, in one process

The text is the State of the Union addresses, byte by byte. Without --folder a Llama with the rotations of 3.1 and
100 M parameters is drawn at random. Ends with the largest difference of a loss.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.convergence import curve, prepare, samples
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import Config

LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}
TRAINING = (
    "--micro-batch-size 2 --global-batch-size 2 --lr 1e-4 --lr-decay-style constant"
    " --weight-decay 0.1 --clip-grad 1.0 --zero-stage 0 --split 100,0,0 --tokenizer-type byte --log-interval 5"
    " --pipeline-model-parallel-size 2 --num-token-slices 4"
)


def draw_model(folder: Path) -> None:
    """Write a random model of real size, once."""
    if (folder / "config.json").exists():
        return
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)


def losses_of_transformers(config: Config, folder: Path) -> Iterator[float]:
    """Yield the loss of each iteration of a plain loop."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = adamw(model, config)
    micro_batches = samples(config, "train", config.training.train_iters)
    per_step = config.num_micro_batches(1)
    for _ in range(config.training.train_iters):
        optimizer.zero_grad()
        losses = [_backward(model, *each, per_step) for each in islice(micro_batches, per_step)]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
        optimizer.step()
        yield sum(losses)


def adamw(model: torch.nn.Module, config: Config) -> torch.optim.AdamW:
    """Return the trainer's rule of the update: no decay of vectors."""
    settings = config.optimizer
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
    )


def _backward(model: Any, tokens: Tensor, labels: Tensor, per_step: int) -> float:
    loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten()) / per_step
    loss.backward()
    return loss.item()


def train_ours(words: Sequence[str], metrics: Path) -> dict[int, float]:
    """Return the loss of each iteration of the trainer."""
    metrics.unlink(missing_ok=True)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run(["deepspeed", "--num_accelerators", "2", "pretrain_gpt.py", *words], check=True, env=environment)
    return curve(metrics, "lm_loss")


def main(argv: Sequence[str] | None = None) -> None:
    """Draw, train both, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/continued"))
    parser.add_argument("--folder", type=Path, help="model to continue (default: a random one)")
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=50)
    options = parser.parse_args(argv)
    prepare(options.output)
    folder = options.folder or options.output / "model"
    draw_model(folder)
    metrics = options.output / "ours.jsonl"
    data = f"--data-path {options.output}/speeches_text_document --train-iters {options.iterations}"
    words = f"{TRAINING} --seq-length {options.seq_length} {data} --load {folder} --metrics-file {metrics}".split()
    theirs = dict(enumerate(losses_of_transformers(parse_arguments(words), folder), start=1))
    (options.output / "theirs.json").write_text(json.dumps(theirs))
    ours = train_ours(words, metrics)
    print(f"{'iteration':>9} {'theirs':>10} {'ours':>10} {'difference':>11}")
    for iteration, loss in theirs.items():
        if iteration in (1, 2, 5) or iteration % 10 == 0:
            print(f"{iteration:>9} {loss:>10.6f} {ours[iteration]:>10.6f} {abs(ours[iteration] - loss):>11.1e}")
    print(f"largest difference: {max(abs(ours[iteration] - loss) for iteration, loss in theirs.items()):.1e}")


if __name__ == "__main__":
    main()
