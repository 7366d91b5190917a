STAGE=1
cat <<EOT > ds_config.json
{ "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2,
  "zero_optimization": { "stage": $STAGE }, "bf16": { "enabled": true } }
EOT
deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py --deepspeed --deepspeed_config ds_config.json \
  --zero-stage $STAGE --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 \
  --micro-batch-size 2 --global-batch-size 64 --tensor-model-parallel-size 2 --no-pipeline-parallel
