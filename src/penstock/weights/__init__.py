"""Weight versions: published by the trainer, pulled and verified by every agent."""

from penstock.weights.manifest import (
    ChunkEntry,
    Manifest,
    StagedWeights,
    TensorEntry,
    decode_manifest,
    encode_manifest,
)
from penstock.weights.puller import pull
from penstock.weights.store import WeightStore
from penstock.weights.tcp import TcpTransport
from penstock.weights.transport import WeightLink, WeightTransport

__all__ = [
    "ChunkEntry",
    "Manifest",
    "StagedWeights",
    "TcpTransport",
    "TensorEntry",
    "WeightLink",
    "WeightStore",
    "WeightTransport",
    "decode_manifest",
    "encode_manifest",
    "pull",
]
