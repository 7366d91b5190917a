#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gres=gpu:h100:8
#SBATCH --ntasks-per-node=1
GPUS_PER_NODE=8
TP=${TP_SIZE:-4}; PP=2
MODEL_ARGS=(
    --num-layers 32     # as Llama 3 8B
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0
)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size $((GPUS_PER_NODE * SLURM_NNODES * 4)) --bf16 --lr 3e-4)
srun torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $SLURM_NNODES pretrain_gpt.py \
    "${MODEL_ARGS[@]}" ${TRAINING_ARGS[@]} --vocab-size 128256 \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} \
    --num-layers-per-virtual-pipeline-stage 4 --sequence-parallel --use-distributed-optimizer \
    --overlap-grad-reduce --fp8-format hybrid --fp8-recipe delayed
