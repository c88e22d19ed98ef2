#!/usr/bin/env bash
# All GPUs of this machine; a process that dies is started again up to three times and goes on from the newest
# checkpoint. Everything behind DATA goes to vitral:  one-node.sh photos --batch 1024 --out runs/photos
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"  # cores a process; decoding has workers of its own
torchrun --standalone --nproc-per-node "${GPUS:-gpu}" --max-restarts 3 -m vitral train "$@"
