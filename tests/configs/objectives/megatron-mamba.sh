#!/bin/bash
# In the shape of examples/mamba/train.sh of NVIDIA/Megatron-LM, d98e8a64.

MODEL_SCALE="8B" # or "800M"
case "${MODEL_SCALE}" in
    "800M")
        TENSOR_MODEL_PARALLEL_SIZE=1
        HIDDEN_SIZE=1024
        GLOBAL_BATCH_SIZE=32
        ;;
    "8B")
        TENSOR_MODEL_PARALLEL_SIZE=4
        HIDDEN_SIZE=4096
        GLOBAL_BATCH_SIZE=8
        ;;
    *)
        echo "Invalid version specified"
        exit 1
        ;;
esac
SEQ_LEN=4096
TRAIN_SAMPLES=$((300000000000 / SEQ_LEN)) # 300B tokens

options=" \
       --tensor-model-parallel-size ${TENSOR_MODEL_PARALLEL_SIZE} \
       --num-layers 52 \
       --hidden-size ${HIDDEN_SIZE} \
       --seq-length ${SEQ_LEN} \
       --train-samples ${TRAIN_SAMPLES} \
       --micro-batch-size 4 \
       --global-batch-size ${GLOBAL_BATCH_SIZE} \
       --data-path $1 \
       --bf16"

torchrun --nproc_per_node 8 ../../pretrain_mamba.py ${options}
