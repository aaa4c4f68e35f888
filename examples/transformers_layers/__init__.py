"""Pipeline layers of a causal language model of Hugging Face's transformers, unmodified.

    module = TokenSlicePipelineModule(
        pipeline_layers(model), layout=layout, token_slices=cut, split_batch=split_batch, loss_fn=summed_loss
    )

Copy this folder beside your program, or name `examples` in PYTHONPATH. `layers` has the layers and their attention over
token slices, `pipeline` finds the parts of a model and splits batches of Hugging Face's data loaders.
"""

from .layers import TiledLogits
from .pipeline import (
    gathered_state_dict,
    labelled_tokens,
    pipeline_layers,
    read_checkpoint,
    split_batch,
    summed_loss,
)

__all__ = [
    "TiledLogits",
    "gathered_state_dict",
    "labelled_tokens",
    "pipeline_layers",
    "read_checkpoint",
    "split_batch",
    "summed_loss",
]
