torchrun --nproc_per_node=4 --nnodes=1 train.py --model_name_or_path Qwen/Qwen2.5-7B-Instruct \
    --fsdp "full_shard auto_wrap" --fsdp_transformer_layer_cls_to_wrap Qwen2DecoderLayer \
    --bf16 --per_device_train_batch_size 1 --block_size 2048 --optim adafactor --num_train_epochs 3
