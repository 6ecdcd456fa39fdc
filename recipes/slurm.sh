#!/usr/bin/env bash
# Trains on all nodes of a Slurm job: one launcher per node, one process per GPU. The arguments are a recipe and its flags.
#     sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=64 recipes/slurm.sh recipes/train_shppo.py --output_dir FOLDER
# Submit it from the checkout, which must be on a disk that all nodes share. CONFIG chooses the accelerate file.
#SBATCH --job-name=marcog_trl
#SBATCH --ntasks-per-node=1
set -euo pipefail
source recipes/setup.sh deepspeed
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
export CONFIG="${CONFIG:-recipes/zero3.yaml}" MAIN="${hosts%%$'\n'*}" PORT=$((20000 + SLURM_JOB_ID % 10000))
# Without --cpus-per-task, a node's processes and their sandboxes would share one core
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 bash -c '
    exec python recipes/launch.py --config_file "$CONFIG" --num_machines "$SLURM_NNODES" \
        --num_processes "$((SLURM_NNODES * SLURM_GPUS_ON_NODE))" --machine_rank "$SLURM_NODEID" \
        --main_process_ip "$MAIN" --main_process_port "$PORT" "$@"' launch "$@"
