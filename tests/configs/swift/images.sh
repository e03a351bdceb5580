# In the shape of modelscope/ms-swift examples/train/multimodal @3602360a; the model is any that reads text alone.
NPROC_PER_NODE=2 swift sft \
    --model Qwen/Qwen2.5-7B-Instruct \
    --tuner_type full \
    --freeze_vit false \
    --freeze_aligner false \
    --max_pixels 1003520 \
    --max_length 2048 \
    --group_by_length true \
    --deepspeed '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}'
