#!/usr/bin/env bash
# The smallest real run: two stages on two CPU processes, four token slices. Takes the tokens that `make demo` leaves.
set -euo pipefail
export DS_ACCELERATOR=cpu
deepspeed --num_accelerators 2 pretrain_gpt.py \
    --pipeline-model-parallel-size 2 --num-token-slices 4 \
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 \
    --micro-batch-size 4 --global-batch-size 8 --train-iters 100 --lr 1e-3 \
    --data-path "${1:-runs/demo/speeches_text_document}" --tokenizer-type byte
