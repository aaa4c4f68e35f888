#!/usr/bin/env bash
# Text to trained model in one go: corpus, tokens, training, generation, timeline. Called by `make demo`.
set -euo pipefail
out=${1:-runs/demo}
rm -rf "$out"
mkdir -p "$out"
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
# Two stages: on two GPUs, or on two CPU processes. One GPU holds one stage; token slices work there too.
stages=$((gpus == 1 ? 1 : 2))
precision=$([ "$gpus" -gt 0 ] && echo --bf16 || true)
[ "$gpus" -gt 0 ] || export DS_ACCELERATOR=cpu

echo "== corpus and tokens"
python examples/speeches.py --output "$out/speeches.jsonl"
terapipe preprocess --input "$out/speeches.jsonl" --output-prefix "$out/speeches" \
    --tokenizer-type byte --append-eod --workers 2

echo "== training: $stages stages, 4 token slices"
deepspeed --num_accelerators "$stages" pretrain_gpt.py $precision \
    --pipeline-model-parallel-size "$stages" --num-token-slices 4 --token-slices balanced \
    --num-layers 4 --hidden-size 192 --num-attention-heads 6 --seq-length 256 --init-method-std 0.06 \
    --micro-batch-size 2 --global-batch-size 4 --train-iters 1300 \
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 50 --weight-decay 0.1 --adam-beta2 0.99 \
    --data-path "$out/speeches_text_document" --tokenizer-type byte --split 97,3,0 \
    --eval-interval 325 --eval-iters 10 --log-interval 50 \
    --save "$out/checkpoints" --metrics-file "$out/metrics.jsonl" --timeline "$out/timeline" --timeline-iterations 48-50

echo "== what it writes after 1300 iterations"
terapipe generate --load "$out/checkpoints" --temperature 0.7 --max-new-tokens 200 \
    --prompt "My fellow citizens, the state of the Union "

echo "== what it executed, beside the simulation"
terapipe plan --timeline "$out/timeline"

echo "== the report of the run"
terapipe report "$out/metrics.jsonl" --output "$out/report.html"
echo "timeline: $out/timeline/timeline.html (in a browser) and timeline.trace.json (in Perfetto)"
