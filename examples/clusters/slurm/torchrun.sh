#!/usr/bin/env bash
#SBATCH --job-name=llama2-7b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# Slurm starts torchrun once on each node, and torchrun the ranks. If a rank fails, torchrun ends all of them and starts
# them again on the same nodes, three times at most; each time they go on from the newest whole checkpoint.
# https://docs.pytorch.org/docs/stable/elastic/run.html
set -euo pipefail
# On a file system that all nodes have: the checkout with its environment, data, tokenizer and checkpoints. The variables
# may be set when the job is submitted: DATA=/shared/corpus_text_document sbatch torchrun.sh
DATA=${DATA:?prefix of the preprocessed data}
TOKENIZER=${TOKENIZER:?directory with tokenizer.json}
CHECKPOINTS=${CHECKPOINTS:?directory of the checkpoints}
source "${VENV:-.venv}/bin/activate"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# Jobs that share a node meet on different ports.
srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node 8 --max_restarts 3 --rdzv_id "$SLURM_JOB_ID" \
    --rdzv_backend c10d --rdzv_endpoint "$first:$((20000 + SLURM_JOB_ID % 10000))" pretrain_gpt.py \
    --model-preset llama2-7b --seq-length 16384 --max-position-embeddings 16384 \
    --bf16 --zero-stage 1 --tensor-model-parallel-size 4 --sequence-parallel --recompute-activations \
    --pipeline-model-parallel-size 4 --num-token-slices 8 --token-slices balanced \
    --micro-batch-size 1 --global-batch-size 64 --train-iters 100000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta2 0.95 \
    --data-path "$DATA" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" \
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 --exit-duration-in-mins 1410 \
    --metrics-file "$CHECKPOINTS/metrics.jsonl"
