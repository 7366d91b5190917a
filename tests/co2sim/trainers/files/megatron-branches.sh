MODEL_SIZE=13B
if [ "$MODEL_SIZE" = "7B" ]; then
  LAYERS=32; HIDDEN=4096; HEADS=32
elif [[ $MODEL_SIZE == "13B" ]]; then
  LAYERS=40
  HIDDEN=5120; HEADS=40
fi
case ${RECOMPUTE} in
  "") AC="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1" ;;
  selective|sel) AC="--recompute-activations" ;;
esac
[ -z "$MBS" ] && MBS=2
echo "--tensor-model-parallel-size 64 is no flag of a training"
CMD="python -m torch.distributed.launch --nproc_per_node 8 pretrain_gpt.py \
  --num-layers $LAYERS --hidden-size $HIDDEN --num-attention-heads $HEADS --seq-length 2048 \
  --micro-batch-size $MBS --global-batch-size 256 --tensor-model-parallel-size 2 --fp16 $AC"
eval $CMD
