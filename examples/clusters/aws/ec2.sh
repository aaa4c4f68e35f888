#!/usr/bin/env bash
# Instances of EC2 without a scheduler: DeepSpeed's launcher over ssh, started on the first of them.
#   ./ec2.sh 10.0.0.11 10.0.0.12 10.0.0.13 10.0.0.14      # their private addresses
#
# They are in one subnet and one placement group, with EFA and a Deep Learning AMI, and their security group allows all
# traffic from and to itself. Each reaches the others by ssh without a password, and all mount one file system in one
# place, with the checkout and its environment.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: $0 ADDRESS..." >&2; exit 2; }
# On a file system that all hosts have.
DATA=${DATA:?prefix of the preprocessed data}
TOKENIZER=${TOKENIZER:?directory with tokenizer.json}
CHECKPOINTS=${CHECKPOINTS:?directory of the checkpoints}
source "${VENV:-.venv}/bin/activate"
printf '%s slots=8\n' "$@" > hostfile

# ssh takes no variable along. DeepSpeed sends those of this file to every host, and prints them: no keys in it.
# EFA by libfabric, with remote memory access between GPUs, which p4d must be asked for; and an ordinary network card for
# the first contact, neither loopback nor a container's bridge.
export DS_ENV_FILE=efa.env
cat > "$DS_ENV_FILE" <<'VARIABLES'
FI_PROVIDER=efa
FI_EFA_USE_DEVICE_RDMA=1
NCCL_SOCKET_IFNAME=^lo,docker
VARIABLES

deepspeed --hostfile hostfile pretrain_gpt.py \
    --model-preset llama2-7b --seq-length 16384 --max-position-embeddings 16384 \
    --bf16 --zero-stage 1 --tensor-model-parallel-size 4 --sequence-parallel --recompute-activations \
    --pipeline-model-parallel-size 4 --num-token-slices 8 --token-slices balanced \
    --micro-batch-size 1 --global-batch-size 64 --train-iters 100000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta2 0.95 \
    --data-path "$DATA" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" \
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 \
    --metrics-file "$CHECKPOINTS/metrics.jsonl"
