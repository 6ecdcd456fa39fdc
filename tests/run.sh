#!/usr/bin/env bash
# Sets up a virtual environment (.venv) with the tested versions and runs the checks and the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
source recipes/setup.sh test
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
bash tests/checks.sh
python -m pytest -q -n 3 --dist loadfile "$@"
