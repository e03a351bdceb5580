# In the manner of tutorials/finetune_lora.md of Lightning-AI/litgpt, 26857050.
litgpt finetune_lora checkpoints/meta-llama/Meta-Llama-3-8B --config lora.yaml --train.micro_batch_size 2 --devices 4
