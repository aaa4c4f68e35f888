"""Flags of Megatron-LM, Megatron-DeepSpeed and their relatives that are refused, each with its reason and remedy.

A flag that changes what is trained is never ignored. A script that passes one of these ends with one line that
says what to do about it: which flag says the same here, or, for `UNSUPPORTED_FLAGS`, that nothing does.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from megatron_terapipe.arguments.megatron_flags.unsupported_flags import UNSUPPORTED_FLAGS


def _each(names: str, line: str) -> dict[str, str]:
    return {f"--{name}": line for name in names.split()}


_GROUPS: Iterable[Mapping[str, str]] = (
    # Parallelism.
    _each(
        "ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-fpdt-offloading",
        "sequences are computed piece by piece as token slices: use --num-token-slices",
    ),
    _each(
        "hybrid-context-parallel", "all sequences are shared by the same number of ranks: use --context-parallel-size"
    ),
    _each("standalone-embedding-stage", "the embedding belongs to the first stage: use --stage-partition"),
    _each(
        "use-torch-fsdp2 use-custom-fsdp use-megatron-fsdp",
        "ZeRO takes the place of FSDP: use --zero-stage 1",
    ),
    # DeepSpeed.
    _each(
        "cpu-optimizer cpu_torch_adam optimizer-cpu-offload fine-grained-activation-offloading offload-modules"
        " min-offloaded-tensor-size",
        "weights, states and activations stay on the accelerator: drop it",
    ),
    _each("no-pipeline-parallel-zero", "there is always a pipeline, of one stage if need be: drop it"),
    _each("deepscale", "it is an old name: use --deepspeed"),
    _each("deepscale-config", "it is an old name: use --deepspeed-config"),
    _each("deepspeed-mpi", "the launcher decides this: use deepspeed --launcher openmpi"),
    # Model.
    _each("encoder-num-layers", "it has another name: use --num-layers"),
    _each("add-position-embedding", "it is an old name: use --position-embedding-type learned_absolute"),
    _each("onnx-safe", "GELU with the error function has a name of its own: use --activation gelu-exact"),
    _each("use-te-activation-func", "it does not say which form of GELU it means: use --activation"),
    _each("dropout", "it is ambiguous: use --hidden-dropout and --attention-dropout"),
    _each("pad-vocab-size-to", "it is an old name: use --vocab-size and --make-vocab-size-divisible-by"),
    # Batch and training.
    _each("batch-size", "it is ambiguous: use --micro-batch-size and --global-batch-size"),
    _each("max-restarts", "it belongs to torchrun, before the name of the script: drop it here"),
    _each("train-epochs", "training is counted in iterations: use --train-iters"),
    _each("checkpoint-granularity", "it is an old name: use --recompute-granularity"),
    _each("recompute", "it is ambiguous: use --recompute-granularity full"),
    _each("yaml-cfg", "a file of settings is not read: use flags"),
    # Learning rate and regularization.
    _each("warmup", "it is an old name: use --lr-warmup-fraction"),
    # Precision.
    _each("disable-bf16-reduced-precision-matmul", "matrix products add up as torch has them by default: drop it"),
    _each("batch-invariant-mode", "kernels are not chosen so: use --deterministic-mode"),
    # Data.
    _each("encoder-seq-length", "it is ambiguous: use --seq-length"),
    _each(
        "train-weighted-split-paths valid-weighted-split-paths test-weighted-split-paths",
        "data has another flag: use --train-data-path, --valid-data-path and --test-data-path",
    ),
    _each(
        "tokenizer-metadata tokenizer-special-tokens tokenizer-sentencepiece-legacy tokenizer-hf-no-use-fast",
        "the tokens follow from the files of the tokenizer: use --vocab-size if the model has more",
    ),
    # Checkpoints.
    _each("pretrained-checkpoint", "there is one flag for all checkpoints: use --load with --finetune"),
    _each("most-recent-k", "it has another name: use --keep-last-n-checkpoints"),
    _each(
        "use-mp-args-from-checkpoint-args",
        "the layout follows from flags: use --tensor-model-parallel-size and --pipeline-model-parallel-size",
    ),
    _each(
        "ckpt-convert-format ckpt-convert-save",
        "this command only trains: use terapipe convert",
    ),
    # Evaluation and logging.
    _each(
        "full-validation multiple-validation-sets validation-set-names start-eval-at-iter eval-global-batch-size"
        " eval-micro-batch-size",
        "evaluations read whole batches of training from one set: use --eval-iters",
    ),
    _each("eval-only", "it has another name: use --skip-train"),
    _each("barrier-with-L1-time", "timers need no barrier: drop it"),
)

REFUSED_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        **{flag.replace("_", "-"): line for group in _GROUPS for flag, line in group.items()},
        **UNSUPPORTED_FLAGS,
    }
)
"""Reason and remedy by flag, spelled with dashes."""
