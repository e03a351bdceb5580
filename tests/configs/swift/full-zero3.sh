# In the shape of modelscope/ms-swift examples/train/full/qwen2_5_32b.sh @3602360a.
NPROC_PER_NODE=8 \
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
swift sft \
    --model Qwen/Qwen2.5-32B \
    --tuner_type full \
    --dataset my/data \
    --torch_dtype bfloat16 \
    --per_device_train_batch_size 1 \
    --learning_rate 1e-5 \
    --gradient_accumulation_steps 2 \
    --packing true \
    --attn_impl flash_attn \
    --max_length 8192 \
    --use_liger_kernel true \
    --deepspeed zero3
