#!/bin/bash
GPUS=$(nvidia-smi -L | wc -l)
deepspeed --num_gpus $GPUS train.py \
    --deepspeed ./deepspeed-auto.json \
    --model_name_or_path lmsys/vicuna-13b-v1.5 --bf16 True --fp16 False \
    --per_device_train_batch_size 16 --gradient_accumulation_steps 1 \
    --model_max_length 2048 --gradient_checkpointing True --evaluation_strategy "no" \
    --lora_enable True --lora_r 128 --lora_alpha 256
