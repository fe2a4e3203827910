"""Bytes to frames and back; the only door for bytes that come from a network."""

from __future__ import annotations

import msgspec

from penstock.errors import FrameTooLarge, WireError
from penstock.wire.frames import FrameFromManager, FrameToManager

PROTOCOL = 1
PROTOCOL_HEADER = "X-Penstock-Protocol"
REFUSAL_HEADER = "X-Penstock-Refusal"
"""Carries the reason to a refused peer, whose WebSocket library does not show it the body."""

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Of one frame, where nothing else is said; no agent is sent a larger one, whatever the manager takes."""
MIN_FRAME_BYTES = 16 * 1024
"""A lower limit than this is refused: frames of one row would not fit."""

_encoder = msgspec.msgpack.Encoder()
_to_manager: msgspec.msgpack.Decoder[FrameToManager] = msgspec.msgpack.Decoder(FrameToManager)
_from_manager: msgspec.msgpack.Decoder[FrameFromManager] = msgspec.msgpack.Decoder(FrameFromManager)


def encode(frame: FrameToManager | FrameFromManager) -> bytes:
    return _encoder.encode(frame)


def decode_to_manager(data: bytes | memoryview, limit_bytes: int = MAX_FRAME_BYTES) -> FrameToManager:
    """Raises FrameTooLarge or WireError; the frame's columns are not yet checked against each other."""
    _check_size(data, limit_bytes)
    try:
        return _to_manager.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"a message of {len(data)} bytes is not a frame for the manager: {error}") from error


def decode_from_manager(data: bytes | memoryview, limit_bytes: int = MAX_FRAME_BYTES) -> FrameFromManager:
    """Raises FrameTooLarge or WireError; the frame's columns are not yet checked against each other."""
    _check_size(data, limit_bytes)
    try:
        return _from_manager.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"a message of {len(data)} bytes is not a frame of a manager: {error}") from error


def _check_size(data: bytes | memoryview, limit_bytes: int) -> None:
    if len(data) > limit_bytes:
        raise FrameTooLarge(f"a frame of {len(data)} bytes is over the limit of {limit_bytes} bytes")
