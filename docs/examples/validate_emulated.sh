#!/bin/sh
# Calibrate an emulated cluster once, then run all grids of the tiny model on it, with overlap and
# without it, and all layouts that torch's FSDP2 and tensor parallelism execute. The script takes a
# quarter of an hour to half an hour, and it needs root.
#
#   sudo env "PATH=$PATH" sh docs/examples/validate_emulated.sh frontier-mini FOLDER
set -e
spec=$1
folder=$2
on_cluster() { axonn-tune emulate --spec "$spec" -- axonn-tune "$@"; }

mkdir -p "$folder"
on_cluster calibrate --quick --most-shapes 20 --model tiny --gpus 8 --global-batch 8 \
  --name "$spec" --output "$folder/$spec.yaml"
for overlap in overlap no-overlap; do
  report=$folder/$spec-$overlap
  on_cluster validate --model tiny --machine "$folder/$spec.yaml" --steps 5 --$overlap \
    --output "$report.json" --plot "$report.png" | tee "$report.txt"
done
for strategy in hsdp megatron-tp; do
  report=$folder/$spec-$strategy
  on_cluster validate --model tiny --machine "$folder/$spec.yaml" --steps 8 --strategy $strategy \
    --no-ors --recompute none --output "$report.json" --plot "$report.png" | tee "$report.txt"
done
