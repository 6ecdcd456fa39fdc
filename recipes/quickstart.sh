#!/usr/bin/env bash
# Sets up a virtual environment (.venv) with the tested versions and trains a team on the embedded default, on CPU.
# Flags are passed on to recipes/train_magrpo.py, for example: bash recipes/quickstart.sh --seed 1
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # started with another shell
if [ "${BASH_SOURCE[0]}" != "$0" ]; then  # sourced: what follows would change, and end, the user's shell
    bash "${BASH_SOURCE[0]}" "$@"
    return
fi
set -euo pipefail
cd "$(dirname "$0")/.."
source recipes/setup.sh deepspeed
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore::FutureWarning
export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=
exec python recipes/launch.py --config_file recipes/zero2.yaml recipes/train_magrpo.py --advantage none "$@"
