# The command line of the versions whose configs are Python.
NGPU=${NGPU:-"4"}
torchrun --nproc_per_node=${NGPU} --local-ranks-filter 0 -m torchtitan.train --module llama3 --config llama3_8b \
    --training.num_tokens_per_microbatch_per_dp_rank 16384 --training.max_context_length 8192 \
    --parallelism.no-enable_sequence_parallel --compile.enable
