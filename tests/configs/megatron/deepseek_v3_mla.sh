#!/bin/bash
# In the shape of simu_tools/megatron_scripts/scripts/run_pretrain_deepseekv2.sh of MooreThreads/SimuMax at 4dcaae5,
# with the sizes of DeepSeek-V3 and four blocks.

export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NUM_NODES=1

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 128
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --swiglu
    --normalization RMSNorm
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

TRAINING_ARGS=(
    --qk-layernorm
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --num-experts 256
    --moe-router-topk 8
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-layer-freq '([0]*1+[1]*3)'
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-router-score-function sigmoid
    --moe-expert-capacity-factor 1.0
    --moe-pad-expert-input-to-capacity
    --micro-batch-size 1
    --global-batch-size 32
    --bf16
    --recompute-granularity selective
    --recompute-modules mla_up_proj moe_act
    --cross-entropy-loss-fusion
    --cross-entropy-fusion-impl te
)

PARALLEL_ARGS=(
    --expert-model-parallel-size 8
    --use-distributed-optimizer
)

DATA_ARGS=(
    --tokenizer-type NullTokenizer
    --vocab-size 129280
    --no-create-attention-mask-in-dataloader
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${PARALLEL_ARGS[@]} \
    ${DATA_ARGS[@]}
