"""The manager's edge: sockets, the clock and authentication around the pure `Manager`.

Agents and one trainer each hold a WebSocket; operators have doors of their own. Decides nothing about samples. It
answers for the edge's own promises: a door for each role, frames of a bounded size and at a bounded rate, outgoing
queues of a bounded length (a peer that does not read is dropped with that cause), and a clean end. An error of the
manager's decisions, as of a user's policy, ends the server and not whichever peer spoke just then.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web

from penstock.errors import ConfigError, PenstockError, PolicyError, PortInUse, WireError
from penstock.rollout.doors import Doors, Knocks, Refusal, Role, Tokens
from penstock.rollout.journal_file import Journal, JournalConfig
from penstock.rollout.listen import IDLE_S, DoorSite, certificate_shown, handshake_refused
from penstock.rollout.logbook import Logbook
from penstock.rollout.manager import TICK_S, TRAINER, Decisions, Manager, ManagerConfig
from penstock.rollout.operator_doors import OperatorDoors
from penstock.rollout.pace import Pace, PaceConfig
from penstock.rollout.peers import Peer, PeerConfig
from penstock.rollout.provision_desk import FleetDesk
from penstock.rollout.provision_types import ProvisionConfig, Provisioner
from penstock.rollout.turns import Turns
from penstock.tls import server_context
from penstock.wire import MAX_FRAME_BYTES, PROTOCOL, FrameToManager, decode_to_manager, encode
from penstock.wire.codec import PROTOCOL_HEADER, REFUSAL_HEADER

__all__ = ["ManagerServer", "ServerConfig", "TlsConfig"]

log = logging.getLogger("penstock.manager")

DOORS = {"/agent": Role.AGENT, "/trainer": Role.TRAINER}
"""Every other path is an operator's, but for /healthz."""

REFUSAL_CHARS = 1000
"""Of a cause in a header."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Paths of PEM files. With `client_ca`, every peer must have a certificate that it signed."""

    cert: str
    key: str
    client_ca: str = ""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    token: str = field(default="", repr=False)
    """Opens every door that has no token of its own."""
    tokens: Tokens = field(default_factory=Tokens)
    """The doors' own."""
    tls: TlsConfig | None = None
    """None: plain HTTP."""
    pace: PaceConfig = field(default_factory=PaceConfig)
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free port."""
    manager: ManagerConfig = field(default_factory=ManagerConfig)
    journal: JournalConfig | None = None
    """None: what the manager knows dies with it."""
    max_queued_bytes: int = 4 * MAX_FRAME_BYTES
    """Frames that may wait for one peer to read them; beyond, the peer is dropped."""
    send_deadline_s: float = 30.0
    """For one frame to leave this machine's buffers."""
    knock_s: float = 10.0
    """For a peer to end the TLS handshake, and as long again for its first HTTP request."""
    tick_s: float = TICK_S
    close_s: float = 1.0
    """For all connections to end when the server does."""
    adopt: Callable[[str, str], Awaitable[str]] | None = None
    """Starts an agent for a server, given its address and kind of engine; returns the agent's name."""


class ManagerServer:
    """Serves one `Manager`. All methods belong to one event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._doors = Doors(
            replace(config.tokens, shared=config.tokens.shared or config.token),
            by_certificate=config.tls is not None and bool(config.tls.client_ca),
        )
        self._knocks = Knocks()
        self.config = config
        # Without a journal that counts them, an epoch that no earlier manager is likely to have had.
        epoch = secrets.randbits(22)
        self.manager = Manager(config.manager, wall_offset_s=time.time() - time.monotonic(), epoch=epoch)
        self._journal: Journal | None = None
        self._flush_called = False
        self.url = ""
        self._logbook = Logbook()
        self._peers: dict[str, Peer] = {}
        self._peer_config = PeerConfig(config.max_queued_bytes, config.send_deadline_s, config.close_s)
        self._agents_seen = 0
        self._turns = Turns()
        self._runner: web.AppRunner | None = None
        self._site: DoorSite | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._desk: FleetDesk | None = None
        self._broken: asyncio.Future[None] | None = None
        self._failure = ""
        """What broke the server's own work, in words."""

    async def start(self) -> str:
        """Takes up what the journal has and listens; returns the URL.

        Raises StorageError for a journal that can't be used, PortInUse, or PenstockError where the address can't be
        had.
        """
        if self.config.journal is not None:
            self._open_journal(self.config.journal)
        application = web.Application(middlewares=[self._authorised])
        application.add_routes([web.get("/agent", self._agent), web.get("/trainer", self._trainer)])
        application.add_routes(
            OperatorDoors(
                self.manager, lambda: self._journal, lambda: self._desk, self.config.adopt, self.config.knock_s
            ).routes()
        )
        self._runner = web.AppRunner(
            application, access_log=None, shutdown_timeout=self.config.close_s, keepalive_timeout=IDLE_S
        )
        await self._runner.setup()
        host, port, tls = self.config.host, self.config.port, self.config.tls
        try:
            context = None
            if tls is not None:
                files = (tls.cert, tls.key, tls.client_ca)
                context = server_context(*files, self._handshake_failed, certificate_shown)
            self._site = DoorSite(self._runner, host, port, context, self.config.knock_s, self._late)
            await self._site.start()
        except ConfigError:
            await self._runner.cleanup()
            raise
        except OSError as error:
            await self._runner.cleanup()
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(
                    f"{host}:{port} is in use by another process; choose another port, or 0 for a free one"
                ) from error
            raise PenstockError(f"can't listen on {host}:{port}: {error.strerror or error}") from error
        bound = self._runner.addresses[0]
        name = f"[{host}]" if ":" in host else host
        if tls is not None and host in ("", "0.0.0.0", "::"):
            # A certificate names no such address.
            name = "localhost"
        self.url = f"{'https' if tls else 'http'}://{name}:{bound[1]}"
        self._broken = asyncio.get_running_loop().create_future()
        self._ticker = asyncio.create_task(self._live(), name="manager's tick")
        return self.url

    def provide(
        self,
        config: ProvisionConfig,
        provisioner: Provisioner,
        *,
        reserved_engines: int = 0,
        account: Path | None = None,
        release_s: float = 60.0,
    ) -> None:
        """Has machines asked for and released from now on. `account`: file that keeps what they cost."""
        self._desk = FleetDesk(
            self.manager,
            config,
            provisioner,
            self._see_to,
            reserved_engines=reserved_engines,
            account=account,
            release_s=release_s,
        )

    async def failed(self) -> None:
        """Returns never while all is well; raises what broke the server's own work."""
        if self._broken is None:
            raise PenstockError("the manager's server was not started")
        await asyncio.shield(self._broken)

    async def close(self, cause: str = "the manager is shutting down", *, comes_back: bool = False) -> None:
        """Ends all connections and stops listening.

        Agents are asked to leave and batches fail, unless the manager `comes_back`: then the journal has every sample,
        and peers only see their connection end, with the cause. They dial again by themselves. Machines that were asked
        for are released first, unless it comes back and finds them again.
        """
        cause = self._failure or cause
        if self._desk is not None and not comes_back:
            await self._desk.release_all(cause)
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait([self._ticker], timeout=self.config.close_s)
            self._ticker = None
        if self._desk is not None:
            await self._desk.close()
            self._desk = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._broken is not None:
            self._broken.cancel()
        if comes_back:
            self._decide(self.manager.on_journal, False, "")
        else:
            self._decide(lambda now: self.manager.shutdown(now, cause))
        peers = list(self._peers.values())
        for peer in peers:
            peer.close(cause)
        if peers:
            await asyncio.wait([asyncio.create_task(peer.finish()) for peer in peers], timeout=2 * self.config.close_s)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # ---- doors

    @web.middleware
    async def _authorised(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._site is not None:
            self._site.asked(request.transport)
        if request.path == "/healthz":
            return await handler(request)
        door = DOORS.get(request.path, Role.OPERATOR)
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        token = given.strip() if scheme.lower() == "bearer" else ""
        certificate = request.transport.get_extra_info("peercert") if request.transport is not None else None
        refusal = self._doors.refusal(door, token, certificate)
        if refusal is None and self._failure and request.path in DOORS:
            refusal = Refusal(503, f"this manager has failed: {self._failure}")
        if refusal is not None:
            return self._refused(request, refusal)
        # An operator hears of all that has come in.
        self._flush()
        return await handler(request)

    def _refused(self, request: web.Request, refusal: Refusal, event_cause: str = "") -> web.Response:
        """Tells the peer, and the run's events. `event_cause`: the same without the peer's own words."""
        door = DOORS.get(request.path, Role.OPERATOR)
        self._knocked(request.remote or "?", door.value, event_cause or refusal.cause)
        return web.Response(
            status=refusal.status,
            # A header has no room for lines, nor for what is not ASCII.
            headers={REFUSAL_HEADER: _ascii(" ".join(refusal.cause.split()), REFUSAL_CHARS)},
            text=f"Refused: {refusal.cause}.\n",
        )

    def _handshake_failed(self, cause: str) -> None:
        # In its handshake nobody has said yet which door it wants.
        self._knocked(handshake_refused(), "any", cause)

    def _late(self, peer: str, cause: str) -> None:
        self._knocked(peer, "any", cause)

    def _knocked(self, peer: str, door: str, cause: str) -> None:
        times = self._knocks.count(door, cause)
        if times:
            self._decide(self.manager.on_connection_refused, peer, door, cause, times)

    def _other_protocol(self, request: web.Request) -> web.Response | None:
        spoken = request.headers.get(PROTOCOL_HEADER, "")
        if spoken == str(PROTOCOL):
            return None
        cause = (
            f"this manager speaks protocol {PROTOCOL} of Penstock and the peer speaks {_ascii(spoken) or 'none'}; "
            "install the same version of penstock on both machines"
        )
        return self._refused(request, Refusal(426, cause), "it speaks another protocol")

    async def _agent(self, request: web.Request) -> web.StreamResponse:
        refusal = self._other_protocol(request)
        if refusal is not None:
            return refusal
        self._agents_seen += 1
        name = f"agent-{self._agents_seen}"
        manager = self.manager
        socket = await self._open(request)
        peer = self._peers[name] = Peer(name, socket, request.transport, self._peer_config)
        cause = "the server's handler was ended"
        try:
            self._decide(manager.on_agent_connected, name)
            cause = await self._listen(
                peer,
                socket,
                partial(manager.on_agent_frame, name),
                partial(manager.on_agent_refused, name),
                self._turns,
            )
        finally:
            del self._peers[name]
            cause = peer.closing_cause or cause
            self._decide(manager.on_agent_lost, name, cause)
            if self._failure:
                # Its machine may be released.
                self._see_to(manager.forget, name, cause)
            await peer.finish()
        return socket

    async def _trainer(self, request: web.Request) -> web.StreamResponse:
        refusal = self._other_protocol(request)
        if refusal is not None:
            return refusal
        if TRAINER in self._peers:
            cause = (
                "a trainer is connected already, and a manager serves one at a time; "
                "end the other run, or start a manager for this one"
            )
            return self._refused(request, Refusal(409, cause))
        manager = self.manager
        socket = self._socket(heartbeat=30.0)
        # Taken before the first await, so that two trainers at once can't both find the place free.
        peer = self._peers[TRAINER] = Peer(TRAINER, socket, request.transport, self._peer_config)
        cause = "the server's handler was ended"
        connected = False
        try:
            await socket.prepare(request)
            connected = True
            self._decide(manager.on_trainer_connected)
            cause = await self._listen(peer, socket, manager.on_trainer_frame, manager.on_trainer_refused)
        finally:
            del self._peers[TRAINER]
            if connected:
                self._decide(manager.on_trainer_lost, peer.closing_cause or cause)
            await peer.finish()
        return socket

    def _socket(self, heartbeat: float | None = None) -> web.WebSocketResponse:
        return web.WebSocketResponse(
            max_msg_size=self.config.manager.max_frame_bytes,
            compress=False,
            heartbeat=heartbeat,
            timeout=self.config.close_s,
        )

    async def _open(self, request: web.Request) -> web.WebSocketResponse:
        socket = self._socket()
        await socket.prepare(request)
        return socket

    async def _listen(
        self,
        peer: Peer,
        socket: web.WebSocketResponse,
        take: Callable[[FrameToManager, float], Decisions],
        refuse: Callable[[str, float], Decisions],
        turns: Turns | None = None,
    ) -> str:
        """Reads frames until the connection ends, in `turns` where others do as well; returns why it did."""
        limit = self.config.manager.max_frame_bytes
        pace = Pace(self.config.pace, time.monotonic())
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                if turns is not None:
                    await turns.wait()
                began = time.monotonic()
                try:
                    frame = decode_to_manager(message.data, limit)
                except WireError as error:
                    return self._hang_up(peer, refuse, str(error))
                self._decide(take, frame)
                if peer.closing_cause:
                    break
                now = time.monotonic()
                if turns is not None:
                    turns.spent(now - began)
                wait_s = pace.take(len(message.data), now)
                if fault := pace.fault(now):
                    return self._hang_up(peer, refuse, fault)
                if wait_s:
                    # What it goes on to send stays in its own buffers.
                    await asyncio.sleep(wait_s)
            elif message.type is WSMsgType.TEXT:
                return self._hang_up(peer, refuse, "sent text, where frames are binary messages")
            elif message.type is WSMsgType.ERROR:
                broken = message.data
                if isinstance(broken, WebSocketError) and broken.code == WSCloseCode.MESSAGE_TOO_BIG:
                    return self._hang_up(peer, refuse, f"a frame is over the limit of {limit} bytes")
                return f"the connection broke: {broken}"
        code = socket.close_code
        return "the connection was cut" if code in (None, WSCloseCode.ABNORMAL_CLOSURE) else f"closed with code {code}"

    def _hang_up(self, peer: Peer, refuse: Callable[[str, float], Decisions], cause: str) -> str:
        self._decide(refuse, cause)
        peer.close(cause)
        return cause

    # ---- decisions become bytes

    async def _live(self) -> None:
        try:
            await self._tick()
        except Exception as error:  # noqa: BLE001 - a policy of the user's own may raise anything
            self._fail(error)

    def _decide(self, decide: Callable[..., Decisions], *told: object) -> None:
        """Asks the manager, unless it has failed, and does what it says."""
        if not self._failure:
            self._see_to(decide, *told)

    def _see_to(self, decide: Callable[..., Decisions], *told: object) -> None:
        """The same after a failure too, for what concerns machines."""
        try:
            self._carry_out(decide(*told, time.monotonic()))
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The manager can't be asked any more: `failed` raises the error, and everybody hears it in words."""
        words = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
        if self._failure:
            log.error("beside that: %s", words)
            return
        self._failure = words if isinstance(error, PolicyError) else f"the manager's own work failed: {words}"
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)
            # Whoever asks `failed` gets it; that nobody does is no fault of the future's.
            self._broken.exception()
        self._carry_out(self.manager.give_up(self._failure, time.monotonic()))

    async def _tick(self) -> None:
        heartbeat_s = self.config.manager.fleet.heartbeat_s
        due = time.monotonic()
        while not self._failure:
            now = time.monotonic()
            if now - due > heartbeat_s:
                self.manager.on_pause(now - due, now)
            due = now + self.config.tick_s
            self._carry_out(self.manager.tick(now))
            if self._journal is not None:
                self._journal.tick(time.monotonic())
            if self._desk is not None:
                self._desk.tick(now)
            await self._think(time.monotonic() + self.config.tick_s)

    async def _think(self, until: float) -> None:
        """Sleeps till the next tick; what the manager has to think of is done meanwhile, bit by bit."""
        while not self._failure and self.manager.thinking and (now := time.monotonic()) < until:
            self._carry_out(self.manager.think(now))
            # Frames that came in the meantime go first, and as much time as a bit took is theirs.
            await asyncio.sleep(time.monotonic() - now)
        await asyncio.sleep(max(0.0, until - time.monotonic()))

    def _open_journal(self, config: JournalConfig) -> None:
        def changed(running: bool, message: str) -> None:
            self._carry_out(self.manager.on_journal(running, message, time.monotonic()))

        journal = Journal(config, self.manager.snapshot, changed)
        now = time.monotonic()
        self._carry_out(self.manager.restore(journal.open(now), now))
        self._journal = journal
        journal.start(self.manager.epoch)

    def _carry_out(self, decisions: Decisions) -> None:
        self._record(decisions)
        for name, frame in decisions.frames:
            peer = self._peers.get(name)
            if peer is not None:
                peer.put(encode(frame))
        for name, cause in decisions.close:
            peer = self._peers.get(name)
            if peer is not None:
                peer.close(cause)
        for event in decisions.events:
            self._logbook.take(event)
        if decisions.calls and self._desk is not None:
            self._desk.make(decisions.calls)

    def _record(self, decisions: Decisions) -> None:
        """Records that nobody hears of share a write with those of the other frames that have already come in."""
        journal = self._journal
        if journal is None:
            return
        gathered = journal.gather(decisions.records)
        if decisions.heard:
            journal.flush()
        elif gathered and not self._flush_called:
            self._flush_called = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_called = False
        if self._journal is not None:
            self._journal.flush()


def _ascii(text: str, most: int = 40) -> str:
    """What a peer said, fit for a header."""
    return text[:most].encode("ascii", "replace").decode()
