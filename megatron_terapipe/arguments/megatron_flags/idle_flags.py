"""Flags of Megatron-LM, Megatron-DeepSpeed and their relatives that have no effect here, and say nothing of the model.

Two kinds: those that concern operation only (logs, checkpoint files, timing of messages, kernels), and those that have
no effect without another flag, which is refused here. Scripts pass them; one line at the start lists them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

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
