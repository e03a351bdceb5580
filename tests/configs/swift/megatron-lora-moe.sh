# In the shape of modelscope/ms-swift examples/megatron/lora/moe.sh @3602360a: 2 GPUs, 62 GiB each.
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' NPROC_PER_NODE=2 megatron sft \
    --model Qwen/Qwen3-30B-A3B \
    --dataset my/data \
    --tuner_type lora \
    --lora_rank 8 \
    --target_modules all-linear \
    --expert_model_parallel_size 2 \
    --moe_permute_fusion true \
    --moe_grouped_gemm true \
    --micro_batch_size 8 \
    --global_batch_size 16 \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --cross_entropy_loss_fusion true \
    --max_length 2048 \
    --sequence_parallel true
