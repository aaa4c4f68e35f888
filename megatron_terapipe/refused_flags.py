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


def _in_file(name: str, setting: str) -> dict[str, str]:
    return {f"--{name}": f"it is DeepSpeed's: set zero_optimization.{setting} in --deepspeed-config"}


_GROUPS: Iterable[Mapping[str, str]] = (
    # Parallelism.
    _each("num-layers-per-virtual-pipeline-stage", _later("interleaved stages come", "use --num-token-slices")),
    _each("virtual-pipeline-model-parallel-size", _later("interleaved stages come", "use --num-token-slices")),
    _each("enable-zbh1-pipeline enable-zbh1-exact-semantics", _later("zero bubble comes")),
    _each("sequence-parallel", _later("it belongs to tensor parallelism, which comes")),
    _each(
        "ds-sequence-parallel-size context-parallel-size force-ds-sequence-parallel",
        "sequences are not spread over ranks: drop it, and cut them with --num-token-slices",
    ),
    _each("use-distributed-optimizer", "ZeRO takes its place: drop it, and use --zero-stage 1"),
    _each("standalone-embedding-stage", "the embedding belongs to the first stage: drop it, or use --stage-partition"),
    _each("pipeline-model-parallel-split-rank", "encoder-decoder models are out of scope: drop it"),
    _each(
        "DDP-impl no-contiguous-buffers-in-local-ddp empty-unused-memory-level no-async-tensor-model-parallel-allreduce"
        " no-scatter-gather-tensors-in-pipeline use-cpu-initialization lazy-mpu-init",
        "DeepSpeed decides this: drop it",
    ),
    _each("overlap-p2p-communication", "transfers always overlap with computation: drop it"),
    _each("no-overlap-p2p-communication", "transfers always overlap with computation: drop it"),
    # DeepSpeed.
    _each(
        "partition-activations contigious-checkpointing checkpoint-in-cpu synchronize-each-layer profile-backward",
        "whole layers are recomputed, without variants: drop it",
    ),
    _in_file("zero-reduce-scatter", "reduce_scatter"),
    _in_file("zero-contigious-gradients", "contiguous_gradients"),
    _in_file("zero-reduce-bucket-size", "reduce_bucket_size"),
    _in_file("zero-allgather-bucket-size", "allgather_bucket_size"),
    _each("remote-device use-pin-memory cpu-optimizer cpu_torch_adam", _later("offloading comes")),
    _each("ds_fused_adam no-pipeline-parallel-zero", "the optimizer is torch's AdamW: drop it"),
    _each("deepscale", "it is an old name: use --deepspeed"),
    _each("deepscale-config", "it is an old name: use --deepspeed-config"),
    _each("deepspeed-mpi", "the launcher decides this: use deepspeed --launcher openmpi"),
    # Model.
    _each(
        "use-rotary-position-embeddings rotary-position-embeddings-theta rotary-percent no-position-embedding"
        " position-embedding-type add-position-embedding",
        _later("positions are learned; others come"),
    ),
    _each("normalization apply-layernorm-1p", _later("the norm is LayerNorm; others come")),
    _each(
        "swiglu squared-relu openai-gelu onnx-safe bias-gelu-fusion no-bias-gelu-fusion",
        _later("the activation is GELU; others come"),
    ),
    _each("disable-bias-linear add-bias-linear", _later("linear layers have biases; others come")),
    _each("group-query-attention", "--num-key-value-heads alone turns it on: drop it"),
    _each(
        "use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder",
        "attention never stores its scores, whatever the kernel: drop it",
    ),
    _each(
        "no-masked-softmax-fusion no-bias-dropout-fusion no-persist-layer-norm no-gradient-accumulation-fusion"
        " attention-softmax-in-fp32 no-query-key-layer-scaling apply-query-key-layer-scaling",
        "there is no such kernel to turn off, and softmax always runs in fp32: drop it",
    ),
    _each("apply-residual-connection-post-layernorm embed-layernorm", "it is not in GPT-2 and GPT-3: drop it"),
    _each(
        "dropout classifier-dropout retro-encoder-hidden-dropout retro-encoder-attention-dropout",
        _later("dropout comes"),
    ),
    _each("mup init-method-xavier-uniform", "weights start from a normal distribution: use --init-method-std"),
    # Batch and training.
    _each("rampup-batch-size", _later("batch-size ramp-up comes", "use --global-batch-size")),
    _each("batch-size", "it is ambiguous: use --micro-batch-size and --global-batch-size"),
    _each("train-samples train-tokens", "training is counted in iterations: use --train-iters"),
    _each("train-epochs", "training is counted in iterations: use --train-iters"),
    _each("exit-duration-in-mins exit-signal-handler", _later("it comes", "use --exit-interval")),
    _each(
        "recompute-method recompute-num-layers checkpoint-num-layers distribute-checkpointed-activations"
        " distribute-saved-activations checkpoint-granularity",
        "every layer is recomputed or none: use --recompute-granularity",
    ),
    _each("recompute", "it is ambiguous: use --recompute-granularity full"),
    _each("dataloader-type", "samples are always read as with `single`: drop it"),
    _each("data-parallel-random-init", "all replicas start from the same weights: drop it"),
    # Learning rate and regularization.
    _each("lr-decay-samples lr-decay-tokens", "the decay is counted in iterations: use --lr-decay-iters"),
    _each("lr-warmup-samples lr-warmup-tokens", "the warmup is counted in iterations: use --lr-warmup-iters"),
    _each("warmup", "it is an old name: use --lr-warmup-fraction"),
    _each(
        "override-opt_param-scheduler use-checkpoint-opt_param-scheduler override-lr-scheduler"
        " use-checkpoint-lr-scheduler",
        "the learning rate always follows from the flags and the iteration: drop it",
    ),
    _each(
        "start-weight-decay end-weight-decay weight-decay-incr-style",
        _later("weight decay is constant; a rising one comes", "use --weight-decay"),
    ),
    # Precision.
    _each("fp32-residual-connection", _later("a residual stream in fp32 comes")),
    _each("fp16-lm-cross-entropy", "the loss is always computed in fp32: drop it"),
    # Data.
    _each(
        "train-data-path valid-data-path test-data-path",
        _later("data apart for training, validation and test comes", "use --data-path and --split"),
    ),
    _each("data-cache-path", "nothing is cached on disk: drop it"),
    _each("tokenizer-model tokenizer-name-or-path", _later("its tokenizers come", "use --tokenizer-type")),
    _each("vocab-extra-ids", "it belongs to T5, which is out of scope: drop it"),
    _each("data-impl", "data is always memory-mapped: drop it"),
    _each("mmap-warmup", "data is always memory-mapped: drop it"),
    _each(
        "reset-position-ids reset-attention-mask eod-mask-loss",
        _later("documents in one sequence see each other; masks between them come"),
    ),
    _each("train-data-exact-num-epochs return-data-index train-idx-path train-desc-path", _later("it comes")),
    _each("encoder-seq-length", "it is ambiguous: use --seq-length"),
    _each("decoder-seq-length", "encoder-decoder models are out of scope: use --seq-length"),
    # Checkpoints.
    _each("load-tag", _later("the newest checkpoint is loaded; a choice comes")),
    _each("no-save-optim no-save-rng", _later("checkpoints are whole; partial ones come")),
    _each("no-load-lr-state", "the learning rate always follows from the flags and the iteration: drop it"),
    _each("universal-checkpoint", _later("it comes")),
    _each("use-checkpoint-args use-checkpoint-shape", "the model is described by its flags: drop it"),
    # Evaluation and logging.
    _each("skip-train", _later("evaluation without training comes")),
    _each(
        "tensorboard-dir tensorboard-log-interval tensorboard-queue-size log-timers-to-tensorboard"
        " log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard"
        " log-world-size-to-tensorboard log-optimizer-states-to-tensorboard log-learning-rate-to-tensorboard"
        " log-loss-scale-to-tensorboard",
        _later("TensorBoard comes", "use --metrics-file"),
    ),
    _each("wandb-project wandb-exp-name wandb-save-dir", _later("Weights & Biases comes", "use --metrics-file")),
    _each("log-params-norm log-num-zeros-in-grad", _later("it comes", "use --metrics-file")),
    _each("timing-log-level timing-log-option barrier-with-L1-time", "timers are not printed: use --timeline"),
    # Other kinds of models and training.
    _each(
        "num-experts expert-interval topk moe-loss-coeff moe-train-capacity-factor moe-eval-capacity-factor"
        " moe-min-capacity moe-token-dropping moe-expert-parallel-size enable-expert-tensor-parallelism use-tutel"
        " create-moe-param-group disable-moe-token-dropping disable-moe-top2-2nd-expert-sampling"
        " use-router-expert-parallelism mlp-type",
        "mixtures of experts are out of scope: drop it",
    ),
    _each(
        "retro-workdir retro-add-retriever retro-cyclic-train-iters retro-encoder-layers retro-num-neighbors"
        " retro-num-retrieved-chunks retro-return-doc-ids",
        "retrieval models are out of scope: drop it",
    ),
    _each(
        "bert-load bert-no-binary-head bert-embedder-type ict-head-size ict-load biencoder-projection-dim"
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
        "fp8-e4m3 fp8-hybrid no-fp8-wgrad fp8-margin fp8-interval transformer-impl fp8-amax-history-len"
        " fp8-amax-compute-algo",
        "fp8 is out of scope: use --bf16",
    ),
)

REFUSED_FLAGS: Mapping[str, str] = MappingProxyType(
    {flag.replace("_", "-"): line for group in _GROUPS for flag, line in group.items()}
)
"""Reason and remedy by flag, spelled with dashes."""
