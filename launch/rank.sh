#!/bin/bash
# Run a program as one rank of a Slurm job, on a GPU of its own: srun bash rank.sh PROGRAM ...
set -eu
export RANK=$SLURM_PROCID

# Slurm names the GPUs that this process sees in one of these variables, or hides none of them. A
# process that sees several takes the one of its place on the node. It then sees no other GPU, and
# calls its own number 0.
variable=CUDA_VISIBLE_DEVICES
if [ -z "${CUDA_VISIBLE_DEVICES:-}" ] && [ -n "${ROCR_VISIBLE_DEVICES:-}" ]; then
  variable=ROCR_VISIBLE_DEVICES
fi
IFS=, read -r -a seen <<< "${!variable:-}"
case ${#seen[@]} in
  0) own=$SLURM_LOCALID ;;
  1) own=${seen[0]} ;;
  *) own=${seen[SLURM_LOCALID]} ;;
esac
unset CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES GPU_DEVICE_ORDINAL
export "$variable=$own" LOCAL_RANK=0

exec "$@"
