# Sourced by recipes/quickstart.sh and tests/run.sh: makes .venv with the tested versions and activates it.
# Usage: source recipes/setup.sh EXTRAS   (EXTRAS of pyproject.toml, such as "deepspeed")
marcog_python="${PYTHON:-}"
if [ -z "$marcog_python" ]; then
    for candidate in python3.12 python3.11 python3; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            marcog_python="$candidate"
            break
        fi
    done
fi
if [ -z "$marcog_python" ]; then
    echo "marcog_trl needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2
    exit 1
fi
# An environment knows the folder in which it was made, so a checkout that is copied or moved needs another
marcog_sum="$({ pwd -P; cat pyproject.toml recipes/constraints.txt; } | cksum | cut -d' ' -f1)"
marcog_stamp=".venv/.installed-$1-$marcog_sum"
if [ ! -f "$marcog_stamp" ]; then
    echo "Setting up .venv with $("$marcog_python" --version) ..."
    marcog_clear=
    if compgen -G ".venv/.installed-*" >/dev/null && ! compgen -G ".venv/.installed-*-$marcog_sum" >/dev/null; then
        marcog_clear=--clear
    fi
    "$marcog_python" -m venv $marcog_clear .venv
    # torch first and pinned, so that no other requirement pulls another build of it
    .venv/bin/python -m pip install -q --disable-pip-version-check "$(grep '^torch==' recipes/constraints.txt)"
    .venv/bin/python -m pip install -q --disable-pip-version-check -c recipes/constraints.txt -e ".[$1]"
    touch "$marcog_stamp"
fi
source .venv/bin/activate
