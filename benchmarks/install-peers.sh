#!/usr/bin/env bash
# Makes the environment of the clients that `penstock bench reward-sockets` compares with, apart from Penstock's own.
set -euo pipefail
cd "$(dirname "$0")/.."
target="${1:-.cache/peers}"
"${PYTHON:-python3}" -m venv "$target"
"$target/bin/pip" install -q --disable-pip-version-check qreward==0.1.7 openai
echo "made $target; run: penstock bench reward-sockets"
