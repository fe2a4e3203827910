"""Penstock: reinforcement learning for language models on machines you do not fully control."""

__version__ = "0.1.0"
