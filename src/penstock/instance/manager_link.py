"""An agent's link to its manager: one WebSocket, from dialling to its close.

Decides whom an agent speaks to (a refusal is told apart from a network that fails) and how large a frame may be. Knows
frames as bytes with a type and not what they ask for: that is the agent's.
"""

from __future__ import annotations

import asyncio
import logging
import ssl

import aiohttp

from penstock.errors import AuthError, FrameTooLarge, PenstockError, ProtocolMismatch, WireError
from penstock.tls import HINT_TLS, hung_up, refusal_words
from penstock.wire import (
    MIN_FRAME_BYTES,
    PROTOCOL,
    AgentHello,
    FrameFromManager,
    FrameToManager,
    Welcome,
    decode_from_manager,
    encode,
)
from penstock.wire.codec import PROTOCOL_HEADER, REFUSAL_HEADER

__all__ = ["ManagerLink", "agent_url", "words_of"]

CONNECT_S = 10.0
WELCOME_S = 10.0
SEND_S = 20.0
"""A manager that takes no frame for so long has lost this agent."""
PING_S = 20.0
"""Seconds between pings; a manager that does not answer one within half of it is gone."""
CLOSE_S = 1.0

log = logging.getLogger("penstock.agent")


class ManagerLink:
    """One connection; `dial` makes it and `close` ends it, as often as wanted.

    No frame is over `max_frame_bytes`, nor over what the manager's welcome says.
    """

    def __init__(self, url: str, token: str, max_frame_bytes: int, tls: ssl.SSLContext | None) -> None:
        self.url = url
        self.frame_limit = max_frame_bytes
        """Bytes of one frame in this session, either way."""
        self._token = token
        self._max_frame_bytes = max_frame_bytes
        self._tls = tls
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._welcomed = False
        self._sending = asyncio.Lock()

    async def dial(self, http: aiohttp.ClientSession) -> None:
        """Raises AuthError and ProtocolMismatch where coming again makes no sense; connection errors go through."""
        self._socket, self._welcomed = None, False
        headers = {PROTOCOL_HEADER: str(PROTOCOL)}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            async with asyncio.timeout(CONNECT_S):
                self._socket = await http.ws_connect(
                    self.url,
                    headers=headers,
                    ssl=self._tls or True,
                    max_msg_size=self._max_frame_bytes,
                    heartbeat=PING_S,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403):
                told = error.headers.get(REFUSAL_HEADER, "") if error.headers else ""
                raise AuthError(
                    f"the manager at {self.url} refused this agent (HTTP {error.status}): "
                    + (told or "give the run's token in the environment variable PENSTOCK_TOKEN or with --token-file")
                ) from error
            if error.status == 426:
                theirs = error.headers.get(PROTOCOL_HEADER, "another one") if error.headers else "another one"
                raise ProtocolMismatch(
                    f"the manager at {self.url} speaks protocol {theirs} and this agent {PROTOCOL} (HTTP 426); "
                    "install the same version of Penstock on both sides"
                ) from error
            raise
        except (OSError, aiohttp.ClientError) as error:
            if words := refusal_words(error):
                raise AuthError(f"no TLS connection to the manager at {self.url}: {words}") from error
            if hung_up(error) and self.url.startswith(("http:", "ws:")):
                raise ConnectionError(f"{words_of(error)} ({HINT_TLS})") from error
            raise

    async def introduce(self, hello: AgentHello) -> Welcome:
        """Raises WireError for a welcome that makes no sense, ConnectionError where none comes in time."""
        socket, self.frame_limit = self._open(), self._max_frame_bytes
        try:
            async with asyncio.timeout(WELCOME_S):
                await socket.send_bytes(encode(hello))
                frame = await self.receive()
        except TimeoutError:
            raise ConnectionError(f"no welcome within {WELCOME_S:g} s") from None
        if isinstance(frame, str):
            raise ConnectionError(frame)
        if not isinstance(frame, Welcome):
            raise WireError(f"the first frame of a manager is a Welcome, and this is a {type(frame).__name__}")
        check_welcome(frame)
        if frame.max_frame_bytes:
            self.frame_limit = min(frame.max_frame_bytes, self._max_frame_bytes)
        self._welcomed = True
        return frame

    async def receive(self) -> FrameFromManager | str:
        """The next frame, or why none will come. The wait is bounded by the socket's pings. Raises WireError."""
        socket = self._open()
        message = await socket.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            return decode_from_manager(message.data, self.frame_limit)
        if message.type is aiohttp.WSMsgType.TEXT:
            raise WireError("the manager sent text; frames are binary")
        error = message.data if message.type is aiohttp.WSMsgType.ERROR else socket.exception()
        if isinstance(error, aiohttp.WebSocketError):
            kind = FrameTooLarge if error.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG else WireError
            raise kind(f"the manager sent what is no frame: {error}")
        why = str(message.extra or "") or (words_of(error) if isinstance(error, BaseException) else "")
        code = f" (code {socket.close_code})" if socket.close_code else ""
        return f"the manager closed the connection{code}{': ' + why if why else ''}"

    async def send(self, frame: FrameToManager) -> bool:
        """False where there is no session, or it broke on this frame; its receiver then ends it."""
        socket = self._socket
        if socket is None or not self._welcomed:
            return False
        try:
            async with asyncio.timeout(SEND_S), self._sending:
                await socket.send_bytes(encode(frame))
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            log.warning("a %s could not be sent: %s", type(frame).__name__, words_of(error))
            await self._shut(socket, int(aiohttp.WSCloseCode.GOING_AWAY), "sending failed")
            return False
        return True

    def silence(self) -> None:
        """Nothing more is sent in this session."""
        self._welcomed = False

    async def close(self, code: int, message: str) -> None:
        """Nothing where there is no connection, or it is closed already."""
        if self._socket is not None:
            await self._shut(self._socket, code, message)

    async def _shut(self, socket: aiohttp.ClientWebSocketResponse, code: int, message: str) -> None:
        try:
            async with asyncio.timeout(2 * CLOSE_S):
                # A close frame has room for 123 bytes of reason (RFC 6455, section 5.5).
                await socket.close(code=code, message=message.encode()[:120])
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            log.debug("the socket was not closed in order: %s", words_of(error))

    def _open(self) -> aiohttp.ClientWebSocketResponse:
        if self._socket is None:
            raise ConnectionError("the manager was not dialled")
        return self._socket


def check_welcome(welcome: Welcome) -> None:
    """Raises WireError for what makes no sense."""
    context, limit = welcome.max_context_tokens, welcome.max_frame_bytes
    if not welcome.heartbeat_s > 0 or welcome.frame_steps < 1:
        raise WireError(f"a welcome with heartbeat_s={welcome.heartbeat_s} and frame_steps={welcome.frame_steps}")
    if not welcome.hold_off_s >= 0:
        raise WireError(f"a welcome with hold_off_s={welcome.hold_off_s}")
    if (context and context < 2) or (limit and limit < MIN_FRAME_BYTES):
        raise WireError(f"a welcome with max_context_tokens={context} and max_frame_bytes={limit}")


def agent_url(manager_url: str) -> str:
    """The WebSocket address for agents of a manager given as `http://host:port` or `host:port`."""
    url = manager_url.strip()
    if "://" not in url:
        url = f"http://{url}"
    scheme, _, rest = url.partition("://")
    rest = rest.rstrip("/")
    if scheme not in ("http", "https", "ws", "wss") or not rest:
        raise PenstockError(f"{manager_url!r} is not the address of a manager; expected http://host:port")
    return f"{scheme}://{rest}/agent"


def words_of(error: BaseException) -> str:
    return str(error) or type(error).__name__
