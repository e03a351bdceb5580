# In the manner of docs/ of pytorch/torchtitan, 0.2: its run_train.sh takes the file and the GPUs from variables.
CONFIG_FILE="./llama3_8b.toml" NGPU=4 ./run_train.sh --training.seq_len 4096 --parallelism.tensor_parallel_degree=2
