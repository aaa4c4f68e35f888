#!/usr/bin/env bash
#SBATCH --job-name=llama2-7b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# DeepSpeed's launcher, which runs srun. Take srun.sh instead unless your scripts need DeepSpeed's flags, such as
# --include: the ranks are the same.
# https://www.deepspeed.ai/getting-started/#multi-node-environment-variables
set -euo pipefail
# On a file system that all nodes have: the checkout with its environment, data, tokenizer and checkpoints. The variables
# may be set when the job is submitted: DATA=/shared/corpus_text_document sbatch deepspeed.sh
DATA=${DATA:?prefix of the preprocessed data}
TOKENIZER=${TOKENIZER:?directory with tokenizer.json}
CHECKPOINTS=${CHECKPOINTS:?directory of the checkpoints}
source "${VENV:-.venv}/bin/activate"
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
hostfile=hostfile-$SLURM_JOB_ID
sed 's/$/ slots=8/' <<< "$hosts" > "$hostfile"
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# With the address of the first host, DeepSpeed does not ask it by ssh.
deepspeed --hostfile "$hostfile" --launcher slurm --launcher_args "--ntasks-per-node=8 --kill-on-bad-exit=1" \
    --no_ssh_check --master_addr "$(head -n 1 <<< "$hosts")" --no_local_rank pretrain_gpt.py \
    --model-preset llama2-7b --seq-length 16384 --max-position-embeddings 16384 \
    --bf16 --zero-stage 1 --tensor-model-parallel-size 4 --sequence-parallel --recompute-activations \
    --pipeline-model-parallel-size 4 --num-token-slices 8 --token-slices balanced \
    --micro-batch-size 1 --global-batch-size 64 --train-iters 100000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta2 0.95 \
    --data-path "$DATA" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" \
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 --exit-duration-in-mins 1410 \
    --metrics-file "$CHECKPOINTS/metrics.jsonl"
