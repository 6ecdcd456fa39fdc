#!/usr/bin/env bash
# Sets up a virtual environment (.venv-programs) with frameworks for agents, beside the packages of the active environment, and
# runs the tests of programs that are written with them.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
packages="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
# With the folder: an environment that was copied or moved with its checkout runs another one's programs
stamp=".venv-programs/.installed-$({ pwd -P; cat "$0"; echo "$packages"; } | cksum | cut -d' ' -f1)"
if [ ! -f "$stamp" ]; then
    echo "Setting up .venv-programs ..."
    "$python" -m venv --clear .venv-programs
    echo '*' > .venv-programs/.gitignore
    .venv-programs/bin/python -m pip install -q --disable-pip-version-check openai-agents langgraph langchain-openai
    echo "$packages" > "$(.venv-programs/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/active.pth"
    touch "$stamp"
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$PWD"
exec .venv-programs/bin/python -m pytest -q tests/with_frameworks "$@"
