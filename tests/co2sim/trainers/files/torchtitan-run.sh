# Flags of a command win over the file that it names.
NGPU=8 CONFIG_FILE="./torchtitan-hsdp.toml" ./run_train.sh \
    --training.local_batch_size 1 --parallelism.data_parallel_replicate_degree=1 --model.print_after_conversion
