# In the shape of modelscope/ms-swift examples/train/rlhf/dpo @3602360a.
NPROC_PER_NODE=4 swift rlhf --rlhf_type dpo --model Qwen/Qwen2.5-7B-Instruct --dataset my/pairs --max_length 2048
