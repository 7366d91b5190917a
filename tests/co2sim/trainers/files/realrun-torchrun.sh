#!/bin/bash
TAU=24
torchrun --nproc_per_node 8 --nnodes 4 -m realrun train --backend nccl --steps 2000 \
  --strategy 'co2(tau=24, delay=3, worker=node)' --batch 128 --optimizer adamw --out runs/tau$TAU
