"""Runs in an engine server's environment: what transformers and compressed-tensors make of a folder of codes.

Usage: quantized_reader.py FOLDER OUT.safetensors, with lists of token ids as JSON on standard input. Writes the
decompressed weights, and for each list `logprobs.N` of its tokens from the second on, with activations rounded as the
folder's config.json asks.
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig


def main(folder: str, out: str) -> None:
    config = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32).eval()
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for at, ids in enumerate(json.load(sys.stdin)):
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            found[f"logprobs.{at}"] = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    save_file(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
