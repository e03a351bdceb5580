#!/bin/bash
# In the shape of the command under "Optimization flags" in the README of pytorch/torchtune at 1814feb17, with the flags
# of its row "+ Fuse optimizer step into backward"
tune run full_finetune_single_device --config ./3B_full_single_device.yaml \
    dataset.packed=True \
    tokenizer.max_seq_len=4096 \
    batch_size=2 \
    compile=True \
    loss=torchtune.modules.loss.CEWithChunkedOutputLoss \
    enable_activation_checkpointing=True \
    optimizer_in_bwd=True \
    optimizer=torch.optim.AdamW
