"""Checkpoints that megatron-core writes are continued as there, in any layout: losses, gradient norms, iteration."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_terapipe import convert
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.checkpoint import megatron_files
from megatron_terapipe.checkpoint.megatron_files import NamedWeights, Whole
from megatron_terapipe.checkpoint.megatron_model import MEGATRON, megatron_info
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.huggingface.families.settings import SettingsFile
from megatron_terapipe.training.build_engine import build_engine
from megatron_terapipe.training.optimizer import LearningRateSchedule, set_step_sizes
from tests.checkpoint.megatron_files import (
    AFTER,
    BEFORE,
    MICRO,
    MODELS,
    ROWS,
    SEQ,
    VOCAB,
    Case,
    MegatronModel,
    arguments,
    read_checkpoints,
    samples,
    write_checkpoints,
)
from tests.distributed import run_each
from tests.inference.checkpoints import MODEL
from tests.training.prepared import prepared_run

pytest.importorskip("megatron")

RUN = (
    f"--use-checkpoint-args --seq-length {SEQ} --vocab-size {VOCAB} --tokenizer-type NullTokenizer --data-path unread"
    f" --micro-batch-size {MICRO} --global-batch-size {ROWS} --train-iters 10 --lr 1e-2 --min-lr 1e-3"
    " --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --adam-beta2 0.95 --adam-eps 1e-3 --clip-grad 1"
)
SLICED = "--pipeline-model-parallel-size 2 --token-slices 7,4,3,2"
CASES = {
    "A, torch, tp 2, pp 2": (Case(MODELS["A"], "torch", tensor=2, pipeline=2), SLICED),
    "A, torch, chunks, names of Transformer Engine": (
        Case(MODELS["A-rope"], "torch", pipeline=2, virtual=2, transformer_engine=True),
        "--tensor-model-parallel-size 2",
    ),
    "B, torch, tp 2": (Case(MODELS["B"], "torch", tensor=2), SLICED),
    "B, torch_dist, bf16": (
        Case(MODELS["B"], "torch_dist", pipeline=2, bf16=True),
        "--bf16 --tensor-model-parallel-size 2",
    ),
    "A, torch, bf16": (Case(MODELS["A"], "torch", tensor=2, bf16=True), f"--bf16 {SLICED}"),
    "B, torch_dist, distributed optimizer": (
        Case(MODELS["B"], "torch_dist", tensor=2, bf16=True, distributed_optimizer="fully_reshardable"),
        f"--bf16 {SLICED}",
    ),
    "E, torch_dist": (Case(MODELS["E"], "torch_dist", pipeline=2), f"{SLICED} --moe-router-load-balancing-type none"),
    "E, torch_dist, shared": (
        Case(MODELS["E-shared"], "torch_dist"),
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
        " --moe-token-dispatcher-type alltoall",
    ),
    "L, torch": (Case(MODELS["L"], "torch", tensor=2, pipeline=2), f"{SLICED} --latent-kept latent"),
    "L, torch_dist": (Case(MODELS["L"], "torch_dist"), "--tensor-model-parallel-size 2"),
    "L, torch_dist, experts": (
        Case(MODELS["L-experts"], "torch_dist", pipeline=2),
        f"{SLICED} --moe-router-load-balancing-type none --mtp-loss-scaling-factor 0.3",
    ),
    "S, torch_dist": (Case(MODELS["S"], "torch_dist"), f"{SLICED} --moe-router-load-balancing-type none"),
}
CONVERTED = ("A, torch, tp 2, pp 2", "B, torch_dist, bf16", "E, torch_dist")
"""Cases that are also converted, so that they are continued from checkpoints of ours."""


LATENT = (
    f"--num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --kv-channels 8 --vocab-size {VOCAB}"
    f" --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --seq-length {SEQ}"
    " --untie-embeddings-and-output-weights --mtp-num-layers 1 --make-vocab-size-divisible-by 8 --micro-batch-size 1"
    " --multi-latent-attention --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --lr 1"
    " --mscale 0.5 --mscale-all-dim 0.7 --train-iters 1 --data-path unread --tokenizer-type NullTokenizer"
)


def test_runs_continue_as_megatron_does(tmp_path: Path) -> None:
    folders = {name: tmp_path / str(number) for number, name in enumerate(CASES)}
    expected = write_checkpoints({folders[name]: case for name, (case, _) in CASES.items()})
    loads = [(name, folders[name]) for name in CASES]
    for name in CONVERTED:
        output = tmp_path / f"{folders[name].name}-converted"
        assert convert.main(["from-megatron", "--load", str(folders[name]), "--output", str(output)]) == 0
        loads.append((name, output))
    runs = [f"{RUN} {CASES[name][1]} --load {load}" for name, load in loads]
    for (name, _), (_, found) in zip(loads, run_each(continued, 2, runs), strict=True):
        there, case = expected[folders[name]], CASES[name][0]
        # megatron-core does not sum the gradients of latents over tensor-parallel ranks (NVIDIA/Megatron-LM #1699).
        alike = AFTER if case.tensor == 1 or not case.model.multi_latent_attention else 0
        exact = "bf16" not in CASES[name][1]
        assert found["iteration"] == BEFORE and found["samples"] == BEFORE * ROWS
        losses, norms = there.losses[: alike + 1], there.gradient_norms[:alike]
        assert found["losses"][: alike + 1] == pytest.approx(losses, rel=1e-6 if exact else 4e-3), name
        assert found["norms"][:alike] == pytest.approx(norms, rel=1e-5 if exact else 4e-2), name


def continued(words: str) -> dict[str, Any]:
    """On every rank: the updates after the checkpoint of a run."""
    run = prepared_run(parse_arguments(words.split()))
    engine = build_engine(run)
    config = run.config
    rates = LearningRateSchedule.from_config(config.optimizer, config.training, global_batch_size=ROWS, seq_length=SEQ)
    start = engine.global_steps
    losses, norms = [], []
    for step in range(start, start + AFTER):
        rate = rates.at(step)
        set_step_sizes(engine.optimizer, learning_rate=rate, of_ends=rate, weight_decay=config.optimizer.weight_decay)
        rows = (
            MicroBatch(tokens=each[:, :-1], labels=each[:, 1:], loss_mask=torch.ones(MICRO, SEQ))
            for each in samples(step).split(MICRO)
        )
        losses.append(engine.train_batch(rows).flatten()[0].item())
        norms.append(float(engine.get_global_grad_norm()))
    return {"iteration": start, "samples": engine.global_samples - AFTER * ROWS, "losses": losses, "norms": norms}


def test_a_schedule_of_megatron_is_compared_with_that_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir()
    torch.save({"args": arguments(Case(MODELS["A"], "torch")), "iteration": BEFORE}, file)
    run = {"lr": 2e-2, "lr_decay_style": "cosine", "lr_decay_iters": 10, "lr_warmup_iters": 3, "weight_decay": 0.1}
    assert megatron_info(tmp_path).changed_schedule(run) == "--lr 0.01 (now 0.02)"


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        (MODELS["L"], "--qk-layernorm --q-lora-rank 20 --rotary-scaling-factor 40"),
        (replace(MODELS["L"], rotary_scaling_factor=1.0, q_lora_rank=None, qk_layernorm=False), ""),
        (replace(MODELS["L"], rotary_scaling_factor=1.0, rope_type="yarn"), "--qk-layernorm --q-lora-rank 20"),
    ],
)
def test_flags_of_latent_attention_are_the_model_of_its_checkpoint(model: MegatronModel, flags: str) -> None:
    found = MEGATRON.read(SettingsFile(vars(arguments(Case(model, "torch_dist"))), "a checkpoint"))
    words = f"{LATENT} {flags} --rope-type {model.rope_type}" if model.rope_type else f"{LATENT} {flags}"
    run = parse_arguments(words.split()).model
    assert run == replace(found, mtp_loss_scaling_factor=run.mtp_loss_scaling_factor)


def test_megatron_loads_the_weights_of_a_run_for_any_layout(tmp_path: Path) -> None:
    written = {tmp_path / f"{name}-theirs": Case(MODELS[name], "torch_dist", without_optimizer=True) for name in "ABL"}
    expected = write_checkpoints(written)
    read = {}
    for folder, case in written.items():
        ours, back = tmp_path / f"{folder.name}-ours", tmp_path / f"{folder.name}-back"
        assert convert.main(["from-megatron", "--load", str(folder), "--output", str(ours)]) == 0
        assert convert.main(["to-megatron", "--load", str(ours), "--output", str(back)]) == 0
        read[back] = replace(case, tensor=2)
    found = read_checkpoints(read)
    for folder, back in zip(written, read, strict=True):
        torch.testing.assert_close(found[back].logits, expected[folder].logits, rtol=1e-6, atol=2e-6)


def test_matrices_to_latents_are_cut_or_whole_on_every_rank() -> None:
    """The former in megatron-core's own layers, the latter in Transformer Engine's."""
    weight, name = torch.arange(24.0).view(6, 4), "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
    for parts in (weight.split(3), (weight, weight)):
        assert megatron_files._joined(name, parts, False, {"linear_kv_down_proj": 6}).read().equal(weight)


def test_weights_by_the_names_of_layers_of_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of local layers and of Transformer Engine's: norms, experts, and words of another padding."""
    experts, norm, words = torch.arange(24.0).view(4, 3, 2), torch.arange(3.0), torch.arange(10.0).view(5, 2)
    tensors = {
        name: Whole(tuple(tensor.shape), [([0] * tensor.dim(), tensor.clone)])
        for name, tensor in {
            "decoder.layers.1.mlp.experts.experts.linear_fc1.weight": experts,
            "decoder.layers.0.input_layernorm.weight": norm,
            "embedding.word_embeddings.weight": words,
        }.items()
    }
    monkeypatch.setattr(megatron_files, "MegatronFiles", lambda _: SimpleNamespace(weights=tensors, states={}))
    found = NamedWeights(Path("there"), replace(MODEL, vocab_size=5, make_vocab_size_divisible_by=4)).weight
    for name in ("local_experts.2.linear_fc1.weight", "linear_fc1.weight2"):
        assert found(f"decoder.layers.1.mlp.experts.{name}").equal(experts[2])
    for name in ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"):
        assert found(f"decoder.layers.0.{name}").equal(norm)
    assert found("embedding.word_embeddings.weight").tolist() == [*words.tolist(), *[[0.0, 0.0]] * 3]
    with pytest.raises(CheckpointError, match=r"there of Megatron-LM lacks decoder\.layers\.7\.norm: load"):
        found("decoder.layers.7.norm")
