"""What a connection holds while it reads a version: raw, from the trainer's copy, or encoded, perhaps still growing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.weights.growing import Growing
from penstock.weights.manifest import Made
from penstock.weights.plan import Bytes
from penstock.weights.protocol import NotReady
from penstock.weights.published import Version
from penstock.weights.transport import Lender

__all__ = ["CodedLease", "RawLease"]

CHUNK_WAIT_S = 5.0
"""For one that is asked for before it is made."""


class RawLease:
    """A raw version, straight from the trainer's copy, which is kept as long as this is open."""

    is_draft = in_parts = False

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
    """An encoding, whole or (without `signed`, the final manifest) while it is made; its bytes live as long as somebody
    refers to them."""

    in_parts = False

    def __init__(self, growing: Growing, signed: bytes = b"") -> None:
        self._growing: Growing | None = growing
        self.is_draft = not signed
        self.manifest = signed or growing.signed_draft
        self.chunks = growing.chunks

    def nbytes(self, index: int) -> int:
        return self._held().nbytes(index)

    def place(self, index: int, kind: str) -> tuple[str, int] | None:
        return None

    def whole(self, kind: str) -> str:
        return ""

    async def chunk(self, index: int) -> Bytes:
        return await self._held().chunk(index, CHUNK_WAIT_S)

    async def made(self, first: int, wait_s: float) -> Made:
        return await self._held().made(first, wait_s)

    def close(self) -> None:
        self._growing = None

    def _held(self) -> Growing:
        if self._growing is None:
            raise NotReady("this lease is closed")
        return self._growing
