#!/usr/bin/env bash
# In the manner of the recipes' heads of meta-pytorch/torchtune, bd2a0fc7.
set -euo pipefail
NGPU=8
tune run --nnodes 1 --nproc_per_node $NGPU full_finetune_distributed --config ./8B_full.yaml batch_size=4 \
    optimizer.lr=1e-5 enable_activation_checkpointing=True
