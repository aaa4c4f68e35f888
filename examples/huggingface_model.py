"""Trains a model of transformers in token slices: `deepspeed --num_accelerators 2 examples/huggingface_model.py`."""

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers_layers import pipeline_layers, split_batch, summed_loss  # the folder beside this file

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.initialize import init_distributed, initialize
from deepspeed_ext.runtime.module import TokenSlicePipelineModule

init_distributed()
torch.manual_seed(0)  # every rank makes the same model and reads the same data
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))  # or AutoModelForCausalLM.from_pretrained("gpt2")
rows = [(start + torch.arange(64) * step) % 32 for start in range(32) for step in (1, 2, 3)]
loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=8)
module = TokenSlicePipelineModule(
    pipeline_layers(model),
    layout=ParallelLayout(pipeline_parallel_size=2, num_token_slices=4),
    token_slices=TokenSlices((20, 16, 15, 13)),
    split_batch=split_batch,
    loss_fn=summed_loss,
)
config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "steps_per_print": 5}
engine, *_ = initialize(module, config, optimizer=torch.optim.Adam(module.parameters(), lr=3e-3))
data = iter(deepspeed.utils.RepeatingLoader(loader))
for _ in range(30):
    loss = engine.train_batch(data)
