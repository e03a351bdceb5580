# In the shape of modelscope/ms-swift examples/train/pretrain/train.sh @3602360a.
NPROC_PER_NODE=4 swift pt \
    --model Qwen/Qwen2.5-7B \
    --tuner_type full \
    --dataset my/data \
    --per_device_train_batch_size 2 \
    --packing true \
    --attn_impl flash_attn \
    --packing_length 16384 \
    --max_length 8192 \
    --deepspeed zero2_offload
