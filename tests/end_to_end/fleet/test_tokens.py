"""Tokens of etcd that are refused: users and roles change, tokens expire, members restart."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentd_fleet.store import etcd_transport
from agentd_fleet.store.etcd_client import EtcdClient
from agentd_fleet.store.etcd_transport import (
    MAX_LOGINS,
    EtcdCredentials,
    EtcdRefused,
    EtcdUnavailable,
)
from end_to_end.fleet.etcd_server import EtcdServers, signed
from end_to_end.fleet.fleet_world import World
from support.waiting import until

PASSWORD = "secret"  # noqa: S105
KEY = "/agentd/main/nodes/a"


@pytest.fixture(params=["jwt", "simple"])
async def servers(
    request: pytest.FixtureRequest, tmp_path: Path, running: list[EtcdServers]
) -> EtcdServers:
    options = [signed(tmp_path)] if request.param == "jwt" else []
    running.append(EtcdServers(tmp_path / "etcd", options=options))
    await running[0].start()
    await running[0].require_logins(PASSWORD, a=(KEY,))
    return running[0]


@pytest.fixture
async def etcd(servers: EtcdServers) -> AsyncIterator[EtcdClient]:
    async with EtcdClient(EtcdCredentials(servers.endpoints, "a", PASSWORD)) as made:
        yield made


async def use(etcd: EtcdClient) -> None:
    """Make every kind of call."""
    lease = await etcd.grant(60)
    written = await etcd.put_if(KEY, b"1", expected=0, lease=lease)
    assert written is not None
    assert await etcd.keep_alive(lease) > 0
    async with aclosing(etcd.watch(KEY, after=written - 1)) as watch:
        assert (await anext(watch))[1] >= written
    assert (await etcd.range(KEY))[0]
    await etcd.create_all({KEY: (b"2", KEY)})
    assert await etcd.delete_if(KEY, expected=written)


CHANGES: list[tuple[str, dict[str, str]]] = [
    ("role/add", {"name": "b"}),
    ("user/add", {"name": "b", "password": PASSWORD}),
    ("user/grant", {"user": "b", "role": "b"}),
    ("user/changepw", {"name": "b", "password": "other"}),
    ("user/changepw", {"name": "a", "password": PASSWORD}),
    ("user/delete", {"name": "b"}),
    ("role/delete", {"role": "b"}),
]


@pytest.mark.parametrize("first", range(8))
async def test_each_call_alone_survives_a_change_of_users(
    servers: EtcdServers, etcd: EtcdClient, first: int
) -> None:
    """The first call after a change is refused, whichever it is."""
    lease = await etcd.grant(60)
    revision = await etcd.put(KEY, b"1")

    async def watched() -> None:
        async with aclosing(etcd.watch(KEY, after=revision - 1)) as watch:
            await anext(watch)

    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: etcd.get(KEY),
        lambda: etcd.put(KEY, b"2", lease=lease),
        lambda: etcd.put_if(KEY, b"2", expected=revision),
        lambda: etcd.delete(KEY),
        lambda: etcd.keep_alive(lease),
        lambda: etcd.revision(KEY),
        lambda: etcd.create_all({KEY: (b"2", KEY)}),
        watched,
    ]
    await servers.ask("/v3/auth/role/add", {"name": "b"})
    await calls[first]()


@pytest.mark.parametrize("is_signed", [True, False], ids=["jwt", "simple"])
async def test_calls_succeed_after_the_token_has_expired(
    tmp_path: Path, running: list[EtcdServers], *, is_signed: bool
) -> None:
    option = signed(tmp_path, "1s") if is_signed else "--auth-token-ttl=1"
    running.append(EtcdServers(tmp_path / "etcd", options=[option]))
    await running[0].start()
    await running[0].require_logins(PASSWORD, a=(KEY,))
    async with EtcdClient(EtcdCredentials(running[0].endpoints, "a", PASSWORD)) as etcd:
        await use(etcd)
        first, pause_s = etcd._transport._token, 0.0 if is_signed else 1.0
        async with asyncio.timeout(20):
            while etcd._transport._token == first:
                await asyncio.sleep(pause_s)  # each use of a simple token starts its time again
                pause_s *= 2
                await use(etcd)


async def test_changed_password_is_refused_until_it_is_right(
    servers: EtcdServers, etcd: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_transport, "LOGIN_PAUSE_S", 0.0)
    await use(etcd)
    await servers.ask("/v3/auth/user/changepw", {"name": "a", "password": "other"})
    for _ in range(2):
        with pytest.raises(EtcdRefused, match="invalid user ID or password"):
            await etcd.get(KEY)
    await servers.ask("/v3/auth/user/changepw", {"name": "a", "password": PASSWORD})
    await use(etcd)


class FakeEtcd:
    """A server that refuses every token but the accepted ones, in one member's words."""

    def __init__(self, status: int, body: Any) -> None:
        self.status, self.body = status, body
        self.logins = 0
        self.accepted = {"t1"}

    @asynccontextmanager
    async def serving(self, user: str = "a") -> AsyncIterator[EtcdClient]:
        """Serve, and yield a client."""
        app = web.Application()
        app.router.add_post("/v3/auth/authenticate", self.login)
        app.router.add_post("/{rest:.*}", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with EtcdClient(EtcdCredentials((endpoint,), user, PASSWORD if user else "")) as etcd:
            yield etcd
        await runner.cleanup()

    async def login(self, _: web.Request) -> web.Response:
        self.logins += 1
        if not self.accepted:
            return web.json_response({"error": WRONG, "code": 3}, status=400)
        return web.json_response({"header": {}, "token": f"t{self.logins}"})

    async def answer(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") not in self.accepted:
            return web.Response(status=self.status, text=json.dumps(self.body) + "\n")
        if request.path == "/v3/watch":
            events = {"header": {"revision": "7"}, "created": True}
            return web.Response(text=2 * f"{json.dumps({'result': events})}\n")
        return web.json_response({"header": {"revision": "7"}})


def cancelled(why: str) -> dict[str, object]:
    message = {"watch_id": "-1", "created": True, "canceled": True, "cancel_reason": why}
    return {"result": {"header": {"revision": "7"}, **message}}


WRONG = "etcdserver: authentication failed, invalid user ID or password"
OLD = "etcdserver: revision of auth store is old"
INVALID = "etcdserver: invalid auth token"
EMPTY = "etcdserver: user name is empty"
REFUSALS: dict[str, tuple[int, Any]] = {
    "3.4": (400, {"error": OLD, "message": OLD, "code": 3}),
    "3.5": (401, {"error": INVALID, "code": 16, "message": INVALID}),
    "3.6": (400, {"code": 3, "message": OLD, "details": []}),
    "3.6 invalid": (401, {"code": 16, "message": INVALID}),
    "applied": (500, {"error": "auth: revision in header is old", "code": 2}),
    "empty": (400, {"error": EMPTY, "code": 3}),
    "other words": (401, {"message": "who are you?"}),
    "no JSON": (401, "unauthorized"),
}
CANCELLATIONS: dict[str, tuple[int, Any]] = {
    "old": (200, cancelled(f"rpc error: code = InvalidArgument desc = {OLD}")),
    "invalid": (200, cancelled(f"rpc error: code = Unauthenticated desc = {INVALID}")),
    "unprefixed": (200, cancelled(INVALID)),
    "empty": (200, cancelled(EMPTY)),
    "other words": (200, cancelled("rpc error: code = Unauthenticated desc = who?")),
    "3.5 stream": (200, {"error": {"grpc_code": 16, "http_code": 401, "message": INVALID}}),
    "3.6 stream": (200, {"error": {"code": 16, "message": "who are you?", "details": []}}),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
async def test_refused_token_is_renewed_by_one_login(refusal: tuple[int, Any]) -> None:
    fake = FakeEtcd(*refusal)
    async with fake.serving() as etcd:
        assert await etcd.revision() == 7
        fake.accepted = {"t2"}
        assert {*await asyncio.gather(*(etcd.revision() for _ in range(8)))} == {7}
        assert fake.logins == 2


@pytest.mark.parametrize("refusal", CANCELLATIONS.values(), ids=CANCELLATIONS)
async def test_watch_with_a_refused_token_is_made_again(refusal: tuple[int, Any]) -> None:
    fake = FakeEtcd(*refusal)
    async with fake.serving() as etcd:
        for token in ("t1", "t2"):
            fake.accepted = {token}
            async with aclosing(etcd.watch(KEY, after=0)) as watch:
                assert await anext(watch) == ([], 7)
        assert fake.logins == 2


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
async def test_refusal_of_every_token_is_temporary(refusal: tuple[int, Any]) -> None:
    """Users may change again after a login: one more helps, or a later call."""
    fake = FakeEtcd(*refusal)
    fake.accepted = {"t9"}
    async with fake.serving() as etcd:
        for calls in (1, 2):
            with pytest.raises(EtcdUnavailable):
                await etcd.revision()
            assert fake.logins == calls * MAX_LOGINS
        fake.accepted = {f"t{3 * MAX_LOGINS}"}
        assert await etcd.revision() == 7


async def test_denied_watch_is_refused_without_another_login() -> None:
    denied = "rpc error: code = PermissionDenied desc = etcdserver: permission denied"
    fake = FakeEtcd(200, cancelled(denied))
    fake.accepted = {"t9"}
    async with fake.serving() as etcd:
        for _ in range(2):
            with pytest.raises(EtcdRefused, match="permission denied"):
                await anext(etcd.watch(KEY, after=0))
        assert fake.logins == 1


async def test_refused_login_counts_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the end of a password makes every client of the fleet cost etcd a bcrypt each call."""
    monkeypatch.setattr(etcd_transport, "LOGIN_PAUSE_S", 600.0)
    fake = FakeEtcd(*REFUSALS["3.4"])
    async with fake.serving() as etcd:
        assert await etcd.revision() == 7
        fake.accepted = set()
        calls = await asyncio.gather(*(etcd.revision() for _ in range(8)), return_exceptions=True)
        assert [type(error) for error in calls] == [EtcdRefused] * 8
        assert {WRONG in str(error) for error in calls} == {True}
        assert fake.logins == 2
        fake.accepted = {"t3"}
        monkeypatch.setattr(etcd_transport, "LOGIN_PAUSE_S", 0.0)
        assert await etcd.revision() == 7


async def test_error_of_a_proxy_before_etcd_is_temporary() -> None:
    fake = FakeEtcd(503, {"error": {"code": 503, "message": "no healthy upstream"}})
    async with fake.serving(user="") as etcd:
        with pytest.raises(EtcdUnavailable, match="no healthy upstream"):
            await etcd.revision()


async def test_answer_that_is_not_of_etcd_is_refused() -> None:
    for body in ({}, {"result": 7}, {"kvs": []}, [], None):
        async with FakeEtcd(200, body).serving(user="") as etcd:
            with pytest.raises(EtcdRefused):
                await etcd.revision()
            with pytest.raises(EtcdRefused):
                await anext(etcd.watch(KEY, after=0))


@pytest.mark.parametrize("kind", ["jwt", "simple"])
async def test_fleet_serves_while_users_change(world: World, kind: str) -> None:
    options = {"options": [signed(world.folder)]} if kind == "jwt" else {}
    servers = await world.start_etcd(is_own=True, **options)
    (node,) = await world.start_nodes("none")
    mine = tuple(f"/agentd/main/{part}/{node}" for part in ("nodes", "free", "known"))
    await servers.require_logins(PASSWORD, node=mine, gate=("/agentd/main/",))
    (world.folder / "password").write_text(f"{PASSWORD}\n")
    await asyncio.to_thread((world.folder / "password").chmod, 0o600)

    def kept_in(user: str) -> str:
        password = f'etcd-user = "{user}"\netcd-password-file = "{world.folder}/password"\n'
        return f"{world.kept_in}{password}"

    publisher = world.join(node, kept_in=kept_in("node"))
    gateway = world.gateway(kept_in("gate"))
    await gateway.until({node: "ready"})
    for number in range(2):
        for step, (path, change) in enumerate(CHANGES):
            names = {"a": "node"}
            body = {member: names.get(value, value) for member, value in change.items()}
            await servers.ask(f"/v3/auth/{path}", body)
            kernel_id = f"k{number}-{step}"
            made = await gateway.create(kernel_id=kernel_id)
            assert made.status == 201, made.content
            assert (
                await gateway.call("DELETE", f"/v1/kernels/{kernel_id}?timeout=0")
            ).status == 204
        await servers.ask("/v3/auth/disable", {})
        servers._password = ""
        made = await gateway.create(kernel_id=f"off{number}")
        assert made.status == 201, made.content
        await servers.ask("/v3/auth/enable", {})
        servers._password = PASSWORD
        made = await gateway.create(kernel_id=f"on{number}")
        assert made.status == 201, made.content
    assert "node.publish_failed" not in publisher.log
    await servers.restart(0)
    await until(lambda: gateway.create(kernel_id="last"), lambda value: value.status in (200, 201))
    await gateway.until({node: "ready"})
    assert publisher.is_running
    assert gateway.is_running
