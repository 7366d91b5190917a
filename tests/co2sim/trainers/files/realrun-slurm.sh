#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
srun python -m realrun train -s slowmo --tau 12 --outer momentum=0.5 --batch 64 --context 256 \
  --optimizer sgd --lr 0.1 --size medium --resume
