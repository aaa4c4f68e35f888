"""Flags of Megatron-LM, Megatron-DeepSpeed and their relatives that are refused, each with its reason and remedy.

A flag that changes what is trained is never ignored. A script that passes one of these ends with one line that
says what to do about it.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType


def _each(names: str, line: str) -> dict[str, str]:
    return {f"--{name}": line for name in names.split()}


def _later(what: str, remedy: str = "drop it") -> str:
    return f"{what} with a later version: {remedy}"


_GROUPS: Iterable[Mapping[str, str]] = (
    # Parallelism.
    _each(
        "microbatch-group-size-per-virtual-pipeline-stage",
        "the groups in which micro-batches pass a model chunk are as short as keeps every rank busy: drop it",
    ),
    _each("pipeline-model-parallel-layout", "layers are dealt in their order: use --stage-partition"),
    _each(
        "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split",
        "only transformer layers are dealt out: use --decoder-first-pipeline-num-layers or"
        " --decoder-last-pipeline-num-layers",
    ),
    _each(
        "defer-embedding-wgrad-compute wgrad-deferral-limit delay-wgrad-compute",
        "weight gradients are deferred by the schedule: use --pipeline-schedule zero-bubble",
    ),
    _each(
        "ds-sequence-parallel-size context-parallel-size force-ds-sequence-parallel",
        "sequences are not spread over ranks: drop it, and cut them with --num-token-slices",
    ),
    _each("standalone-embedding-stage", "the embedding belongs to the first stage: drop it, or use --stage-partition"),
    _each("pipeline-model-parallel-split-rank", "encoder-decoder models are out of scope: drop it"),
    _each("empty-unused-memory-level", "the allocator of torch decides this: drop it"),
    _each(
        "align-grad-reduce",
        "a stage starts its reductions when its last backward gets to them: drop it",
    ),
    _each("tp-comm-overlap", "tensor-parallel traffic is not spread over kernels: drop it"),
    _each(
        "use-torch-fsdp2 use-custom-fsdp data-parallel-sharding-strategy", "ZeRO takes its place: use --zero-stage 1"
    ),
    # DeepSpeed.
    _each(
        "partition-activations contigious-checkpointing checkpoint-in-cpu synchronize-each-layer profile-backward",
        "what recomputation keeps stays whole, and where it is: drop it",
    ),
    _each("remote-device use-pin-memory cpu-optimizer cpu_torch_adam", _later("offloading comes")),
    _each("ds_fused_adam", "the optimizer is apex's or torch's fused AdamW: drop it"),
    _each("no-pipeline-parallel-zero", "there is always a pipeline, of one stage if need be: drop it"),
    _each("deepscale", "it is an old name: use --deepspeed"),
    _each("deepscale-config", "it is an old name: use --deepspeed-config"),
    _each("deepspeed-mpi", "the launcher decides this: use deepspeed --launcher openmpi"),
    # Model.
    _each("add-position-embedding", "it is an old name: use --position-embedding-type learned_absolute"),
    _each(
        "rotary-interleaved rotary-seq-len-interpolation-factor use-rope-scaling rope-scaling-factor mrope-section"
        " no-rope-freq",
        "RoPE turns the halves of each head against each other, and is not scaled: drop it",
    ),
    _each("apply-layernorm-1p qk-layernorm qk-l2-norm", "norms are plain, and none is on queries and keys: drop it"),
    _each("onnx-safe", "GELU with the error function has a name of its own: use --activation gelu-exact"),
    _each("add-qkv-bias", "all linear layers have biases or none: use --disable-bias-linear, or drop it"),
    _each("multi-latent-attention window-size softmax-type", "attention is plain and causal: drop it"),
    _each("apply-residual-connection-post-layernorm embed-layernorm", "it is not in GPT-2 and GPT-3: drop it"),
    _each("dropout", "it is ambiguous: use --hidden-dropout and --attention-dropout"),
    _each("mup init-method-xavier-uniform", "weights start from a normal distribution: use --init-method-std"),
    _each("fp32-residual-connection", "the residual stream has the type of the weights: drop it"),
    # Batch and training.
    _each("batch-size", "it is ambiguous: use --micro-batch-size and --global-batch-size"),
    _each("train-tokens", "every sample has --seq-length tokens: use --train-samples, tokens / --seq-length"),
    _each("train-epochs", "training is counted in iterations: use --train-iters"),
    _each(
        "distribute-checkpointed-activations distribute-saved-activations",
        "what recomputation keeps stays whole, and where it is: drop it",
    ),
    _each("checkpoint-granularity", "it is an old name: use --recompute-granularity"),
    _each("recompute", "it is ambiguous: use --recompute-granularity full"),
    _each("data-parallel-random-init", "all replicas start from the same weights: drop it"),
    # Learning rate and regularization.
    _each("lr-decay-tokens", "every sample has --seq-length tokens: use --lr-decay-samples, tokens / --seq-length"),
    _each("lr-warmup-tokens", "every sample has --seq-length tokens: use --lr-warmup-samples, tokens / --seq-length"),
    _each("warmup", "it is an old name: use --lr-warmup-fraction"),
    _each(
        "use-checkpoint-opt_param-scheduler use-checkpoint-lr-scheduler",
        "the learning rate always follows from the flags and the iteration: drop it",
    ),
    _each("decoupled-lr decoupled-min-lr", "all weights have one learning rate: drop it"),
    # Precision.
    _each("fp16-lm-cross-entropy", "the loss is always computed in fp32: drop it"),
    # Data.
    _each("vocab-extra-ids", "it belongs to T5, which is out of scope: drop it"),
    _each(
        "return-data-index train-idx-path train-desc-path",
        "the order of samples follows from the data and --seed: drop it",
    ),
    _each("encoder-seq-length", "it is ambiguous: use --seq-length"),
    _each("decoder-seq-length", "encoder-decoder models are out of scope: use --seq-length"),
    # Checkpoints.
    _each(
        "ckpt-format dist-ckpt-format use-dist-ckpt async-save auto-detect-ckpt-format",
        "checkpoints are DeepSpeed's, and load onto every layout: drop it",
    ),
    # Evaluation and logging.
    _each("profile profile-step-start profile-step-end profile-ranks", "kernels are not profiled: use --timeline"),
    _each(
        "log-optimizer-states-to-tensorboard",
        "every rank holds another part of the optimizer's state: drop it, or use --log-params-norm",
    ),
    _each(
        "log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard",
        "it is always written: drop it",
    ),
    _each("log-num-zeros-in-grad", "DeepSpeed clears the gradients before they can be counted: drop it"),
    _each("timing-log-level timing-log-option barrier-with-L1-time", "timers are not printed: use --timeline"),
    # Other kinds of models and training.
    _each(
        "num-experts expert-interval topk moe-loss-coeff moe-train-capacity-factor moe-eval-capacity-factor"
        " moe-min-capacity moe-token-dropping moe-expert-parallel-size enable-expert-tensor-parallelism use-tutel"
        " create-moe-param-group disable-moe-token-dropping disable-moe-top2-2nd-expert-sampling"
        " use-router-expert-parallelism mlp-type expert-model-parallel-size expert-tensor-parallel-size moe-router-topk"
        " moe-grouped-gemm moe-router-load-balancing-type moe-aux-loss-coeff",
        "mixtures of experts are out of scope: drop it",
    ),
    _each(
        "retro-encoder-hidden-dropout retro-encoder-attention-dropout"
        " retro-workdir retro-add-retriever retro-cyclic-train-iters retro-encoder-layers retro-num-neighbors"
        " retro-num-retrieved-chunks retro-return-doc-ids",
        "retrieval models are out of scope: drop it",
    ),
    _each(
        "classifier-dropout"
        " bert-load bert-no-binary-head bert-embedder-type ict-head-size ict-load biencoder-projection-dim"
        " biencoder-shared-query-context-model titles-data-path query-in-block-prob use-one-sent-docs"
        " evidence-data-path retriever-report-topk-accuracies retriever-score-scaling block-data-path"
        " embedding-path indexer-batch-size indexer-log-interval mask-prob short-seq-prob",
        "BERT and its relatives are out of scope: drop it",
    ),
    _each(
        "vision-pretraining vision-pretraining-type vision-backbone-type num-classes img-h img-w num-channels"
        " patch-dim classes-fraction data-per-class-fraction no-data-sharding head-lr-mult iter-per-epoch"
        " swin-backbone-type mask-type mask-factor dino-local-img-size dino-local-crops-number dino-head-hidden-size"
        " dino-bottleneck-size dino-freeze-last-layer dino-norm-last-layer dino-warmup-teacher-temp"
        " dino-teacher-temp dino-warmup-teacher-temp-epochs",
        "vision models are out of scope: drop it",
    ),
    _each(
        "num-layers-teacher num-experts-teacher hidden-size-teacher num-attention-heads-teacher load-teacher kd"
        " mos kd-alpha-ce kd-beta-ce kd-temp reset-iteration",
        "distillation is out of scope: drop it",
    ),
    _each(
        "inference output-bert-embeddings inference-batch-times-seqlen-threshold max-tokens-to-oom",
        "this command only trains: drop it",
    ),
    _each(
        "curriculum-learning-legacy data-efficiency-curriculum-learning random-ltd compression-training"
        " use-dataset-only",
        "it is no longer in DeepSpeed: drop it",
    ),
    _each(
        "fp8-format fp8-recipe fp8-param-gather fp8-e4m3 fp8-hybrid no-fp8-wgrad fp8-margin fp8-interval"
        " fp8-amax-history-len fp8-amax-compute-algo",
        "fp8 is out of scope: use --bf16",
    ),
)

REFUSED_FLAGS: Mapping[str, str] = MappingProxyType(
    {flag.replace("_", "-"): line for group in _GROUPS for flag, line in group.items()}
)
"""Reason and remedy by flag, spelled with dashes."""
