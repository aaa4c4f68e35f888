#!/usr/bin/env bash
# GPT-3 XL (1.3B) at 8k tokens on the 32 GPUs of hostfile.example: 8 stages x 4 replicas, bf16, ZeRO 1. Weight gradients are
# computed where a stage would idle, the 8 token slices are those with which that takes least, and the last stage has fewer
# layers, because it also has the output layer.
set -euo pipefail
data=${1:?prefix of the preprocessed data} vocab=${2:?encoder.json} merges=${3:?vocab.bpe}
deepspeed --hostfile hostfile pretrain_gpt.py --bf16 --zero-stage 1 \
    --pipeline-model-parallel-size 8 --decoder-last-pipeline-num-layers 2 \
    --pipeline-schedule zero-bubble --num-token-slices 8 --token-slices auto \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 8192 \
    --micro-batch-size 1 --global-batch-size 64 --train-iters 100000 \
    --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-iters 1000 --weight-decay 0.1 --adam-beta2 0.95 \
    --data-path "$data" --tokenizer-type GPT2BPETokenizer --vocab-file "$vocab" --merge-file "$merges" \
    --save checkpoints --load checkpoints --save-interval 1000 --metrics-file metrics.jsonl
