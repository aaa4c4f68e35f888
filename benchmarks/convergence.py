"""Losses beside a plain loop: trained from the start, and continued from a folder of Hugging Face.

Do token slices change the training? Three trainings from the same weights on the same samples.

    python -m benchmarks.convergence --output runs/convergence [--only sliced]

    sliced    the trainer, two stages, four balanced token slices
    unsliced  the trainer, two stages, no cut
    plain     a loop in plain torch over a model in plain torch (benchmarks/measuring/plain_llama.py), one process

The text is the State of the Union addresses (12 MB), byte by byte. Ends with a table and curves.

Is continued pretraining equal to a plain loop over transformers? The same folder, samples and AdamW.

    python -m benchmarks.convergence continued --output runs/continued [--folder FOLDER] [--seq-length 64]
        [--expert-ranks 2]

    ours    `pretrain_gpt.py --load FOLDER` on two stages, with four token slices
    theirs  a loop over the model of transformers, in one process

The text is the State of the Union addresses, byte by byte. Without --folder a Llama with the rotations of 3.1 and
100 M parameters is drawn at random. Ends with the largest difference of a loss.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measuring.command import Parser, run_named
from benchmarks.measuring.plain_llama import PlainLlama, mean_loss, train_step
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import Config
from megatron_terapipe.data.datasets import build_datasets
from megatron_terapipe.inference import WholeModel
from megatron_terapipe.training.optimizer import LearningRateSchedule

MODEL = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --num-key-value-heads 4 --seq-length 512 --swiglu"
    " --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear"
    " --untie-embeddings-and-output-weights --init-method-std 0.05 --vocab-size 257"
)
"""A Llama of 6.1 M parameters."""
TRAINING = (
    "--micro-batch-size 2 --global-batch-size 4 --lr 1.5e-3 --min-lr 1.5e-4 --lr-decay-style cosine"
    " --lr-warmup-iters 40 --weight-decay 0.1 --adam-beta2 0.95 --zero-stage 0 --split 97,3,0"
    " --eval-iters 15 --log-interval 20"
)
RUNS = {
    "sliced": "--pipeline-model-parallel-size 2 --num-token-slices 4 --token-slices balanced",
    "unsliced": "--pipeline-model-parallel-size 2",
    "plain": "",
}


def flags(name: str, output: Path, iterations: int) -> list[str]:
    """Return the trainer's flags of a run."""
    metrics = output / f"{name}.jsonl"
    counted = f"--train-iters {iterations} --eval-interval {max(1, iterations // 12)} --metrics-file {metrics}"
    return f"{MODEL} {TRAINING} {RUNS[name]} {counted} --data-path {output}/speeches_text_document".split()


def prepare(output: Path) -> None:
    """Write the corpus and its tokens, once."""
    if (output / "speeches_text_document.idx").exists():
        return
    output.mkdir(parents=True, exist_ok=True)
    module = [sys.executable, "-m"]
    speeches = str(output / "speeches.jsonl")
    subprocess.run([*module, "examples.speeches", "--output", speeches], check=True)
    prefix = ["--output-prefix", str(output / "speeches"), "--tokenizer-type", "byte", "--append-eod"]
    subprocess.run([*module, "megatron_terapipe.data.preprocess", "--input", speeches, *prefix], check=True)


def samples(config: Config, part: str, iterations: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the micro-batches that the trainer reads, in its order: tokens and labels, each [rows, tokens]."""
    count = iterations * (config.batch.global_batch_size or 1)
    wanted = (count, 0, 0) if part == "train" else (0, count, 0)
    built = build_datasets(
        config.data, seq_length=config.model.seq_length, num_samples=wanted, seed=config.training.seed
    )
    dataset, rows = getattr(built, part), config.batch.micro_batch_size
    for first in range(0, count, rows):
        ids = torch.from_numpy(np.stack([dataset[number] for number in range(first, first + rows)]))
        yield ids[:, :-1], ids[:, 1:]


def train_plain(config: Config, metrics: Path) -> None:
    """Train with the loop in plain torch."""
    iterations = config.training.train_iters
    model = PlainLlama(config.model).start_as(WholeModel(config.model, config.training.seed), config.model)
    optimizer = adamw(model, config)
    rates = LearningRateSchedule.from_config(
        config.optimizer,
        config.training,
        global_batch_size=config.batch.global_batch_size or 1,
        seq_length=config.model.seq_length,
    )
    micro_batches = samples(config, "train", iterations)
    per_step = config.num_micro_batches(1)
    with metrics.open("w") as file:
        for iteration in range(1, iterations + 1):
            for group in optimizer.param_groups:
                group["lr"] = rates.at(iteration - 1)
            loss = train_step(model, optimizer, micro_batches, per_step)
            print(json.dumps({"iteration": iteration, "lm_loss": loss}), file=file, flush=True)
            if iteration % config.logging.eval_interval == 0 or iteration == iterations:
                with torch.no_grad():
                    validation = samples(config, "valid", config.logging.eval_iters)
                    value = fmean(mean_loss(model, *part).item() for part in validation)
                print(json.dumps({"iteration": iteration, "validation_lm_loss": value}), file=file, flush=True)
                print(f"plain: iteration {iteration}, loss {loss:.4f}, validation {value:.4f}", flush=True)


def curve(metrics: Path, key: str) -> dict[int, float]:
    """Values of a metrics file, by iteration."""
    lines = (json.loads(line) for line in metrics.read_text().splitlines())
    return {line["iteration"]: line[key] for line in lines if key in line}


def report(output: Path) -> None:
    """Print the validation losses side by side, and draw the curves."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    found = {name: output / f"{name}.jsonl" for name in RUNS if (output / f"{name}.jsonl").exists()}
    validation = {name: curve(path, "validation_lm_loss") for name, path in found.items()}
    print(f"{'iteration':>9} " + " ".join(f"{name:>9}" for name in found))
    for iteration in sorted(set.intersection(*(set(each) for each in validation.values()))):
        print(f"{iteration:>9} " + " ".join(f"{each[iteration]:>9.4f}" for each in validation.values()))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, path in found.items():
        losses = curve(path, "lm_loss")
        values = [fmean(list(losses.values())[max(0, at - 9) : at + 1]) for at in range(len(losses))]
        left.plot(list(losses), values, label=name, linewidth=1)
        right.plot(list(validation[name]), list(validation[name].values()), "o-", label=name, markersize=3, linewidth=1)
    for axes, title in ((left, "training loss, mean of 10"), (right, "validation loss")):
        axes.set(title=title, xlabel="iteration", ylabel="nats per byte")
        axes.legend()
    figure.savefig(output / "convergence.svg")
    print(f"wrote {output}/convergence.svg")


def from_scratch(argv: Sequence[str] | None = None) -> None:
    """Prepare, train, report."""
    parser = Parser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--only", choices=RUNS, action="append", help="train this one (may be repeated)")
    options = parser.parse_args(argv)
    prepare(options.output)
    for name in options.only or RUNS:
        words = flags(name, options.output, options.iterations)
        if name == "plain":
            train_plain(parse_arguments(words), options.output / "plain.jsonl")
        else:
            train_ours(words, options.output / f"{name}.jsonl")
    report(options.output)


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
CONTINUED_TRAINING = (
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


def train_ours(words: Sequence[str], metrics: Path, ranks: int = 2) -> dict[int, float]:
    """Return the loss of each iteration of the trainer."""
    metrics.unlink(missing_ok=True)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run(
        ["deepspeed", "--num_accelerators", str(ranks), "pretrain_gpt.py", *words], check=True, env=environment
    )
    return curve(metrics, "lm_loss")


def continued(argv: Sequence[str] | None = None) -> None:
    """Draw, train both, compare."""
    parser = Parser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/continued"))
    parser.add_argument("--folder", type=Path, help="model to continue (default: a random one)")
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--expert-ranks", type=int, choices=(1, 2), default=1, help="replicas that share the experts")
    options = parser.parse_args(argv)
    prepare(options.output)
    folder = options.folder or options.output / "model"
    draw_model(folder)
    metrics = options.output / "ours.jsonl"
    data = f"--data-path {options.output}/speeches_text_document --train-iters {options.iterations}"
    given = f"--seq-length {options.seq_length} {data} --load {folder} --metrics-file {metrics}"
    words = f"{CONTINUED_TRAINING} {given}".split()
    if options.expert_ranks > 1:
        words += ["--expert-model-parallel-size", "2", "--micro-batch-size", "1"]
    theirs = dict(enumerate(losses_of_transformers(parse_arguments(words), folder), start=1))
    (options.output / "theirs.json").write_text(json.dumps(theirs))
    ours = train_ours(words, metrics, 2 * options.expert_ranks)
    print(f"{'iteration':>9} {'theirs':>10} {'ours':>10} {'difference':>11}")
    for iteration, loss in theirs.items():
        if iteration in (1, 2, 5) or iteration % 10 == 0:
            print(f"{iteration:>9} {loss:>10.6f} {ours[iteration]:>10.6f} {abs(ours[iteration] - loss):>11.1e}")
    print(f"largest difference: {max(abs(ours[iteration] - loss) for iteration, loss in theirs.items()):.1e}")


def main(argv: Sequence[str] | None = None) -> object:
    """Run the named measurement, by default the first."""
    return run_named({"scratch": from_scratch, "continued": continued}, argv)


if __name__ == "__main__":
    main()
