#!/usr/bin/env bash
# Checks of style, types, imports and size, in the active environment. tests/run.sh and the pre-commit hook run them.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
mypy
lint-imports --no-logo
python tests/size.py
