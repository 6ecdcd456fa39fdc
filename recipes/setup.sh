# Makes .venv with the tested versions and activates it. Sourced by recipes/quickstart.sh and tests/run.sh, and by users:
#     source recipes/setup.sh EXTRAS   (EXTRAS of pyproject.toml, such as "deepspeed")
# PYTHON=/path/to/python chooses the interpreter. Where something fails, it says so and returns 1; it never ends the shell.
marcog_root="$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd -P)"

marcog_setup() ( # in a subshell, which may exit
    cd "$marcog_root" || exit 1
    new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
    python="${PYTHON:-}"
    if [ -n "$python" ] && ! new_enough "$python"; then
        echo "error: marcog_trl needs Python 3.11 or newer, and PYTHON=$python is $("$python" --version 2>&1 || echo "not a Python that runs"). Set PYTHON=/path/to/python3.12." >&2
        exit 1
    fi
    for candidate in python3.12 python3.13 python3.11 python3; do
        if [ -z "$python" ] && new_enough "$candidate"; then
            python="$candidate"
        fi
    done
    if [ -z "$python" ]; then
        echo "error: marcog_trl needs Python 3.11 or newer (tested: 3.11 to 3.13). Set PYTHON=/path/to/python3.12." >&2
        exit 1
    fi
    # An environment knows the folder in which it was made, so a checkout that is copied or moved needs another
    sum="$({ pwd -P; cat pyproject.toml recipes/constraints.txt; } | cksum | cut -d' ' -f1)"
    stamp=".venv/.installed-$1-$sum"
    if [ -f "$stamp" ]; then
        exit 0
    fi
    echo "Setting up .venv with $("$python" --version) ..."
    clear=
    if ls .venv/.installed-* >/dev/null 2>&1 && ! ls .venv/.installed-*-"$sum" >/dev/null 2>&1; then
        clear=--clear
    fi
    # One that another Python made keeps links to that one
    base='import sys; print(sys.base_prefix, sys.version)'
    if [ -e .venv ] && [ "$(.venv/bin/python -c "$base" 2>/dev/null)" != "$("$python" -c "$base")" ]; then
        clear=--clear
    fi
    # torch first and pinned, so that no other requirement pulls another build of it
    "$python" -m venv $clear .venv &&
        .venv/bin/python -m pip install -q --disable-pip-version-check "$(grep '^torch==' recipes/constraints.txt)" &&
        .venv/bin/python -m pip install -q --disable-pip-version-check -c recipes/constraints.txt -e ".${1:+[$1]}" &&
        touch "$stamp" && exit 0
    echo "error: .venv could not be set up, for the reason above. The same command tries again." >&2
    exit 1
)

if ! marcog_setup "${1:-}"; then
    return 1
fi
source "$marcog_root/.venv/bin/activate"
