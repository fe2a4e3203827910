"""Records what real servers say of reward models: tests/reward/recorded/reward_models.jsonl, which `make test` plays.

    PENSTOCK_ENGINES=FOLDER python tests/engines/record_reward_models.py

FOLDER holds the environments that install-vllm.sh and install-sglang.sh make, as `vllm` and `sglang`. Two classifiers
of random weights, with one output and with two, are made by `vllm`'s Python and served by each in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENGINES = Path(os.environ.get("PENSTOCK_ENGINES", "."))
OUT = Path(__file__).parents[1] / "reward" / "recorded" / "reward_models.jsonl"
PORT = 8143
START_S = 300.0
TEXTS = ["2+2=4", "2+2=five"]

MAKE = """
import sys, torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {"<pad>": 0, "<eos>": 1, **{letter: n + 2 for n, letter in enumerate(letters)}}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
for labels in (1, 2):
    torch.manual_seed(labels)
    shape = dict(vocab_size=258, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
    ends = dict(pad_token_id=0, eos_token_id=1, bos_token_id=1)
    config = Qwen2Config(**shape, **ends, num_key_value_heads=2, max_position_embeddings=256, num_labels=labels,
                         initializer_range=0.2, tie_word_embeddings=False)
    folder = f"{sys.argv[1]}/{labels}"
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)
"""
VLLM = "bin/vllm serve {model} --served-model-name rm{n} --port {port} --host 127.0.0.1 --dtype float32 "
VLLM += "--max-model-len 128 --max-num-seqs 16 --enforce-eager"
SGLANG = "bin/python -m sglang.launch_server --model-path {model} --served-model-name rm{n} --port {port} "
SGLANG += "--host 127.0.0.1 --dtype float32 --device cpu --is-embedding --disable-overlap-schedule "
SGLANG += "--skip-server-warmup --max-total-tokens 4096 --max-running-requests 16 --context-length 128"


@contextlib.contextmanager
def serving(engine: str, command: str, model: Path, n: int) -> Iterator[None]:
    """A server, until it is asked no more; its output is this program's."""
    words = command.format(model=model, n=n, port=PORT).split()
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    process = subprocess.Popen([ENGINES / engine / words[0], *words[1:]], env=environment, stdout=sys.stderr)
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{engine} did not start")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait(60)


def asked(server: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """One exchange. What changes from run to run is left out."""
    sent = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(sent, timeout=120) as answer:
            status, value = answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        status, value = error.code, json.load(error)
    for entry in [value, *(one["meta_info"] for one in value)] if isinstance(value, list) else [value]:
        for volatile in ("id", "created", "e2e_latency", "response_sent_to_client_ts"):
            if isinstance(entry, dict):
                entry.pop(volatile, None)
    return {"server": server, "path": path, "body": body, "status": status, "answer": value}


def main() -> None:
    said = []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([ENGINES / "vllm" / "bin" / "python", "-c", MAKE, folder], check=True)
        for n in (1, 2):
            rm = {"model": f"rm{n}"}
            with serving("vllm", VLLM, Path(folder) / str(n), n):
                said.append(asked("vllm", "/classify", {**rm, "input": TEXTS}))
                said.append(asked("vllm", "/classify", {**rm, "use_activation": False, "input": TEXTS}))
                said.append(asked("vllm", "/score", {**rm, "text_1": TEXTS, "text_2": ["4", "five"]}))
                said.append(asked("vllm", "/rerank", {**rm, "query": "2+2?", "documents": TEXTS}))
            with serving("sglang", SGLANG, Path(folder) / str(n), n):
                said.append(asked("sglang", "/classify", {**rm, "text": TEXTS}))
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text("".join(json.dumps(exchange) + "\n" for exchange in said))


if __name__ == "__main__":
    main()
