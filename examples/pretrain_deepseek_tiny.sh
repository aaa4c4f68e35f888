#!/usr/bin/env bash
# A model of 10 M parameters shaped as DeepSeek-V3, on the text of the demo: latent attention, experts, and a layer that
# predicts a further token; two stages, four token slices, two minutes on two CPU cores.
set -euo pipefail
out=${1:-runs/deepseek_tiny}
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
precision=$([ "$gpus" -ge 2 ] && echo --bf16 || true)
[ "$gpus" -ge 2 ] || export DS_ACCELERATOR=cpu
rm -rf "$out"
mkdir -p "$out"

python examples/speeches.py --output "$out/speeches.jsonl"
terapipe preprocess --input "$out/speeches.jsonl" --output-prefix "$out/speeches" \
    --tokenizer-type byte --append-eod --workers 2

deepspeed --num_accelerators 2 pretrain_gpt.py $precision \
    --pipeline-model-parallel-size 2 --num-token-slices 4 \
    --num-layers 4 --hidden-size 192 --num-attention-heads 6 --seq-length 256 --init-method-std 0.05 \
    --use-rotary-position-embeddings --normalization RMSNorm --swiglu --disable-bias-linear --ffn-hidden-size 512 \
    --untie-embeddings-and-output-weights --multi-latent-attention --qk-layernorm \
    --q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 \
    --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 224 --moe-shared-expert-intermediate-size 224 \
    --moe-layer-freq "[0]+[1]*3" --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-aux-loss-coeff 0.02 \
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3 \
    --micro-batch-size 2 --global-batch-size 4 --train-iters 150 \
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95 \
    --data-path "$out/speeches_text_document" --tokenizer-type byte --split 97,3,0 \
    --eval-interval 100 --eval-iters 10 --log-interval 20 --metrics-file "$out/metrics.jsonl"

terapipe report "$out/metrics.jsonl" --output "$out/report.html"
