#!/usr/bin/env bash
# A mixture of 8 experts on the text of the demo: two ranks with half of the experts each, four token slices, two minutes on
# two CPU cores. With STAGES=2: two stages of two expert-parallel ranks, on four ranks.
set -euo pipefail
out=${1:-runs/experts}
stages=${STAGES:-1}
ranks=$((2 * stages))
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
precision=$([ "$gpus" -ge "$ranks" ] && echo --bf16 || true)
[ "$gpus" -ge "$ranks" ] || export DS_ACCELERATOR=cpu
rm -rf "$out"
mkdir -p "$out"

python examples/speeches.py --output "$out/speeches.jsonl"
terapipe preprocess --input "$out/speeches.jsonl" --output-prefix "$out/speeches" \
    --tokenizer-type byte --append-eod --workers 2

deepspeed --num_accelerators "$ranks" pretrain_gpt.py $precision \
    --pipeline-model-parallel-size "$stages" --expert-model-parallel-size 2 --num-token-slices 4 \
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --init-method-std 0.06 \
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-aux-loss-coeff 0.01 \
    --micro-batch-size 2 --global-batch-size 4 --train-iters 300 \
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 50 --weight-decay 0.1 --adam-beta2 0.99 \
    --data-path "$out/speeches_text_document" --tokenizer-type byte --split 97,3,0 \
    --eval-interval 150 --eval-iters 10 --log-interval 20 --metrics-file "$out/metrics.jsonl"

terapipe report "$out/metrics.jsonl" --output "$out/report.html"
