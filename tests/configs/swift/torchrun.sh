# In the shape of modelscope/ms-swift examples/train/multi-node/torchrun/train_node1.sh @3602360a.
nnodes=2
nproc_per_node=4
torchrun --nproc_per_node=$nproc_per_node --nnodes=$nnodes --node_rank=0 \
    swift/cli/sft.py \
    --model Qwen/Qwen2.5-7B-Instruct \
    --tuner_type full \
    --dataset my/data \
    --torch_dtype bfloat16 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps $(expr 32 / $nproc_per_node / $nnodes) \
    --max_length 8192 \
    --deepspeed zero2
