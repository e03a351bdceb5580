#!/bin/bash
# The arguments of tests/functional_tests/test_cases/gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist_uniform_full_recompute/
# model_config.yaml of NVIDIA/Megatron-LM at d98e8a64, as a launch script.

export CUDA_DEVICE_MAX_CONNECTIONS=1
export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0
export NCCL_ALGO=Ring
export CUBLAS_WORKSPACE_CONFIG=:4096:8

GPUS_PER_NODE=8
NUM_NODES=1

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)

MODEL_ARGS=(
    --num-layers 12
    --hidden-size 512
    --num-attention-heads 8
    --seq-length 1024
    --max-position-embeddings 1024
    --transformer-impl transformer_engine
    --use-mcore-models
)

TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 32
    --train-iters 100
    --lr-decay-iters 320000
    --distributed-backend nccl
    --lr 0.00015
    --lr-decay-style cosine
    --min-lr 1e-05
    --weight-decay 1e-2
    --clip-grad 1.0
    --lr-warmup-fraction 0.01
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --deterministic-mode
    --no-gradient-accumulation-fusion
    --attention-softmax-in-fp32
    --use-checkpoint-opt_param-scheduler
    --bf16
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
)

DATA_ARGS=(
    --vocab-file $VOCAB_FILE
    --merge-file $MERGE_FILE
    --data-path $DATA_PATH
    --data-cache-path $DATA_CACHE_PATH
    --split 949,50,1
)

LOGGING_ARGS=(
    --log-interval 1
    --save-interval 50
    --eval-interval 1000
    --eval-iters 10
    --save $SAVE
    --load $LOAD
    --log-params-norm
    --log-num-zeros-in-grad
    --log-validation-ppl-to-tensorboard
    --log-timers-to-tensorboard
    --tensorboard-dir $TENSORBOARD_DIR
    --log-memory-to-tensorboard
    --timing-log-level 0
    --async-save
    --use-persistent-ckpt-worker
    --ckpt-format torch_dist
    --dist-ckpt-strictness log_all
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${PARALLEL_ARGS[@]} \
    ${DATA_ARGS[@]} \
    ${LOGGING_ARGS[@]}
