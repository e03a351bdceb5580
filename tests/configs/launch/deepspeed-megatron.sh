#!/bin/bash
# In the shape of run_fp16.sh of bigscience-workshop/Megatron-DeepSpeed, 8387ae17.

DIR=`pwd`
CONFIG_JSON="/tmp/ds_config.json"
USE_DEEPSPEED=1
ZERO_STAGE=1
TP=1
PP=1
DP=2
WORLD_SIZE=$((TP*PP*DP))
MICRO_BATCH=4
DTYPE="fp16"

while [[ $# -gt 0 ]]
do
key="$1"
case $key in
    --no-deepspeed)
    USE_DEEPSPEED=0;
    shift
    ;;
    -z|--zero-stage)
    ZERO_STAGE=$2;
    shift
    ;;
    *)
    echo "Unknown argument(s)"
    usage
    exit 1
    shift
    ;;
esac
done

options=" \
	--tensor-model-parallel-size $TP \
        --num-layers 24 \
        --hidden-size 1024 \
	--micro-batch-size $MICRO_BATCH \
        --${DTYPE} \
	--checkpoint-activations \
        "

if [[ ${USE_DEEPSPEED} -eq 1 ]]; then
	echo "Using DeepSpeed"
	options="${options} \
		--deepspeed \
		--deepspeed_config=${CONFIG_JSON} \
	"
fi

cat <<EOT > $CONFIG_JSON
{
  "train_batch_size" : 64,
  "train_micro_batch_size_per_gpu": $MICRO_BATCH,
  "zero_optimization": {
    "stage": $ZERO_STAGE
  },
  "fp16": {
    "enabled": true
  }
}
EOT

WORKER_STR="--num_nodes 1 --num_gpus $WORLD_SIZE"
#WORKER_STR="-i worker-0:0,1,2,3"
run_cmd="deepspeed --master_port 29600 $WORKER_STR ${DIR}/pretrain_gpt.py $@ ${options}"

echo ${run_cmd}
eval ${run_cmd}
