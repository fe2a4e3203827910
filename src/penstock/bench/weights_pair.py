"""Pairs of weight versions for the benchmarks: a real consecutive one, and drawn ones of a given density."""

from __future__ import annotations

import numpy as np
import torch

SEED = 20_261_121


def drawn(nbytes: int, share: float) -> tuple[bytes, bytes]:
    """bfloat16 weights of normal spread, and the same with a share of them one step up or down."""
    generator = np.random.default_rng(SEED)
    values = (generator.standard_normal(nbytes // 2, np.float32) * 0.02).view(np.uint32) >> 16
    before = values.astype(np.uint16)
    after = before.copy()
    hit = generator.random(len(after), np.float32) < share
    after[hit] += generator.choice(np.array([1, 0xFFFF], np.uint16), int(hit.sum()))
    return before.tobytes(), after.tobytes()


def trained(steps: int, lr: float = 1e-6) -> tuple[bytes, bytes]:
    """A small transformer's weights in bfloat16 before and after one AdamW step, the last of `steps`.

    Master weights are float32; tokens are drawn, with a structure that can be learned.
    """
    torch.manual_seed(SEED)
    width, vocabulary = 384, 2048
    layer = torch.nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(vocabulary, width),
            "body": torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
            "head": torch.nn.Linear(width, vocabulary, bias=False),
        }
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.0)
    before = after = b""
    for _ in range(steps):
        first_B1 = torch.randint(0, vocabulary, (16, 1))
        tokens_BT = (first_B1 * 7 + torch.arange(64) * 13) % vocabulary
        hidden = model["body"](model["embed"](tokens_BT[:, :-1]))
        loss = torch.nn.functional.cross_entropy(model["head"](hidden).flatten(0, 1), tokens_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        before, after = after, _bytes(model)
    return before, after


def _bytes(model: torch.nn.Module) -> bytes:
    parts = [p.detach().to(torch.bfloat16).view(torch.uint8).flatten() for p in model.parameters() if p.dim() > 1]
    return torch.cat(parts).numpy().tobytes()


def tiled(data: bytes, nbytes: int) -> bytes:
    """The same weights again and again, as so many layers: chunks are coded one by one, so this makes none smaller."""
    return (data * (nbytes // len(data) + 1))[:nbytes]


def changed_share(before: bytes, after: bytes) -> float:
    return float((np.frombuffer(before, np.uint16) != np.frombuffer(after, np.uint16)).mean())
