"""Flags of other trainers: Megatron-LM, Megatron-DeepSpeed and their relatives.

OTHER_NAMES         not accepted; the error names our flag
ACCEPTED_FLAGS      their effect is always on
NEUTRAL_FLAGS       accepted with the one value that changes nothing
IDLE_FLAGS          accepted without effect; they do not decide what is trained
UNSUPPORTED_FLAGS   refused, because another model or training would result; FAMILIES by the first word of the flag
REFUSED_FLAGS       all that are refused, each with its reason and remedy
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED as MODEL
from megatron_terapipe.errors import TRAINING_CANNOT_BE_RUN as TRAINING

_NAMES = {
    "--context-parallel-size": "cp cp-size sp sp-size",
    "--data-parallel-size": "dp dp-size",
    "--data-path": "data dataset data-dir dataset-path train-data train-file input",
    "--clip-grad": "grad-clip max-grad-norm gradient-clipping",
    "--global-batch-size": "grad-accum-steps accumulate-grad-batches",
    "--hidden-size": "dim d-model n-embd embed-dim hidden-dim width",
    "--load": "resume resume-from resume-from-checkpoint checkpoint checkpoint-dir ckpt",
    "--log-interval": "logging-steps log-every",
    "--lr": "learning-rate",
    "--lr-decay-style": "lr-scheduler lr-scheduler-type scheduler",
    "--lr-warmup-iters": "warmup-steps warmup-iters",
    "--micro-batch-size": "per-device-train-batch-size train-batch-size",
    "--model-preset": "model model-name model-name-or-path",
    "--num-attention-heads": "heads num-heads n-heads n-head",
    "--num-layers": "depth n-layer n-layers",
    "--num-model-chunks": "virtual-stages",
    "--pipeline-model-parallel-size": "pp pp-size stages num-stages pipeline-parallel-size",
    "--pipeline-schedule": "schedule",
    "--recompute-activations": "gradient-checkpointing activation-checkpointing",
    "--save": "output output-dir output-path save-dir save-path",
    "--save-interval": "save-steps save-every",
    "--seq-length": "block-size ctx-len max-length max-seq-len max-seq-length n-ctx seq-len sequence-length",
    "--tensor-model-parallel-size": "tp tp-size tensor-parallel-size",
    "--tokenizer-type": "tokenizer tokenizer-name",
    "--train-iters": "iterations max-steps num-steps steps train-steps",
    "--train-samples": "epochs num-epochs num-train-epochs",
    "--untie-embeddings-and-output-weights": "untie-embeddings no-tie-embeddings",
}

OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {f"--{name}": ours for ours, names in _NAMES.items() for name in names.split()}
)
"""Our flag, by the name that others have for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptedFlag:
    """A flag that changes nothing."""

    reason: str
    """Reason why nothing has to change."""

    values: tuple[str, ...] = ()
    """Values that it may take; empty if it takes none."""

    says: tuple[str, object] | None = None
    """Field of the configuration that it speaks of, and the value that it promises."""

    needs: str = ""
    """Field of the configuration that must be set beside it; empty if none."""


def _accepted(names: str, reason: str, **settings: object) -> dict[str, AcceptedFlag]:
    return {f"--{name}": AcceptedFlag(reason=reason, **settings) for name in names.split()}  # type: ignore[arg-type]


_KERNELS = "the trainer chooses kernels for the machine; the result is the same"

ACCEPTED_FLAGS: Mapping[str, AcceptedFlag] = MappingProxyType(
    {
        # Attention.
        **_accepted(
            "use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder",
            "a flash kernel runs wherever one fits",
        ),
        **_accepted("attention-backend", _KERNELS, values=("flash", "fused", "unfused", "local", "auto")),
        **_accepted("no-create-attention-mask-in-dataloader", "no mask is read with the data"),
        **_accepted("attention-softmax-in-fp32", "softmax runs in fp32"),
        **_accepted(
            "no-query-key-layer-scaling apply-query-key-layer-scaling",
            "the scaling cancels out, and is not needed where softmax runs in fp32",
        ),
        **_accepted(
            "group-query-attention",
            "it is on if there are fewer key and value heads than query heads",
            needs="num_key_value_heads",
        ),
        # What the model is: true, or an error.
        **_accepted("add-bias-linear", "linear layers have biases", says=("disable_bias_linear", False)),
        # Kernels.
        **_accepted(
            "no-masked-softmax-fusion bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion"
            " no-rope-fusion no-persist-layer-norm no-gradient-accumulation-fusion cross-entropy-loss-fusion",
            _KERNELS,
        ),
        **_accepted("cross-entropy-fusion-impl", _KERNELS, values=("native", "te")),
        **_accepted("use-mcore-models use-legacy-models", "there is one implementation of the model"),
        **_accepted(
            "transformer-impl", "there is one implementation of the model", values=("local", "transformer_engine")
        ),
        # Ranks and memory.
        **_accepted("use-distributed-optimizer", "ZeRO 1 spreads the optimizer over the ranks", says=("zero_stage", 1)),
        **_accepted(
            "overlap-p2p-communication no-overlap-p2p-communication", "transfers between stages overlap computation"
        ),
        **_accepted(
            "overlap-grad-reduce",
            "gradients are reduced layer by layer, while the last backwards run",
            says=("no_overlap_grad_reduce", False),
        ),
        **_accepted("DDP-impl", "DeepSpeed reduces the gradients", values=("local", "torch", "FSDP")),
        **_accepted("enable-zbh1-exact-semantics", "all schedules train the same, to the last digits"),
        **_accepted(
            "no-contiguous-buffers-in-local-ddp no-async-tensor-model-parallel-allreduce"
            " no-scatter-gather-tensors-in-pipeline",
            "the engine plans the traffic; the result is the same",
        ),
        **_accepted("use-cpu-initialization lazy-mpu-init", "weights are made on the CPU, then moved"),
        **_accepted("decoupled-weight-decay", "Adam decays weights apart from the gradient"),
        **_accepted("ds-fused-adam", "the optimizer is apex's or torch's fused AdamW"),
        # Learning rate.
        **_accepted(
            "override-opt-param-scheduler override-lr-scheduler",
            "the learning rate follows from the flags and the iteration, whatever a checkpoint says",
        ),
        # Precision.
        **_accepted(
            "no-fp16-lm-cross-entropy fp16-lm-cross-entropy", "the loss is computed in fp32, which is exact enough"
        ),
        **_accepted("grad-reduce-in-bf16", "gradients are reduced in the type they add up in, which is no less exact"),
        **_accepted("embedding-weights-in-fp32", "a row that is looked up has the same digits"),
        **_accepted("use-precision-aware-optimizer", "the optimizer keeps weights, gradients and states in fp32"),
        # Data.
        **_accepted("repeated-dataloader", "after the last sample the data starts again"),
        # Logs.
        **_accepted("log-throughput", "the throughput is in every line of the log"),
        **_accepted(
            "log-learning-rate-to-tensorboard",
            "it is written to TensorBoard",
            says=("no_log_learning_rate_to_tensorboard", False),
        ),
        **_accepted(
            "log-loss-scale-to-tensorboard",
            "it is written to TensorBoard",
            says=("no_log_loss_scale_to_tensorboard", False),
        ),
    }
)
"""Flags that change nothing, and why, by their spelling with dashes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NeutralFlag:
    """A flag that changes nothing at one value."""

    neutral: tuple[str, ...]
    """Spellings of that value."""

    otherwise: str
    """Reason and remedy for every other value."""

    several: bool = False
    """Whether it takes several values, all of which have to be neutral."""


def _neutral(names: str, *neutral: str, otherwise: str, several: bool = False) -> dict[str, NeutralFlag]:
    flag = NeutralFlag(neutral=neutral, otherwise=otherwise, several=several)
    return {f"--{name}": flag for name in names.split()}


_EXPERTS = f"mixtures of experts are not in this trainer: {MODEL}"
_STATES = "the optimizer keeps weights, gradients and states in fp32: use fp32"

NEUTRAL_FLAGS: Mapping[str, NeutralFlag] = MappingProxyType(
    {
        # Axes of ranks.
        **_neutral("expert-model-parallel-size", "1", otherwise=_EXPERTS),
        **_neutral(
            "encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size",
            "0",
            otherwise=f"encoder-decoder models are out of scope: {MODEL}",
        ),
        # Parts of a model. Megatron-DeepSpeed calls a dense model one of 1 expert.
        **_neutral("num-experts", "1", otherwise=_EXPERTS, several=True),
        **_neutral("mtp-num-layers", "0", otherwise=f"multi-token prediction is not in this trainer: {MODEL}"),
        **_neutral(
            "hybrid-attention-ratio hybrid-mlp-ratio",
            "0",
            "0.0",
            otherwise=f"Mamba layers are not in this trainer: {MODEL}",
        ),
        **_neutral("rope-type", "rope", otherwise=f"it belongs to multi-latent attention: {MODEL}"),
        **_neutral("glu-linear-offset", "0", "0.0", otherwise=f"gates have no offset: {MODEL}"),
        **_neutral("spec", "local", otherwise=f"layers made by code of its own are not read: {MODEL}", several=True),
        # Memory.
        **_neutral("cpu-offloading-num-layers", "0", otherwise="activations stay on the accelerator: use 0"),
        **_neutral("remote-device", "none", otherwise="weights stay on the accelerator: use none"),
        **_neutral("main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype", "fp32", otherwise=_STATES),
        # Data.
        **_neutral("vocab-extra-ids", "0", otherwise=f"tokens for masked spans belong to T5: {TRAINING}"),
        **_neutral(
            "mid-level-dataset-surplus",
            "0.005",
            "5e-3",
            otherwise="it changes which samples are read, and 0.005 is what this trainer reads by: use 0.005",
        ),
    }
)
"""Flags that change nothing at one value, by their spelling with dashes."""


Values = Literal[0, 1, "*"]
"""How many values a flag takes: none, one, or any number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleFlag:
    """A flag that has no effect here."""

    values: Values
    """How many values it takes."""

    beside: str = ""
    """Flag without which it has no effect in its own trainer either; empty if it concerns operation only."""


def _operation(values: Values, names: str) -> dict[str, IdleFlag]:
    return {f"--{name}": IdleFlag(values=values) for name in names.split()}


def _beside(owner: str, *, bare: str = "", one: str = "", several: str = "") -> dict[str, IdleFlag]:
    kinds: tuple[tuple[Values, str], ...] = ((0, bare), (1, one), ("*", several))
    return {f"--{name}": IdleFlag(values=values, beside=owner) for values, names in kinds for name in names.split()}


_OPERATION: Mapping[str, IdleFlag] = {
    # Checkpoints are DeepSpeed's, and load onto every layout.
    **_operation(
        0,
        "use-dist-ckpt auto-detect-ckpt-format use-persistent-ckpt-worker async-ckpt-use-cpu-shm"
        " ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load"
        " ckpt-assume-constant-structure"
        " ckpt-fully-parallel-save-replicate-local ckpt-fully-parallel-load-replicate-local"
        " no-ckpt-load-validate-sharding-integrity dist-ckpt-save-pre-mcore-014 dist-ckpt-optim-fully-reshardable"
        " distrib-optim-fully-reshardable-mem-efficient no-strict-fsdp-dtensor-load load-main-params-from-ckpt"
        " no-initialization no-use-tokenizer-model-from-checkpoint-args no-save-tokenizer-assets verify-integrity"
        " replication ckpt-convert-update-legacy-dist-opt-format",
    ),
    **_operation(
        1,
        "ckpt-format dist-ckpt-format dist-ckpt-strictness async-strategy async-ckpt-cpu-priority"
        " async-ckpt-io-priority ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-save-process-group"
        " ckpt-fully-parallel-load-process-group non-persistent-save-interval non-persistent-ckpt-type"
        " non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo"
        " replication-jump replication-factor save-retain-interval save-params-interval save-activations-interval"
        " save-wgrads-interval save-dgrads-interval",
    ),
    # The learning rate follows from the flags and the iteration, whatever a checkpoint says.
    **_operation(0, "use-checkpoint-opt-param-scheduler use-checkpoint-lr-scheduler"),
    # The collector of garbage, and the host.
    **_operation(0, "manual-gc no-manual-gc-eval disable-jit-fuser enable-experimental filter-warnings"),
    **_operation(1, "manual-gc-interval empty-unused-memory-level train-sync-interval"),
    # Messages: which ranks are neighbours, when transfers start, in which portions. Sums are the same up to order.
    **_operation(
        0,
        "align-grad-reduce no-align-grad-reduce align-param-gather no-align-param-gather delay-grad-reduce"
        " no-delay-grad-reduce delay-param-gather overlap-param-gather-with-optimizer-step"
        " overlap-p2p-communication-warmup-flush batch-p2p-communication use-ring-exchange-p2p use-tp-pp-dp-mapping"
        " ddp-pad-buckets-for-high-nccl-busbw ddp-average-in-collective ddp-reduce-scatter-with-fp32-accumulation"
        " no-gradient-reduce-div-fusion use-nccl-ub disable-symmetric-registration use-sharp"
        " disable-gloo-process-groups tp-comm-overlap disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs"
        " tp-comm-overlap-rs-dgrad disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-split-ag"
        " tp-comm-atomic-ag tp-comm-atomic-rs batch-p2p-comm disable-tp-comm-split-rs tp-comm-overlap-disable-qkv"
        " tp-comm-overlap-disable-fc1"
        " sync-tp-duplicated-parameters",
    ),
    **_operation(
        1,
        "ddp-num-buckets ddp-bucket-size num-distributed-optimizer-instances sharp-enabled-group tp-comm-overlap-cfg"
        " tp-comm-bootstrap-backend pipeline-model-parallel-comm-backend nccl-communicator-config-path"
        " distributed-timeout-seconds-after-init microbatch-group-size-per-virtual-pipeline-stage",
    ),
    **_operation("*", "high-priority-stream-groups"),
    # Tokens are exchanged for heads around attention, in one message each way, from two ranks on.
    **_operation(0, "force-ds-sequence-parallel"),
    **_operation("*", "cp-comm-type hierarchical-context-parallel-sizes"),
    # When weight gradients are computed.
    **_operation(0, "defer-embedding-wgrad-compute delay-wgrad-compute"),
    **_operation(1, "wgrad-deferral-limit"),
    # What recomputation keeps, and where.
    **_operation(
        0,
        "partition-activations contigious-checkpointing checkpoint-in-cpu synchronize-each-layer profile-backward"
        " distribute-checkpointed-activations distribute-saved-activations scattered-embeddings split-transformers"
        " memory-centric-tiled-linear",
    ),
    **_operation(1, "tile-factor num-microbatches-with-partial-activation-checkpoints"),
    **_operation("*", "recompute-modules"),
    # Kernels, graphs of kernels, and their random generators.
    **_operation(
        0,
        "no-clone-scatter-output-in-embedding use-fused-weighted-squared-relu fused-single-qkv-rope"
        " no-bias-geglu-fusion memory-efficient-layer-norm disable-mem-efficient-ln disable-parameter-transpose-cache"
        " te-rng-tracker use-te-rng-tracker inference-rng-tracker enable-cuda-graph external-cuda-graph"
        " cuda-graph-use-single-mempool cuda-graph-retain-backward-graph abort-on-unmet-fused-kernel-constraints",
    ),
    **_operation(1, "cuda-graph-impl cuda-graph-warmup-steps"),
    **_operation("*", "cuda-graph-scope"),
    # Repeated and checked computation, failures, restarts.
    **_operation(
        0,
        "test-mode inprocess-restart inprocess-empty-cuda-cache enable-ft-package calc-ft-timeouts adlr-autoresume"
        " exit-signal-handler-for-dataloader exit-signal-handler-for-training decrease-batch-size-if-needed",
    ),
    **_operation(
        1,
        "rerun-mode error-injection-rate error-injection-type result-rejected-tracker-filename"
        " gpu-sniff-test-interval adlr-autoresume-interval"
        " inprocess-max-iterations inprocess-monitor-thread-interval inprocess-monitor-process-interval"
        " inprocess-progress-watchdog-interval inprocess-heartbeat-interval inprocess-soft-timeout"
        " inprocess-hard-timeout inprocess-heartbeat-timeout inprocess-barrier-timeout inprocess-completion-timeout"
        " inprocess-last-call-wait inprocess-termination-grace-time inprocess-granularity"
        " inprocess-active-world-size kill-switch-path",
    ),
    # Data files and tokenizers: how they are read, not what is read.
    **_operation(
        0,
        "no-mmap-bin-files dataloader-fast-cache-load dataloader-defer-npy-index-mmap legacy-tokenizer"
        " trust-remote-code disable-msc",
    ),
    **_operation(1, "num-dataset-builder-threads object-storage-cache-path s3-cache-path aml-data-download-path"),
    # Logs.
    **_operation(
        0,
        "log-optimizer-states-to-tensorboard no-barrier-with-level-1-timing log-progress log-straggler log-energy"
        " log-throughput-to-tensorboard log-runtime-to-tensorboard log-l2-norm-grad-to-tensorboard"
        " log-max-attention-logit log-device-memory-used disable-straggler-on-startup set-level-for-all-loggers"
        " run-workload-inspector-server no-one-logger enable-one-logger one-logger-async record-memory-history"
        " pytorch-profiler-collect-shapes pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra"
        " record-shapes nvtx-ranges flight-recorder-include-stack-trace",
    ),
    **_operation(
        1,
        "straggler-ctrlr-port straggler-minmax-count one-logger-project one-logger-run-name app-tag-run-name"
        " app-tag-run-version wandb-entity wandb-group wandb-team logging-level log-path log-level log-level-replica"
        " codecarbon-dir dump-param-to-param-group-map config-logger-dir save-config-filepath memory-snapshot-path"
        " log-memory-interval"
        " runtime-time-unit throughput-window-size flight-recorder-dump-path flight-recorder-trace-buffer-size",
    ),
    **_operation("*", "modules-to-filter"),
}

_DEPENDENT: Mapping[str, IdleFlag] = {
    **_beside(
        "--num-experts",
        bare="moe-grouped-gemm moe-use-legacy-grouped-gemm moe-shared-expert-overlap moe-shared-expert-gate"
        " moe-layer-recompute moe-extended-tp moe-use-upcycling moe-router-fusion moe-router-pre-softmax"
        " moe-router-enable-expert-bias moe-router-force-load-balancing moe-router-padding-for-fp8"
        " moe-router-padding-for-quantization moe-per-layer-logging moe-enable-deepep moe-permute-fusion"
        " moe-pad-expert-input-to-capacity moe-apply-probs-on-input moe-token-dropping disable-moe-token-dropping"
        " ep-overlap-early-attn-memory-release moe-pad-experts-for-cuda-graph-inference"
        " overlap-moe-expert-parallel-comm expert-parallel"
        " create-moe-param-group enable-expert-tensor-parallelism use-tutel use-router-expert-parallelism"
        " disable-moe-top2-2nd-expert-sampling",
        one="expert-tensor-parallel-size moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-layer-freq"
        " moe-router-dtype moe-router-score-function moe-router-topk moe-router-num-groups moe-router-group-topk"
        " moe-router-topk-scaling-factor moe-router-topk-limited-devices moe-router-bias-update-rate moe-z-loss-coeff"
        " moe-input-jitter-eps moe-token-dispatcher-type moe-flex-dispatcher-backend moe-deepep-num-sms"
        " moe-hybridep-num-sms moe-expert-capacity-factor moe-token-drop-policy moe-upcycling-granularity"
        " moe-latent-size expert-interval topk moe-loss-coeff moe-train-capacity-factor moe-eval-capacity-factor"
        " moe-min-capacity moe-expert-parallel-size mlp-type",
        several="moe-router-load-balancing-type moe-aux-loss-coeff",
    ),
    **_beside("--hybrid-context-parallel", one="max-seqlen-per-dp-cp-rank"),
    **_beside(
        "--multi-latent-attention",
        bare="cache-mla-latents",
        one="q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim mscale mscale-all-dim",
    ),
    **_beside("--mtp-num-layers", bare="mtp-standalone mtp-use-repeated-layer", one="mtp-loss-scaling-factor"),
    **_beside(
        "--fp8-format",
        bare="tp-only-amax-red fp8-param-gather no-fp8-wgrad first-last-layers-bf16 reuse-grad-buf-for-mxfp8-param-ag",
        one="fp8-recipe fp8-quantizer-factory fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo"
        " num-layers-at-start-in-bf16 num-layers-at-end-in-bf16",
    ),
    **_beside("--fp4-format", bare="fp4-param-gather", one="fp4-recipe fp4-quantizer-factory"),
    **_beside(
        "--fim-data",
        one="fim-rate fim-spm-rate fim-split-sample fim-fragment-rate fim-no-prefix fim-prefix-token fim-middle-token"
        " fim-suffix-token fim-pad-token fim-eod-token",
    ),
    **_beside("--sft", one="sft-tokenizer-prompt-format"),
    **_beside("--quick-geglu", one="activation-func-clamp-value"),
    **_beside(
        "--position-embedding-type relative", one="relative-attention-num-buckets relative-attention-max-distance"
    ),
    **_beside(
        "--optimizer muon",
        bare="muon-no-split-qkv muon-use-nesterov",
        one="muon-momentum muon-scale-mode muon-fp32-matmul-prec muon-num-ns-steps muon-tp-mode"
        " muon-extra-scale-factor",
    ),
    **_beside(
        "--optimizer-cpu-offload",
        bare="use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params",
        one="optimizer-offload-fraction",
    ),
    **_beside("--cpu-optimizer", bare="use-pin-memory"),
    **_beside(
        "--cpu-offloading-num-layers",
        bare="cpu-offloading-activations cpu-offloading-weights cpu-offloading-double-buffering",
    ),
    **_beside(
        "--use-megatron-fsdp",
        bare="fsdp-double-buffer fsdp-manual-registration keep-fp8-transpose-cache"
        " keep-fp8-transpose-cache-when-using-custom-fsdp enable-full-sharding-in-hsdp init-model-with-meta-device",
        one="megatron-fsdp-version data-parallel-sharding-strategy suggested-communication-unit-size"
        " outer-dp-sharding-strategy",
    ),
    **_beside("--use-torch-fsdp2", bare="torch-fsdp2-no-reshard-after-forward"),
    **_beside(
        "--retro-add-retriever",
        bare="retro-no-verify-neighbor-count retro-return-doc-ids",
        one="retro-encoder-hidden-dropout retro-encoder-attention-dropout retro-cyclic-train-iters"
        " retro-encoder-layers retro-num-neighbors retro-num-retrieved-chunks retro-attention-gate",
    ),
    **_beside(
        "--perform-rl-step",
        bare="grpo-filter-groups-with-same-reward rl-offload-optimizer-during-inference rl-use-sequence-packing",
        one="rl-prompts-per-eval grpo-prompts-per-step grpo-group-size grpo-iterations grpo-clamp-eps-lower"
        " grpo-clamp-eps-upper grpo-kl-beta grpo-entropy-term-weight grpo-default-temperature grpo-default-top-p"
        " langrl-inference-server-type langrl-inference-server-conversation-template langrl-env-config"
        " rl-importance-sampling-truncation-coef rl-sequence-packing-bin-size rl-sequence-packing-algo",
    ),
    **_beside(
        "--kd",
        one="kd-alpha-ce kd-beta-ce kd-temp num-layers-teacher hidden-size-teacher num-attention-heads-teacher"
        " load-teacher",
        several="num-experts-teacher",
    ),
}

IDLE_FLAGS: Mapping[str, IdleFlag] = MappingProxyType({**_OPERATION, **_DEPENDENT})
"""Flags that have no effect here, by their spelling with dashes."""


def _unsupported(names: str, reason: str, end: str) -> dict[str, str]:
    return {f"--{name}": f"{reason}: {end}" for name in names.split()}


_MODELS: Mapping[str, str] = {
    **_unsupported(
        "is-hybrid-model hybrid-override-pattern hybrid-layer-pattern mamba-state-dim mamba-head-dim mamba-num-groups"
        " mamba-num-heads disable-mamba-mem-eff-path",
        "Mamba layers are not in this trainer",
        MODEL,
    ),
    **_unsupported(
        "experimental-attention-variant attention-output-gate qk-clip qk-clip-alpha qk-clip-threshold"
        " dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk dsa-indexer-loss-coeff"
        " dsa-indexer-use-sparse-loss linear-attention-freq linear-attention-type linear-conv-kernel-dim"
        " linear-key-head-dim linear-value-head-dim linear-num-key-heads linear-num-value-heads",
        "attention is that of the transformer, without gates, indexers or recurrence",
        MODEL,
    ),
    **_unsupported("qk-l2-norm", "norms on queries and keys have weights", MODEL),
    **_unsupported("quick-geglu", "a gate with the quick form of GELU is not in this trainer", MODEL),
    **_unsupported("glu-activation", "of the gated activations only those of --activation are in this trainer", MODEL),
    **_unsupported("mrope-section", "positions are those of text, in one dimension", MODEL),
    **_unsupported("multi-latent-attention softmax-type", "attention is plain and causal", MODEL),
    **_unsupported(
        "apply-residual-connection-post-layernorm embed-layernorm",
        "no norm follows the embedding, and residuals are added as they come",
        MODEL,
    ),
    **_unsupported(
        "mup use-mup mup-base-hidden-size mup-embedding-mult mup-output-mult mup-base-head-dim mup-width-mult",
        "widths have no multipliers (muP)",
        MODEL,
    ),
    **_unsupported("decoder-num-layers decoder-seq-length", "encoder-decoder models are out of scope", MODEL),
    **_unsupported("pipeline-model-parallel-split-rank", "encoder-decoder models are out of scope", MODEL),
    **_unsupported(
        "retro-add-retriever retro-workdir retro-project-dir",
        "retrieval models are out of scope",
        MODEL,
    ),
    **_unsupported(
        "bert-load bert-no-binary-head bert-embedder-type ict-head-size ict-load biencoder-projection-dim"
        " biencoder-shared-query-context-model titles-data-path query-in-block-prob use-one-sent-docs"
        " evidence-data-path retriever-report-topk-accuracies retriever-score-scaling retriever-seq-length"
        " block-data-path embedding-path indexer-batch-size indexer-log-interval mask-prob short-seq-prob"
        " classifier-dropout sample-rate",
        "BERT and its relatives are out of scope",
        MODEL,
    ),
    **_unsupported(
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
    **_unsupported("init-method-xavier-uniform", "weights start from a normal distribution", TRAINING),
    **_unsupported("data-parallel-random-init", "all replicas start from the same weights", TRAINING),
    **_unsupported("fp32-residual-connection", "the residual stream has the type of the weights", TRAINING),
    **_unsupported("fim-data", "documents are not rearranged to fill in the middle", TRAINING),
    **_unsupported("sft", "fine-tuning on dialogues is out of scope", TRAINING),
    **_unsupported("perform-rl-step", "reinforcement learning is out of scope", TRAINING),
    **_unsupported(
        "kd mos reset-iteration export-kd-cfg export-kd-teacher-load export-kd-finalize"
        " teacher-model-config export-kd-teacher-ckpt-format",
        "distillation is out of scope",
        TRAINING,
    ),
    **_unsupported(
        "fp8-format fp8-e4m3 fp8-hybrid fp4-format kitchen-config-file kitchen-recipe-number use-kitchen"
        " use-kitchen-attention kitchen-attention-backend quant-recipe",
        "numbers of 8 bits and less are not in this trainer",
        TRAINING,
    ),
    **_unsupported("iterations-to-skip skip-train-iteration-range", "every iteration trains", TRAINING),
    **_unsupported("allow-ambiguous-pad-tokens", "tokens of padding are not told from others in the loss", TRAINING),
    **_unsupported("step-batch-size-schedule", "the batch grows only on the ramp of --rampup-batch-size", TRAINING),
    **_unsupported("no-weight-decay-cond-type apply-wd-to-qk-layernorm", "biases and norms never decay", TRAINING),
    **_unsupported(
        "curriculum-learning-legacy data-efficiency-curriculum-learning random-ltd compression-training",
        "lengths of sequences and layers stay the same over a training",
        TRAINING,
    ),
    **_unsupported(
        "return-data-index train-idx-path train-desc-path train-doc-idx-path train-sample-idx-path"
        " train-shuffle-idx-path",
        "the order of samples follows from the data and --seed",
        TRAINING,
    ),
    **_unsupported(
        "reweight-loss-based-on-position-frequency loss-on-targets-only noise-density mean-noise-span-length",
        "the loss is that of the next token at every position",
        TRAINING,
    ),
    **_unsupported("no-decoupled-weight-decay", "Adam decays weights apart from the gradient", TRAINING),
    **_unsupported("use-bnb-optimizer", "optimizers of 8 bits are not in this trainer", TRAINING),
    **_unsupported(
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


def _refused(names: str, line: str) -> dict[str, str]:
    return {f"--{name}": line for name in names.split()}


_GROUPS: Iterable[Mapping[str, str]] = (
    # Parallelism.
    _refused(
        "ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-fpdt-offloading",
        "sequences are computed piece by piece as token slices: use --num-token-slices",
    ),
    _refused(
        "hybrid-context-parallel", "all sequences are shared by the same number of ranks: use --context-parallel-size"
    ),
    _refused("standalone-embedding-stage", "the embedding belongs to the first stage: use --stage-partition"),
    _refused(
        "use-torch-fsdp2 use-custom-fsdp use-megatron-fsdp",
        "ZeRO takes the place of FSDP: use --zero-stage 1",
    ),
    # DeepSpeed.
    _refused(
        "cpu-optimizer cpu_torch_adam optimizer-cpu-offload fine-grained-activation-offloading offload-modules"
        " min-offloaded-tensor-size",
        "weights, states and activations stay on the accelerator: drop it",
    ),
    _refused("no-pipeline-parallel-zero", "there is always a pipeline, of one stage if need be: drop it"),
    _refused("deepscale", "it is an old name: use --deepspeed"),
    _refused("deepscale-config", "it is an old name: use --deepspeed-config"),
    _refused("deepspeed-mpi", "the launcher decides this: use deepspeed --launcher openmpi"),
    # Model.
    _refused("encoder-num-layers", "it has another name: use --num-layers"),
    _refused("add-position-embedding", "it is an old name: use --position-embedding-type learned_absolute"),
    _refused("onnx-safe", "GELU with the error function has a name of its own: use --activation gelu-exact"),
    _refused("use-te-activation-func", "it does not say which form of GELU it means: use --activation"),
    _refused("dropout", "it is ambiguous: use --hidden-dropout and --attention-dropout"),
    _refused("pad-vocab-size-to", "it is an old name: use --vocab-size and --make-vocab-size-divisible-by"),
    # Batch and training.
    _refused("batch-size", "it is ambiguous: use --micro-batch-size and --global-batch-size"),
    _refused("max-restarts", "it belongs to torchrun, before the name of the script: drop it here"),
    _refused("train-epochs", "training is counted in iterations: use --train-iters"),
    _refused("checkpoint-granularity", "it is an old name: use --recompute-granularity"),
    _refused("recompute", "it is ambiguous: use --recompute-granularity full"),
    _refused("yaml-cfg", "a file of settings is not read: use flags"),
    # Learning rate and regularization.
    _refused("warmup", "it is an old name: use --lr-warmup-fraction"),
    # Precision.
    _refused("disable-bf16-reduced-precision-matmul", "matrix products add up as torch has them by default: drop it"),
    _refused("batch-invariant-mode", "kernels are not chosen so: use --deterministic-mode"),
    # Data.
    _refused("encoder-seq-length", "it is ambiguous: use --seq-length"),
    _refused(
        "train-weighted-split-paths valid-weighted-split-paths test-weighted-split-paths",
        "data has another flag: use --train-data-path, --valid-data-path and --test-data-path",
    ),
    _refused(
        "tokenizer-metadata tokenizer-special-tokens tokenizer-sentencepiece-legacy tokenizer-hf-no-use-fast",
        "the tokens follow from the files of the tokenizer: use --vocab-size if the model has more",
    ),
    # Checkpoints.
    _refused("pretrained-checkpoint", "there is one flag for all checkpoints: use --load with --finetune"),
    _refused("most-recent-k", "it has another name: use --keep-last-n-checkpoints"),
    _refused(
        "use-mp-args-from-checkpoint-args",
        "the layout follows from flags: use --tensor-model-parallel-size and --pipeline-model-parallel-size",
    ),
    _refused(
        "ckpt-convert-format ckpt-convert-save",
        "this command only trains: use terapipe convert",
    ),
    # Evaluation and logging.
    _refused(
        "full-validation multiple-validation-sets validation-set-names start-eval-at-iter eval-global-batch-size"
        " eval-micro-batch-size",
        "evaluations read whole batches of training from one set: use --eval-iters",
    ),
    _refused("eval-only", "it has another name: use --skip-train"),
    _refused("barrier-with-L1-time", "timers need no barrier: drop it"),
)

REFUSED_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        **{flag.replace("_", "-"): line for group in _GROUPS for flag, line in group.items()},
        **UNSUPPORTED_FLAGS,
    }
)
"""Reason and remedy by flag, spelled with dashes."""
