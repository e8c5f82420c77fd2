#!/bin/sh
# Make .venv with the Python named in $1. Debian ships venv apart from Python: install it where we may, else say how.
set -eu
python=${1:-python3}
[ -x .venv/bin/pip ] && exit 0
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "kvbench needs Python 3.11 or later; $python is $("$python" -V 2>&1). Try: make PYTHON=python3.11 ..." >&2
    exit 2
fi
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    sh .ci/packages.sh :python3-venv
fi
echo "creating .venv"
"$python" -m venv .venv
