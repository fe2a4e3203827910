"""What a connection holds while it reads a version: raw, from the trainer's copy, or encoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.weights.plan import Bytes
from penstock.weights.published import Coded, Version
from penstock.weights.transport import Lender

__all__ = ["CodedLease", "RawLease"]


class RawLease:
    """A raw version, straight from the trainer's copy, which is kept as long as this is open."""

    def __init__(self, held: Version, release: Callable[[Version], None], lenders: Mapping[str, Lender]) -> None:
        self._held = held
        self._release = release
        self._lenders = lenders
        self.manifest = held.signed
        self.chunks = len(held.manifest.chunks)

    def nbytes(self, index: int) -> int:
        return self._held.manifest.chunks[index].nbytes

    def place(self, index: int, kind: str) -> tuple[str, int] | None:
        place = self.whole(kind)
        return (place, self._held.manifest.chunks[index].offset) if place else None

    def whole(self, kind: str) -> str:
        lender = self._lenders.get(kind)
        return lender.place(self._held.stream) if lender is not None else ""

    async def chunk(self, index: int) -> Bytes:
        chunk = self._held.manifest.chunks[index]
        return self._held.stream[chunk.offset : chunk.offset + chunk.nbytes]

    def close(self) -> None:
        self._release(self._held)


class CodedLease:
    """An encoding; its bytes live as long as somebody refers to them."""

    def __init__(self, coded: Coded) -> None:
        self._chunks = coded.encoded.chunks
        self.manifest = coded.signed
        self.chunks = len(self._chunks)

    def nbytes(self, index: int) -> int:
        return len(self._chunks[index])

    def place(self, index: int, kind: str) -> tuple[str, int] | None:
        return None

    def whole(self, kind: str) -> str:
        return ""

    async def chunk(self, index: int) -> Bytes:
        return self._chunks[index]

    def close(self) -> None:
        self._chunks = ()
