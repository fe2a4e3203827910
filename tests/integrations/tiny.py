"""A tokenizer and a model of a few thousand parameters, made here: the real frameworks run without any hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = ["<pad>", "<eos>", "<unk>", *"0123456789", "+", "=", "yes", "no", "what", "is"]


def tokenizer() -> Any:
    """One token for each word of `WORDS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def model() -> Any:
    """A Qwen2 with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def save(folder: Path) -> Path:
    """A folder that `from_pretrained` loads."""
    tokenizer().save_pretrained(folder)
    model().save_pretrained(folder)
    return folder
