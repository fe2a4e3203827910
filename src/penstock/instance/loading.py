"""How an agent comes by weights: one pull at a time, and the version that it keeps to apply the next difference to.

Decides when the base moves (once the engine serves the new version, never before) and when it is given up (where memory
is short). How a version is fetched and verified is in `penstock.weights`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import EngineError, WeightError
from penstock.weights.ahead import Ahead
from penstock.weights.choose import CODEC_CHOICES, QUANTIZED, Rates
from penstock.weights.encodings import can_zipnn, compile_ahead
from penstock.weights.manifest import Manifest, StagedWeights, encode_manifest
from penstock.weights.memory import NoMemory, Recycled, usable_cores
from penstock.weights.protocol import SHARED_MEMORY, Layout
from penstock.weights.puller import DEFAULT_MAX_BYTES, fresh, pull
from penstock.weights.relay import Relay
from penstock.weights.tcp import TcpTransport
from penstock.weights.ways import fetchers_of, lenders_of

__all__ = ["WeightLoader", "came_by", "check_vocabulary"]

log = logging.getLogger("penstock.agent")


class WeightLoader:
    """Pulls versions for one engine.

    `codec` fixes how weights travel (auto measures). With `keep_base`, the version that serves stays in host memory, so
    that the next one can come as a difference; without, each comes in full. With `relay_port` (None for no relay, 0
    for any free port) this machine passes weights on to others, and with shared memory among `ways` instances on one
    machine share one copy of a version, which one of them decodes and each verifies. What is cut goes on from
    `partial_folder`, where given. `ways` are faster ways than TCP to be used where the source has them too
    (`weights.ways`). Links stay open from one version to the next. With a base or a relay, so
    does the memory of the version before it, which is needed at a swap or passed on anyway: fresh memory may cost more
    than all the rest of a pull. Once a version serves that came as a difference, it is copied there, so that the next
    difference is applied in place.
    """

    def __init__(
        self,
        token: str,
        *,
        connections: int = 2,
        max_bytes: int = DEFAULT_MAX_BYTES,
        codec: str = "auto",
        keep_base: bool = True,
        relay_port: int | None = None,
        partial_folder: Path | None = None,
        tls: ssl.SSLContext | None = None,
        ways: Sequence[str] = (),
    ) -> None:
        if codec not in CODEC_CHOICES:
            raise ValueError(f"codec={codec!r} is not one of {', '.join(CODEC_CHOICES)}")
        if codec == "zipnn" and not can_zipnn():
            raise WeightError('the weights are to come by "zipnn", which is not installed here; pip install zipnn')
        self._token = token
        self._connections = connections
        self._max_bytes = max_bytes
        self._codec = codec
        self._keeps = keep_base and codec in ("auto", "delta", *QUANTIZED)
        self._relay_port = relay_port
        self._partial_folder = partial_folder
        self._secure = tls is not None
        self._transport = TcpTransport(token, tls=tls, fetchers=fetchers_of(ways))
        self.layout = Layout()
        """Of the engine; told to the store with each pull."""
        shared = lenders_of([SHARED_MEMORY], "") if relay_port is not None and SHARED_MEMORY in ways else []
        self._lender = shared[0] if shared else None
        self._memory = Recycled(lender=self._lender)
        self._ahead = Ahead(self._memory.spare)
        self._relay: Relay | None = None
        self._rates = Rates(cores=usable_cores())
        self._base: StagedWeights | None = None

    @property
    def base(self) -> StagedWeights | None:
        """The version that differences are applied to: one that the engine has served."""
        return self._base

    @property
    def relay(self) -> Relay | None:
        return self._relay

    async def pull(self, source: str, version: int, deadline_s: float) -> StagedWeights:
        """A whole version, verified. Raises WeightError."""
        try:
            return await self._pull(source, version, deadline_s)
        except NoMemory as error:
            if not self._passes_nothing_on(error) and not self._gives_base_up(error):
                raise
        try:
            return await self._pull(source, version, deadline_s)
        except NoMemory as error:
            if not self._gives_base_up(error):
                raise
        return await self._pull(source, version, deadline_s)

    def _passes_nothing_on(self, error: NoMemory) -> bool:
        """Whether that lets go of anything: raw chunks of a pull that was cut lie where they were staged."""
        if self._relay is None or not self._relay.let_go():
            return False
        log.warning("%s; what was to be passed on is given up for it", error)
        return True

    def _gives_base_up(self, error: NoMemory) -> bool:
        if self._base is None:
            return False
        log.warning("%s; the base of differences is given up for it", error)
        self._base = None
        self._ahead.drop()
        self._memory.clear()
        return True

    async def _pull(self, source: str, version: int, deadline_s: float) -> StagedWeights:
        if self._relay is None and self._relay_port is not None:
            lenders = [self._lender] if self._lender is not None else []
            relay = Relay(self._token, port=self._relay_port, secure=self._secure, lenders=lenders)
            relay.start()
            self._relay = relay
        staged = await self._pulled(source, version, deadline_s)
        if self._lender is not None and self._relay is not None and (place := self._lender.place(staged.stream)):
            self._lender.lend(staged.stream)
            self._relay.lend(version, encode_manifest(staged.manifest), self._lender.kind, place)
        return staged

    def serves(self, staged: StagedWeights) -> None:
        """The engine serves `staged`: only now is it what differences are applied to."""
        self._base = staged if self._keeps else None
        self._rates.cores = usable_cores()  # A container may be given more or fewer while it runs.
        if self._keeps:
            compile_ahead(staged.manifest)
        if self._keeps and any(step.base is not None for step in staged.steps):
            # So comes the next one, as far as anybody knows.
            self._ahead.begin(staged.stream)
        else:
            self._ahead.drop()

    async def base_is_ahead(self, timeout_s: float) -> bool:
        """Whether, within that time, the base lies where the next difference is applied to it in place."""
        return await asyncio.to_thread(self._ahead.wait, timeout_s)

    async def _pulled(self, source: str, version: int, deadline_s: float) -> StagedWeights:
        try:
            return await pull(
                source,
                version,
                self._token,
                connections=self._connections,
                deadline_s=deadline_s,
                max_bytes=self._max_bytes,
                transport=self._transport,
                codec=self._codec,
                base=self._base,
                rates=self._rates,
                relay=self._relay,
                partial=self._partial_folder,
                memory=self._staging if self._keeps or self._relay is not None else fresh,
                layout=self.layout,
            )
        except BaseException:
            self._memory.littered = True
            raise

    def _staging(self, nbytes: int, base: memoryview | None) -> tuple[memoryview, int]:
        prepared = self._ahead.take(base)
        if prepared is not None and len(prepared[0]) == nbytes:
            return prepared
        del prepared
        return self._memory.buffer(nbytes), 0

    def let_links_go(self) -> None:
        """Closes the links that are kept, with which goes what was kept of their sources: they may have ended."""
        self._transport.close()

    async def close(self) -> None:
        self._ahead.drop()
        self._transport.close()
        relay, self._relay = self._relay, None
        if relay is not None:
            await relay.close()
        if self._lender is not None:
            self._lender.close()


def came_by(staged: StagedWeights) -> str:
    """How a version came, for people: `delta by tcp`, `raw by shm`."""
    return f"{' '.join(step.codec for step in staged.steps)} by {staged.way or 'itself'}".strip()


def check_vocabulary(manifest: Manifest, vocab_size: int) -> None:
    """Raises EngineError where an engine that took these weights has another vocabulary than their model.

    Either may be silent: an engine (0), or weights without a configuration that says it.
    """
    try:
        config = json.loads(manifest.config_json)
    except ValueError:
        return  # An engine that needs it has refused it.
    wanted = config.get("vocab_size") if isinstance(config, dict) else None
    if vocab_size and isinstance(wanted, int) and wanted != vocab_size:
        raise EngineError(
            f"the engine has a vocabulary of {vocab_size} tokens, and the model of weight version {manifest.version} "
            f"has {wanted}: another model or tokenizer"
        )
