#!/usr/bin/env bash
# Draws a schedule before anything runs: as text here, as SVG and as a trace for Perfetto.
set -euo pipefail
terapipe plan --schedule 1f1b --stages 4 --micro-batches 2 --token-slices 4 \
    --svg schedule.svg --trace schedule.trace.json
