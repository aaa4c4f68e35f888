#!/usr/bin/env bash
# The best strategy of a tiny model on two processes of this machine, then a short run with it. Once measured, predictions
# are of this machine; without `measure` they would rest on a guess of what a CPU can do.
set -euo pipefail
out=${1:-runs/search}
mkdir -p "$out"
export DS_ACCELERATOR=cpu
model=examples/models/tiny.json cluster=examples/clusters/this-machine.json

terapipe search measure "$model" --num-processes 2 --budget-s 30 --json "$out/profile.json"
terapipe search rank "$model" "$cluster" --global-batch-size 8 --profile "$out/profile.json" \
    --output "$out/plan"
# Flags behind it win over those in it: `--data-path` with a tokenizer would train on text.
bash "$out/plan/launch.sh" --train-iters 20
echo "report: $out/plan/report.html (in a browser)"
