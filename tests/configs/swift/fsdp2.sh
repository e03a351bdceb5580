# In the shape of modelscope/ms-swift examples/train/multi-gpu/fsdp2_lora @3602360a, with its own table of FSDP 2.
NPROC_PER_NODE=2 \
swift sft \
    --model Qwen/Qwen2.5-7B-Instruct \
    --tuner_type lora \
    --dataset my/data \
    --torch_dtype bfloat16 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 8 \
    --max_length 2048 \
    --fsdp fsdp2
