"""Pipeline layers of a causal language model of Hugging Face's transformers, unmodified.

    module = TokenSlicePipelineModule(
        pipeline_layers(model), layout=layout, token_slices=cut, split_batch=split_batch, loss_fn=summed_loss
    )

`parts` finds the parts of a model by its structure, `layers` makes pipeline layers of them, `attention` lets them
attend across token slices, and `batches` reads what Hugging Face's data loaders yield. transformers itself is imported
when a model is handed over.
"""

from deepspeed_ext.transformers_layers.layers import TiledLogits
from deepspeed_ext.transformers_layers.pipeline import (
    gathered_state_dict,
    labelled_tokens,
    pipeline_layers,
    split_batch,
    summed_loss,
)

__all__ = ["TiledLogits", "gathered_state_dict", "labelled_tokens", "pipeline_layers", "split_batch", "summed_loss"]
