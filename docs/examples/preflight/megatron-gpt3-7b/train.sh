#!/bin/bash
# In the shape of NVIDIA/Megatron-LM at d98e8a64,
# tests/functional_tests/test_cases/gpt/gpt3_7b_tp4_pp1_memory_speed/model_config.yaml, as a launch script
export CUDA_DEVICE_MAX_CONNECTIONS=1
export CUBLAS_WORKSPACE_CONFIG=:4096:8
export NCCL_ALGO=Ring

torchrun --nproc_per_node 8 pretrain_gpt.py \
    --num-layers 32 \
    --hidden-size 4096 \
    --num-attention-heads 32 \
    --group-query-attention \
    --num-query-groups 8 \
    --untie-embeddings-and-output-weights \
    --micro-batch-size 2 \
    --global-batch-size 8 \
    --seq-length 8192 \
    --max-position-embeddings 8192 \
    --train-iters 25 \
    --tokenizer-type NullTokenizer \
    --vocab-size 131073 \
    --mock-data \
    --split 949,50,1 \
    --distributed-backend nccl \
    --lr 0.00015 \
    --lr-decay-style cosine \
    --min-lr 1.0e-5 \
    --weight-decay 1e-2 \
    --clip-grad 1.0 \
    --lr-warmup-fraction .01 \
    --transformer-impl transformer_engine \
    --tensor-model-parallel-size 4 \
    --pipeline-model-parallel-size 1 \
    --use-distributed-optimizer \
    --overlap-grad-reduce \
    --overlap-param-gather \
    --deterministic-mode \
    --no-gradient-accumulation-fusion \
    --use-mcore-models \
    --log-memory-to-tensorboard \
    --bf16
