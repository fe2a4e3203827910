#!/usr/bin/env bash
# Makes a virtual environment with an SGLang server that runs on CPU (about 3 GB, some minutes), for contract tests and
# demonstrations. On GPUs SGLang is installed as its own documentation says.   Usage: install-sglang.sh VENV
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:?usage: install-sglang.sh VENV}
version=0.5.23
stamp=$venv/.penstock-sglang-$version-$(cat "$0" "$here/sglang-requirements.txt" | sha256sum | cut -c1-12)
[ -e "$stamp" ] && exit 0
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0
"$venv/bin/pip" install -q --disable-pip-version-check --no-deps "sglang==$version" torchvision==0.28.0 triton==3.9.0
"$venv/bin/pip" install -q --disable-pip-version-check --no-deps -r "$here/sglang-requirements.txt"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# torchvision's compiled operators need CUDA; only their names are looked up here.
if ! grep -q _cpu_operator_names "$site/torchvision/__init__.py"; then
  { cat <<'PY'
import torch as _torch
_cpu_operator_names = _torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _cpu_operator_names.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
PY
    cat "$site/torchvision/__init__.py"; } > "$site/torchvision/__init__.py.new"
  mv "$site/torchvision/__init__.py.new" "$site/torchvision/__init__.py"
fi
# No CPU build of sgl_kernel is published: a stand-in whose functions raise when called. The torch-native path calls none.
mkdir -p "$site/sgl_kernel"
cat > "$site/sgl_kernel/__init__.py" <<'PY'
def _missing(name):
    def function(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build here")

    function.__name__ = name
    return function


copy_all_layer_kv_cache_cpu = _missing("copy_all_layer_kv_cache_cpu")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)
PY
"$venv/bin/python" -c 'import sglang; print("sglang", sglang.__version__)'
rm -f "$venv"/.penstock-sglang-*
touch "$stamp"
