#!/bin/bash
# In the shape of simu_tools/megatron_scripts/scripts/run_pretrain_llama3.sh of MooreThreads/SimuMax at 4dcaae5,
# for its case llama3_70b_l12_tp1_pp2_dp4_mbc4_cef.

export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NUM_NODES=1

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)

MODEL_ARGS=(
    --num-layers 12
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --swiglu
    --normalization RMSNorm
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --use-mcore-models
    --no-position-embedding
)

TRAINING_ARGS=(
    --norm-epsilon 1e-5
    --disable-tp-comm-bulk-wgrad
    --disable-tp-comm-overlap-rs
    --seed 42
    --micro-batch-size 1
    --global-batch-size 16
    --init-method-std 0.008
    --no-bias-dropout-fusion
    --use-flash-attn
    --recompute-granularity full
    --recompute-method block
    --recompute-num-layers 0
    --distributed-backend nccl
    --bf16
    --cross-entropy-loss-fusion
    --cross-entropy-fusion-impl te
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 2
    --sequence-parallel
    --use-distributed-optimizer
)

DATA_ARGS=(
    --tokenizer-type NullTokenizer
    --vocab-size 128256
    --mock-data
    --no-create-attention-mask-in-dataloader
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${PARALLEL_ARGS[@]} \
    ${DATA_ARGS[@]}
