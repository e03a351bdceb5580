#!/bin/bash
# In the manner of examples/README.md of hiyouga/LLaMA-Factory, ff6d4d12.
export CUDA_VISIBLE_DEVICES=0,1,2,3
FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=0 MASTER_ADDR=192.168.0.1 llamafactory-cli train examples/train_full/qwen3_full_sft.yaml \
    per_device_train_batch_size=4 \
    learning_rate=1e-5
