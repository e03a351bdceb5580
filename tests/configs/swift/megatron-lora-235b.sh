# In the shape of modelscope/ms-swift examples/megatron/lora/qwen3_235b.sh @3602360a: 8 GPUs of 80 GiB.
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' NPROC_PER_NODE=8 megatron sft \
    --model Qwen/Qwen3-235B-A22B-Instruct-2507 \
    --dataset my/data \
    --tuner_type lora \
    --tensor_model_parallel_size 4 \
    --expert_tensor_parallel_size 1 \
    --expert_model_parallel_size 8 \
    --micro_batch_size 8 \
    --global_batch_size 16 \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --max_length 2048 \
    --sequence_parallel true
