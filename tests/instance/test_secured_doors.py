"""Doors over real sockets: role tokens, TLS and certificates, with the reason of a refusal told on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from certificates import Papers
from penstock.errors import AuthError, ConfigError, PenstockError, RolloutError
from penstock.instance import Agent, PacedEngine
from penstock.observe.events import ConnectionRefused, Event
from penstock.rollout.client import RolloutClient
from penstock.rollout.doors import Tokens
from penstock.rollout.fleet import State
from penstock.rollout.manager import TRAINER
from penstock.rollout.server import ManagerServer, ServerConfig, TlsConfig
from penstock.tls import client_context, server_context
from penstock.weights import WeightStore
from penstock.weights.protocol import TokenRefused
from penstock.weights.puller import pull
from penstock.weights.tcp import TcpTransport
from penstock.wire import PROTOCOL, VersionPublished

OWN = Tokens(agent="a-token", trainer="t-token", operator="o-token")


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers.of(tmp_path / "papers")


@pytest.fixture
def strangers(tmp_path: Path) -> Papers:
    return Papers.of(tmp_path / "strangers")


class Watched(ManagerServer):
    """A manager's server whose events can be waited for."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self.events: list[Event] = []
        self._logbook.take = self.events.append  # type: ignore[method-assign]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)

    async def refused(self) -> ConnectionRefused:
        await self.until(lambda: any(isinstance(event, ConnectionRefused) for event in self.events))
        return next(event for event in self.events if isinstance(event, ConnectionRefused))


@contextlib.asynccontextmanager
async def serving(tokens: Tokens, tls: TlsConfig | None = None) -> AsyncIterator[Watched]:
    server = Watched(ServerConfig(tokens=tokens, tls=tls, close_s=0.5))
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def agent_at(server: ManagerServer, token: str, tls: ssl.SSLContext | None = None) -> Agent:
    engine = PacedEngine(tokens_per_s=1000.0, max_context_tokens=64)
    return Agent(engine, server.url, token, "spot-1", reconnect_s=20.0, tls=tls)


@contextlib.asynccontextmanager
async def running(agent: Agent) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(agent.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def refusal_of(agent: Agent) -> str:
    with pytest.raises(AuthError) as refused:
        await asyncio.wait_for(agent.run(), 30)
    return str(refused.value)


# ---- tokens


async def test_a_token_of_another_role_is_refused_with_the_reason_at_the_agent_and_in_the_managers_events() -> None:
    async with serving(OWN) as server:
        told = await refusal_of(agent_at(server, "t-token"))
        assert "(HTTP 403): that token is a trainer's, and this door is for agents" in told
        event = await server.refused()
        assert (event.peer, event.door) == ("127.0.0.1", "agent")
        assert event.cause == "that token is a trainer's, and this door is for agents"
        assert "t-token" not in told + event.cause


async def test_a_trainer_with_an_agents_token_is_told_so() -> None:
    async with serving(OWN) as server:
        with pytest.raises(AuthError, match=r"403\): that token is an agent's, and this door is for the trainer"):
            await RolloutClient(server.url, OWN.agent, lambda _: None, lambda _: None).connect()


async def test_a_wrong_token_is_refused_with_the_reason_at_the_agent_and_in_the_managers_events() -> None:
    async with serving(OWN) as server:
        assert "(HTTP 401): the token is missing or wrong" in await refusal_of(agent_at(server, "nonsense"))
        assert (await server.refused()).cause.startswith("the token is missing or wrong")


@pytest.mark.parametrize(
    ("path", "role"),
    [("/agent", "agent"), ("/trainer", "trainer"), ("/instances", "operator"), ("/samples", "operator")],
)
async def test_every_door_lets_in_its_own_role_and_no_other(path: str, role: str) -> None:
    async with serving(OWN) as server, aiohttp.ClientSession() as http:
        for other in ("agent", "trainer", "operator"):
            headers = {
                "Authorization": f"Bearer {getattr(OWN, other)}",
                "X-Penstock-Protocol": str(PROTOCOL),
            }
            if other == role and role != "operator":
                async with http.ws_connect(server.url + path, headers=headers) as ws:
                    assert not ws.closed
            else:
                async with http.get(server.url + path, headers=headers) as response:
                    assert response.status == (200 if other == role else 403)


async def test_a_token_that_is_not_even_text_is_refused_in_order() -> None:
    async with serving(OWN) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /samples HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        async with asyncio.timeout(20):
            assert b" 401 " in await reader.readline()
        writer.close()


async def test_no_token_is_ever_logged_shown_or_told(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the run's own tokens nor those of strangers, whatever is logged at whatever level."""
    caplog.set_level(logging.DEBUG)
    own = Tokens(agent="own-secret-a", trainer="own-secret-t", operator="own-secret-o")
    told: list[str] = []
    async with serving(own) as server, aiohttp.ClientSession() as http:
        for token in (own.trainer, "strange-secret"):
            told.append(await refusal_of(agent_at(server, token)))
            with pytest.raises(AuthError) as refused:
                await RolloutClient(server.url, token.replace(own.trainer, own.agent), print, print).connect()
            told.append(str(refused.value))
        async with running(agent_at(server, own.agent)):
            await server.until(lambda: server.manager.fleet.count(State.JOINING))
            for path in ("/", "/instances", "/samples", "/status", "/metrics", "/healthz"):
                headers = {"Authorization": f"Bearer {own.operator}"}
                async with http.get(server.url + path, headers=headers) as response:
                    assert response.status == 200
                    told.append(await response.text())
        told += [repr(event) for event in server.events]
        told.append(repr(replace(server.config, token="own-secret-s")))
    assert caplog.records
    assert len([event for event in server.events if isinstance(event, ConnectionRefused)]) >= 3
    assert "secret" not in caplog.text + "".join(told)


# ---- TLS


async def test_a_manager_that_speaks_no_tls_is_named_as_that(papers: Papers) -> None:
    async with serving(OWN) as server:
        url, tls = server.url.replace("http:", "https:"), client_context(papers.ca_file)
        agent = Agent(PacedEngine(tokens_per_s=1000.0), url, "a-token", "spot-1", reconnect_s=20.0, tls=tls)
        assert "the other side does not speak TLS at that port" in await refusal_of(agent)
        with pytest.raises(AuthError, match="does not speak TLS"):
            await RolloutClient(url, "t-token", print, print, tls=tls).connect()


async def test_whoever_speaks_plain_http_to_tls_is_hung_up_on_at_once_and_told_what_that_may_mean(
    papers: Papers,
) -> None:
    async with serving(OWN, papers.server(client_ca=False)) as server:
        url = server.url.replace("https:", "http:")
        agent = Agent(PacedEngine(tokens_per_s=1000.0), url, "a-token", "spot-1", reconnect_s=0.1)
        with pytest.raises(PenstockError, match="its address begins with https://"):
            # Sooner than any deadline of the server's, which is 10 s.
            await asyncio.wait_for(agent.run(), 9)
        with pytest.raises(RolloutError, match="its address begins with https://"):
            await RolloutClient(url, "t-token", print, print).connect()
        assert "it spoke HTTP where TLS is spoken" in (await server.refused()).cause


async def publish(server: ManagerServer, store: WeightStore) -> None:
    store.publish(0, [("w", "F32", (500,), bytes(2000))], '{"vocab_size": 50}')
    server.manager.on_trainer_connected(0.0)
    server._carry_out(server.manager.on_trainer_frame(VersionPublished(version=0, source=store.address), 0.0))


@pytest.mark.parametrize("named_by", ["CN", "OU"])
async def test_a_certificate_that_names_the_role_is_enough_for_manager_and_weight_store(
    papers: Papers, named_by: str
) -> None:
    tls = papers.server(client_ca=True)
    pair = papers.issue("agent/spot-1") if named_by == "CN" else papers.issue("spot-1", unit="agent")
    store = WeightStore(
        "run", "127.0.0.1", 0, "a-token", tls=server_context(tls.cert, tls.key, tls.client_ca, lambda _: None)
    )
    store.start()
    try:
        async with serving(OWN, tls) as server:
            assert server.url.startswith("https://")
            async with running(agent_at(server, "", client_context(papers.ca_file, *pair))):
                await server.until(lambda: server.manager.fleet.count(State.JOINING))
                await publish(server, store)
                await server.until(lambda: server.manager.fleet.count(State.READY))
    finally:
        store.close()


async def test_tls_without_client_certificates_takes_tokens_at_manager_and_weight_store(papers: Papers) -> None:
    tls = papers.server(client_ca=False)
    store = WeightStore("run", "127.0.0.1", 0, "a-token", tls=server_context(tls.cert, tls.key, "", lambda _: None))
    store.start()
    try:
        async with serving(OWN, tls) as server:
            async with running(agent_at(server, "a-token", client_context(papers.ca_file))):
                await server.until(lambda: server.manager.fleet.count(State.JOINING))
                await publish(server, store)
                await server.until(lambda: server.manager.fleet.count(State.READY))
    finally:
        store.close()


@pytest.mark.parametrize(
    ("whose", "at_the_agent", "in_the_events"),
    [
        ("expired", "this machine's certificate has expired", "its certificate is refused: certificate has expired"),
        ("another CA's", "not signed by the CA", "its certificate is refused: unable to get local issuer certificate"),
        ("missing", "it asks for a certificate", "it gave no certificate"),
        ("another role's", "that certificate is a trainer's, and this door is for agents", "is a trainer's"),
        ("nobody's", "its certificate names no role", "its certificate names no role"),
    ],
)
async def test_a_certificate_that_will_not_do_is_refused_with_the_reason_on_both_sides(
    papers: Papers, strangers: Papers, whose: str, at_the_agent: str, in_the_events: str
) -> None:
    pairs: dict[str, tuple[str, ...]] = {
        "expired": papers.issue("agent/old", expired=True),
        "another CA's": strangers.issue("agent/spot-1"),
        "missing": (),
        "another role's": papers.issue("trainer/main"),
        "nobody's": papers.issue("spot-1"),
    }
    async with serving(OWN, papers.server(client_ca=True)) as server:
        told = await refusal_of(agent_at(server, "", client_context(papers.ca_file, *pairs[whose])))
        assert at_the_agent in told
        assert in_the_events in (await server.refused()).cause
        assert len(server.manager.fleet) == 0
        assert TRAINER not in server._peers


async def test_a_manager_whose_certificate_is_another_cas_is_not_believed(papers: Papers, strangers: Papers) -> None:
    async with serving(OWN, papers.server(client_ca=False)) as server:
        told = await refusal_of(agent_at(server, "a-token", client_context(strangers.ca_file)))
        assert "the other side's certificate is not accepted here" in told
        assert len(server.manager.fleet) == 0


async def test_a_certificate_for_another_host_is_not_believed(papers: Papers) -> None:
    cert, key = papers.issue("elsewhere", "elsewhere.example")
    async with serving(OWN, TlsConfig(cert, key)) as server:
        told = await refusal_of(agent_at(server, "a-token", client_context(papers.ca_file)))
        assert "IP address mismatch" in told


async def test_nothing_below_tls_1_2_is_spoken(papers: Papers) -> None:
    tls = papers.server(client_ca=False)
    for context in (server_context(tls.cert, tls.key, "", print), client_context(papers.ca_file)):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2


async def test_a_peer_that_sends_on_after_a_failed_handshake_is_cut_off(papers: Papers) -> None:
    async with serving(OWN, papers.server(client_ca=True)) as server:
        host, port = server.url.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"SSH-2.0-OpenSSH\r\n")
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.01):
                            await reader.read(100)
        assert "the TLS handshake failed" in (await server.refused()).cause
        writer.close()


# ---- the weight store


@pytest.mark.parametrize(
    ("name", "token", "says"),
    [
        ("trainer/main", "a-token", "that certificate is a trainer's, and this door is for agents"),
        ("spot-1", "", "the token is not that of this run"),
        ("spot-1", "wrong", "the token is not that of this run"),
        ("agent/old", "", "this machine's certificate has expired"),
    ],
)
async def test_the_weight_store_refuses_what_the_manager_would(
    papers: Papers, name: str, token: str, says: str
) -> None:
    tls = papers.server(client_ca=True)
    reasons: list[str] = []
    store = WeightStore(
        "run", "127.0.0.1", 0, "a-token", tls=server_context(tls.cert, tls.key, tls.client_ca, reasons.append)
    )
    address = store.start()
    try:
        pair = papers.issue(name, expired=name == "agent/old")
        transport = TcpTransport(token, tls=client_context(papers.ca_file, *pair))
        with pytest.raises(TokenRefused, match=says):
            await pull(address, 0, token, deadline_s=30.0, transport=transport)
    finally:
        store.close()


async def test_the_weight_store_names_a_handshake_that_does_not_end(
    papers: Papers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.weights.tls_socket.HANDSHAKE_S", 0.2)
    tls = papers.server(client_ca=False)
    reasons: list[str] = []
    store = WeightStore("run", "127.0.0.1", 0, "t", tls=server_context(tls.cert, tls.key, "", reasons.append))
    host, port = store.start().split(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            while not reasons:
                await asyncio.sleep(0.01)
        writer.close()
        assert reasons == ["it did not end the TLS handshake within 0.2 s"]
    finally:
        store.close()


async def test_a_large_version_comes_whole_over_tls(papers: Papers) -> None:
    tls = papers.server(client_ca=False)
    content = os.urandom(5_000_000)
    store = WeightStore("run", "127.0.0.1", 0, "t", tls=server_context(tls.cert, tls.key, "", lambda _: None))
    address = store.start()
    try:
        store.publish(3, [("w", "U8", (len(content),), content)], "{}")
        staged = await pull(address, 3, "t", transport=TcpTransport("t", tls=client_context(papers.ca_file)))
        assert bytes(staged.tensors["w"]) == content
    finally:
        store.close()


# ---- files and the command line


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (("", ""), "belong together"),
        (("cert", ""), "belong together"),
        (("/nonexistent", "key"), "/nonexistent is not there"),
        (("cert", "ca"), "can't be used"),
    ],
)
def test_tls_files_that_can_not_be_used_are_named(papers: Papers, files: tuple[str, str], says: str) -> None:
    cert, key = papers.issue("x")
    paths = {"cert": cert, "key": key, "ca": papers.ca_file}
    with pytest.raises(ConfigError, match=says):
        server_context(paths.get(files[0], files[0]), paths.get(files[1], files[1]), "", print)
    with pytest.raises(ConfigError, match="can't be used"):
        client_context(key)


async def test_the_commands_take_role_tokens_and_certificates_from_files(papers: Papers, tmp_path: Path) -> None:
    tls = papers.server(client_ca=True)
    for role in ("agent", "trainer", "operator"):
        (tmp_path / role).write_text(f"{role[0]}-token\n")
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_TOKEN"}
    ready = tmp_path / "ready.json"
    manager = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "manager", "--ready-file", str(ready)),
        *("--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-client-ca", tls.client_ca),
        *(word for role in ("agent", "trainer", "operator") for word in (f"--{role}-token-file", str(tmp_path / role))),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
    )
    joined: asyncio.subprocess.Process | None = None
    try:
        assert manager.stdout is not None
        async with asyncio.timeout(60):
            url = (await manager.stdout.readline()).decode().split()[-1]
        cert, key = papers.issue("agent/spot-1")
        joined = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", "join", "--manager", url, "--engine", "paced", "--name", "spot-1"),
            *("--preemption", "none", "--tls-ca", papers.ca_file, "--tls-cert", cert, "--tls-key", key),
            env=environment,
        )
        context = client_context(papers.ca_file, *papers.issue("nobody"))
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            for token, status in (("a-token", 403), ("o-token", 200)):
                headers = {"Authorization": f"Bearer {token}"}
                async with http.get(f"{url}/instances", headers=headers, ssl=context) as response:
                    assert response.status == status
            names: list[str] = []
            while names != ["spot-1"]:
                async with http.get(f"{url}/instances", headers=headers, ssl=context) as response:
                    names = [row["name"] for row in await response.json()]
                await asyncio.sleep(0.05)
    finally:
        for process in (manager, joined):
            if process is not None:
                process.kill()
                await process.wait()
