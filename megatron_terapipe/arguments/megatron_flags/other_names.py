"""Names that other programs have for our flags: what a newcomer types. They are not accepted; the error names ours."""

from collections.abc import Mapping
from types import MappingProxyType

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
