"""Flags of Megatron-LM, Megatron-DeepSpeed and their relatives whose effect is always on.

Scripts pass them, so they are taken and change nothing. One that says something of the model is held against it: a
script must not train another model than it asks for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


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


def _each(names: str, reason: str, **settings: object) -> dict[str, AcceptedFlag]:
    return {f"--{name}": AcceptedFlag(reason=reason, **settings) for name in names.split()}  # type: ignore[arg-type]


_KERNELS = "the trainer chooses kernels for the machine; the result is the same"

ACCEPTED_FLAGS: Mapping[str, AcceptedFlag] = MappingProxyType(
    {
        # Attention.
        **_each(
            "use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder",
            "a flash kernel runs wherever one fits",
        ),
        **_each("attention-backend", _KERNELS, values=("flash", "fused", "unfused", "local", "auto")),
        **_each("no-create-attention-mask-in-dataloader", "no mask is read with the data"),
        **_each("attention-softmax-in-fp32", "softmax runs in fp32"),
        **_each(
            "no-query-key-layer-scaling apply-query-key-layer-scaling",
            "the scaling cancels out, and is not needed where softmax runs in fp32",
        ),
        **_each(
            "group-query-attention",
            "it is on if there are fewer key and value heads than query heads",
            needs="num_key_value_heads",
        ),
        # What the model is: true, or an error.
        **_each("add-bias-linear", "linear layers have biases", says=("disable_bias_linear", False)),
        # Kernels.
        **_each(
            "no-masked-softmax-fusion bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion"
            " no-rope-fusion no-persist-layer-norm no-gradient-accumulation-fusion cross-entropy-loss-fusion",
            _KERNELS,
        ),
        **_each("cross-entropy-fusion-impl", _KERNELS, values=("native", "te")),
        **_each("use-mcore-models use-legacy-models", "there is one implementation of the model"),
        **_each("transformer-impl", "there is one implementation of the model", values=("local", "transformer_engine")),
        # Ranks and memory.
        **_each("use-distributed-optimizer", "ZeRO 1 spreads the optimizer over the ranks", says=("zero_stage", 1)),
        **_each(
            "overlap-p2p-communication no-overlap-p2p-communication", "transfers between stages overlap computation"
        ),
        **_each(
            "overlap-grad-reduce",
            "gradients are reduced layer by layer, while the last backwards run",
            says=("no_overlap_grad_reduce", False),
        ),
        **_each("DDP-impl", "DeepSpeed reduces the gradients", values=("local", "torch", "FSDP")),
        **_each("enable-zbh1-exact-semantics", "all schedules train the same, to the last digits"),
        **_each(
            "no-contiguous-buffers-in-local-ddp no-async-tensor-model-parallel-allreduce"
            " no-scatter-gather-tensors-in-pipeline",
            "the engine plans the traffic; the result is the same",
        ),
        **_each("use-cpu-initialization lazy-mpu-init", "weights are made on the CPU, then moved"),
        **_each("decoupled-weight-decay", "Adam decays weights apart from the gradient"),
        **_each("ds-fused-adam", "the optimizer is apex's or torch's fused AdamW"),
        # Learning rate.
        **_each(
            "override-opt-param-scheduler override-lr-scheduler",
            "the learning rate follows from the flags and the iteration, whatever a checkpoint says",
        ),
        # Precision.
        **_each(
            "no-fp16-lm-cross-entropy fp16-lm-cross-entropy", "the loss is computed in fp32, which is exact enough"
        ),
        **_each("grad-reduce-in-bf16", "gradients are reduced in the type they add up in, which is no less exact"),
        **_each("embedding-weights-in-fp32", "a row that is looked up has the same digits"),
        **_each("use-precision-aware-optimizer", "the optimizer keeps weights, gradients and states in fp32"),
        # Data.
        **_each("repeated-dataloader", "after the last sample the data starts again"),
        # Logs.
        **_each("log-throughput", "the throughput is in every line of the log"),
        **_each(
            "log-learning-rate-to-tensorboard",
            "it is written to TensorBoard",
            says=("no_log_learning_rate_to_tensorboard", False),
        ),
        **_each(
            "log-loss-scale-to-tensorboard",
            "it is written to TensorBoard",
            says=("no_log_loss_scale_to_tensorboard", False),
        ),
    }
)
"""Flags that change nothing, and why, by their spelling with dashes."""
