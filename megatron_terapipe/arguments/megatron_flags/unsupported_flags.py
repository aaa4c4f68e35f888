"""Flags of Megatron-LM, Megatron-DeepSpeed and their relatives that ask for what this trainer does not have.

Each defines the model, or what it is trained on. Without it another model would be trained, so the line that ends the
run never says to drop it.
"""

from collections.abc import Mapping
from types import MappingProxyType

from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED as MODEL
from megatron_terapipe.errors import TRAINING_CANNOT_BE_RUN as TRAINING


def _each(names: str, reason: str, end: str) -> dict[str, str]:
    return {f"--{name}": f"{reason}: {end}" for name in names.split()}


_MODELS: Mapping[str, str] = {
    **_each(
        "is-hybrid-model hybrid-override-pattern hybrid-layer-pattern mamba-state-dim mamba-head-dim mamba-num-groups"
        " mamba-num-heads disable-mamba-mem-eff-path",
        "Mamba layers are not in this trainer",
        MODEL,
    ),
    **_each(
        "experimental-attention-variant attention-output-gate qk-clip qk-clip-alpha qk-clip-threshold"
        " dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk dsa-indexer-loss-coeff"
        " dsa-indexer-use-sparse-loss linear-attention-freq linear-attention-type linear-conv-kernel-dim"
        " linear-key-head-dim linear-value-head-dim linear-num-key-heads linear-num-value-heads",
        "attention is that of the transformer, without gates, indexers or recurrence",
        MODEL,
    ),
    **_each("qk-l2-norm", "norms on queries and keys have weights", MODEL),
    **_each("quick-geglu", "a gate with the quick form of GELU is not in this trainer", MODEL),
    **_each("glu-activation", "of the gated activations only those of --activation are in this trainer", MODEL),
    **_each("mrope-section", "positions are those of text, in one dimension", MODEL),
    **_each("multi-latent-attention softmax-type", "attention is plain and causal", MODEL),
    **_each(
        "apply-residual-connection-post-layernorm embed-layernorm",
        "no norm follows the embedding, and residuals are added as they come",
        MODEL,
    ),
    **_each(
        "mup use-mup mup-base-hidden-size mup-embedding-mult mup-output-mult mup-base-head-dim mup-width-mult",
        "widths have no multipliers (muP)",
        MODEL,
    ),
    **_each("decoder-num-layers decoder-seq-length", "encoder-decoder models are out of scope", MODEL),
    **_each("pipeline-model-parallel-split-rank", "encoder-decoder models are out of scope", MODEL),
    **_each(
        "retro-add-retriever retro-workdir retro-project-dir",
        "retrieval models are out of scope",
        MODEL,
    ),
    **_each(
        "bert-load bert-no-binary-head bert-embedder-type ict-head-size ict-load biencoder-projection-dim"
        " biencoder-shared-query-context-model titles-data-path query-in-block-prob use-one-sent-docs"
        " evidence-data-path retriever-report-topk-accuracies retriever-score-scaling retriever-seq-length"
        " block-data-path embedding-path indexer-batch-size indexer-log-interval mask-prob short-seq-prob"
        " classifier-dropout sample-rate",
        "BERT and its relatives are out of scope",
        MODEL,
    ),
    **_each(
        "vision-pretraining vision-pretraining-type vision-backbone-type num-classes img-h img-w num-channels"
        " patch-dim classes-fraction data-per-class-fraction no-data-sharding head-lr-mult iter-per-epoch"
        " swin-backbone-type mask-type mask-factor dino-local-img-size dino-local-crops-number dino-head-hidden-size"
        " dino-bottleneck-size dino-freeze-last-layer dino-norm-last-layer dino-warmup-teacher-temp"
        " dino-teacher-temp dino-warmup-teacher-temp-epochs",
        "vision models are out of scope",
        MODEL,
    ),
}

_TRAININGS: Mapping[str, str] = {
    **_each("init-method-xavier-uniform", "weights start from a normal distribution", TRAINING),
    **_each("data-parallel-random-init", "all replicas start from the same weights", TRAINING),
    **_each("fp32-residual-connection", "the residual stream has the type of the weights", TRAINING),
    **_each("fim-data", "documents are not rearranged to fill in the middle", TRAINING),
    **_each("sft", "fine-tuning on dialogues is out of scope", TRAINING),
    **_each("perform-rl-step", "reinforcement learning is out of scope", TRAINING),
    **_each(
        "kd mos reset-iteration export-kd-cfg export-kd-teacher-load export-kd-finalize"
        " teacher-model-config export-kd-teacher-ckpt-format",
        "distillation is out of scope",
        TRAINING,
    ),
    **_each(
        "fp8-format fp8-e4m3 fp8-hybrid fp4-format kitchen-config-file kitchen-recipe-number use-kitchen"
        " use-kitchen-attention kitchen-attention-backend quant-recipe",
        "numbers of 8 bits and less are not in this trainer",
        TRAINING,
    ),
    **_each("iterations-to-skip skip-train-iteration-range", "every iteration trains", TRAINING),
    **_each("allow-ambiguous-pad-tokens", "tokens of padding are not told from others in the loss", TRAINING),
    **_each("step-batch-size-schedule", "the batch grows only on the ramp of --rampup-batch-size", TRAINING),
    **_each("no-weight-decay-cond-type apply-wd-to-qk-layernorm", "biases and norms never decay", TRAINING),
    **_each(
        "curriculum-learning-legacy data-efficiency-curriculum-learning random-ltd compression-training",
        "lengths of sequences and layers stay the same over a training",
        TRAINING,
    ),
    **_each(
        "return-data-index train-idx-path train-desc-path train-doc-idx-path train-sample-idx-path"
        " train-shuffle-idx-path",
        "the order of samples follows from the data and --seed",
        TRAINING,
    ),
    **_each(
        "reweight-loss-based-on-position-frequency loss-on-targets-only noise-density mean-noise-span-length",
        "the loss is that of the next token at every position",
        TRAINING,
    ),
    **_each("no-decoupled-weight-decay", "Adam decays weights apart from the gradient", TRAINING),
    **_each("use-bnb-optimizer", "optimizers of 8 bits are not in this trainer", TRAINING),
    **_each(
        "inference ds-inference output-bert-embeddings inference-batch-times-seqlen-threshold max-tokens-to-oom"
        " flash-decode use-legacy-static-engine inference-max-requests inference-max-seq-length"
        " inference-max-batch-size inference-dynamic-batching symmetric-ar-type nccl-all-reduce-for-prefill"
        " mlp-chunks-for-prefill disable-chunked-prefill decode-only-cuda-graphs use-inference-optimized-layers"
        " use-dataset-only",
        "this command only trains",
        TRAINING,
    ),
}

UNSUPPORTED_FLAGS: Mapping[str, str] = MappingProxyType({**_MODELS, **_TRAININGS})
"""The line by flag, spelled with dashes: what this trainer does not have, and that the run ends for it."""

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        **{f"--{name}-": f"mixtures of experts are not in this trainer: {MODEL}" for name in ("moe", "expert")},
        "--mtp-": f"multi-token prediction is not in this trainer: {MODEL}",
        "--mla-": f"multi-latent attention is not in this trainer: {MODEL}",
        "--mamba-": f"Mamba layers are not in this trainer: {MODEL}",
        "--hybrid-": f"Mamba layers are not in this trainer: {MODEL}",
        "--retro-": f"retrieval models are out of scope: {MODEL}",
        "--dino-": f"vision models are out of scope: {MODEL}",
        **{f"--{name}-": f"reinforcement learning is out of scope: {TRAINING}" for name in ("rl", "grpo", "langrl")},
        "--fim-": f"documents are not rearranged to fill in the middle: {TRAINING}",
        "--sft-": f"fine-tuning on dialogues is out of scope: {TRAINING}",
        **{f"--{name}-": f"models are not quantized or distilled: {TRAINING}" for name in ("export", "modelopt")},
        **{f"--{name}-": f"numbers of 8 bits and less are not in this trainer: {TRAINING}" for name in ("fp8", "fp4")},
        "--inference-": f"this command only trains: {TRAINING}",
    }
)
"""The line by the first word of a flag, for flags that newer versions add to these groups."""
