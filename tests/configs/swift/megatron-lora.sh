# In the shape of modelscope/ms-swift examples/megatron/lora/dense.sh @3602360a.
NPROC_PER_NODE=2 megatron sft \
    --model Qwen/Qwen3-8B \
    --tuner_type lora \
    --dataset my/data \
    --tensor_model_parallel_size 2 \
    --micro_batch_size 1 \
    --global_batch_size 2 \
    --max_length 2048
