#!/usr/bin/env bash
# Run the tests with the newest of everything that setup.cfg allows: what fails here will fail for users next.
# TORCH holds torch where its newest release is too large, for instance TORCH=torch==2.13.0; PYTHON is the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/venv"
# shellcheck disable=SC1091
. "$scratch/venv/bin/activate"

pip install --quiet "${TORCH:-torch}" -e ".[dev]"
python --version
pip list
pytest "$@"
