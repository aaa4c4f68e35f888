#!/usr/bin/env bash
# Llama 2 7B at 16k tokens on the 32 GPUs of hostfile.example: 4 tensor-parallel ranks x 4 pipeline ranks x 2 replicas. Each
# pipeline rank has two stages of 4 layers, which makes bubbles half as long; 8 token slices,
# packed documents kept apart, norms and activations recomputed.
set -euo pipefail
data=${1:?prefix of the preprocessed data} tokenizer=${2:?directory with tokenizer.json}
deepspeed --hostfile hostfile pretrain_gpt.py --model-preset llama2-7b --seq-length 16384 --max-position-embeddings 16384 \
    --bf16 --zero-stage 1 --tensor-model-parallel-size 4 --sequence-parallel --recompute-activations \
    --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 \
    --num-token-slices 8 --token-slices balanced \
    --micro-batch-size 1 --global-batch-size 64 --train-iters 100000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta2 0.95 \
    --data-path "$data" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$tokenizer" \
    --reset-position-ids --reset-attention-mask --eod-mask-loss \
    --save checkpoints --load checkpoints --save-interval 1000 --tensorboard-dir runs --metrics-file metrics.jsonl
