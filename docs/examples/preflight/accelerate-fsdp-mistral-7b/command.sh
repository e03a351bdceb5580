#!/bin/bash
# In the shape of the commands that foundation-model-stack/fms-acceleration at 24bdadb runs: scripts/benchmarks/benchmark.py
# with scenarios.yaml (full-finetuning) and defaults.yaml
accelerate launch --config_file accelerate.yaml --num_processes=2 --main_process_port=29511 -m tuning.sft_trainer \
    --model_name_or_path mistralai/Mistral-7B-v0.1 \
    --torch_dtype bfloat16 \
    --use_flash_attn True \
    --packing True \
    --max_seq_len 4096 \
    --learning_rate 2e-5 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 1 \
    --gradient_checkpointing True \
    --include_tokens_per_second True \
    --num_train_epochs 1 \
    --evaluation_strategy no \
    --save_strategy no \
    --weight_decay 0.01 \
    --warmup_steps 10 \
    --adam_epsilon 1e-4 \
    --lr_scheduler_type linear \
    --logging_strategy steps \
    --logging_steps 10 \
    --max_steps 100 \
    --output_dir results
