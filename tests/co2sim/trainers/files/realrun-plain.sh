python -m realrun train --nproc 4 --strategy ddp --batch 32 --evaluate after
