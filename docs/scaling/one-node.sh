#!/usr/bin/env bash
# Train on all GPUs of this machine. If a process dies, torchrun restarts all of them from the newest checkpoint, up to
# three times. All arguments are passed to vitral train:  one-node.sh photos --batch-size 1024 --out runs/photos
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"  # threads per process; decoding has its own workers
torchrun --standalone --nproc-per-node "${GPUS:-gpu}" --max-restarts 3 -m vitral train "$@"
