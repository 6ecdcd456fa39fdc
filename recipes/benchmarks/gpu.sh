#!/usr/bin/env bash
# Measures an accelerator in at most 10 minutes, without network or weights: bash recipes/benchmarks/gpu.sh --help
set -euo pipefail
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore::FutureWarning
exec python "$(dirname "$0")/gpu.py" "$@"
