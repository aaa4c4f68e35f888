#!/usr/bin/env bash
#SBATCH --job-name=llama2-7b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# Slurm starts every rank: one task for each GPU. Adapt the lines above to your cluster, then `sbatch srun.sh`.
#
# The ranks find each other by Slurm's own variables, so no host or port is named. A job that ends, for whatever reason,
# is submitted again as it is: --load goes on from the newest whole checkpoint. --exit-duration-in-mins saves and ends
# half an hour before Slurm's limit of 24 hours.
# https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/srun.html
set -euo pipefail
# On a file system that all nodes have: the checkout with its environment, data, tokenizer and checkpoints. The variables
# may be set when the job is submitted: DATA=/shared/corpus_text_document sbatch srun.sh
DATA=${DATA:?prefix of the preprocessed data}
TOKENIZER=${TOKENIZER:?directory with tokenizer.json}
CHECKPOINTS=${CHECKPOINTS:?directory of the checkpoints}
source "${VENV:-.venv}/bin/activate"
# Since Slurm 22.05 srun does not take this number from the lines above.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# One failed rank ends the step, and with it all others.
srun --kill-on-bad-exit=1 python pretrain_gpt.py \
    --model-preset llama2-7b --seq-length 16384 --max-position-embeddings 16384 \
    --bf16 --zero-stage 1 --tensor-model-parallel-size 4 --sequence-parallel --recompute-activations \
    --pipeline-model-parallel-size 4 --num-token-slices 8 --token-slices balanced \
    --micro-batch-size 1 --global-batch-size 64 --train-iters 100000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta2 0.95 \
    --data-path "$DATA" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" \
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 --exit-duration-in-mins 1410 \
    --metrics-file "$CHECKPOINTS/metrics.jsonl"
