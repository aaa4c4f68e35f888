"""Trains a causal model of Hugging Face's transformers, by its own modules, with the whole trainer.

    deepspeed --num_accelerators 2 examples/pretrain_huggingface_model.py --hf-model FOLDER \
        --pipeline-model-parallel-size 2 --num-token-slices 4 --seq-length 1024 --micro-batch-size 1 \
        --global-batch-size 8 --train-iters 100 --lr 1e-5 --save checkpoints \
        --data-path corpus_text_document --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER

FOLDER has the `config.json` and the weights of a model; the path of a `config.json` starts from new weights. Afterwards
`read_checkpoint` of `transformers_layers` gives the trained weights to the model, for its `save_pretrained`.
"""

import argparse
import os
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers_layers import pipeline_layers, summed_loss  # the folder beside this file

from megatron_terapipe.training.pretrain import pretrain


def flags(parser, required=True):
    """Add the flags of this program; `config.own` has their values."""
    text = "folder of a model, or a config.json for new weights"
    parser.add_argument("--hf-model", required=required, metavar="PATH", help=text, type=existing)


def existing(path):
    """Return a path that exists; models are not downloaded by every rank."""
    if not os.path.exists(path):
        raise argparse.ArgumentTypeError(f"{path} is not here: download the model, and give its folder")
    return path


def layers(config, ranks):
    """Return the layers from token ids to logits, which are computed for some tokens at a time."""
    path = config.own.hf_model
    with torch.device("cpu"):  # Each rank makes the whole model, and moves the layers of its stage to its device.
        if path.endswith(".json"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return pipeline_layers(model, tiled_logits=True)


def loss(logits, labels):
    """Return the mean cross-entropy of the labelled tokens."""
    targets, mask = labels
    return summed_loss(logits, targets.masked_fill(mask == 0, -100)) / mask.sum().clamp(min=1)


SIZES = {
    "num-layers": "num_hidden_layers",
    **{name.replace("_", "-"): name for name in ("hidden_size", "num_attention_heads", "vocab_size")},
    "max-position-embeddings": "max_position_embeddings",
}
"""Flags of the trainer that a model decides, and its own names for them."""


def sizes_of_model():
    """Return these flags with the values of the model of the command line."""
    parser = argparse.ArgumentParser(add_help=False)
    flags(parser, required=False)
    path = parser.parse_known_args()[0].hf_model
    model = None if path is None else AutoConfig.from_pretrained(path)
    return [f"--{flag}={getattr(model, name)}" for flag, name in SIZES.items() if getattr(model, name, None)]


if __name__ == "__main__":
    sys.argv[1:1] = sizes_of_model()  # Before the words of the user: of a flag given twice, the last one counts.
    sys.exit(pretrain(layers, loss=loss, flags=flags))
