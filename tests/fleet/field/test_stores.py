"""A gateway's view of etcd when etcd hangs, ends, comes back older, or has new users."""

import asyncio
import contextlib
import inspect
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from agentd.client.tls import client_tls
from agentd_fleet.store import etcd_store, etcd_transport
from agentd_fleet.store.etcd_client import Change, EtcdClient
from agentd_fleet.store.etcd_store import RETRY_S, SILENCE_S, STALE_S, EtcdStore
from agentd_fleet.store.etcd_transport import (
    EtcdCredentials,
    EtcdRefused,
    EtcdUnavailable,
    WatchStream,
)
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import NodeStatus
from end_to_end.fleet.etcd_server import EtcdServers
from end_to_end.fleet.network import Proxy
from support.certificates import certificate_that_ends
from support.fleet_reports import node_report
from support.waiting import until

PREFIX = "/agentd/main/"
TIMEOUT_S = 0.2


class Followed:
    """A gateway's store and state, without the gateway."""

    def __init__(self, etcd: EtcdClient) -> None:
        self.state = FleetState()
        self.store = EtcdStore(etcd, "main", self.state)

    @property
    def is_live(self) -> bool:
        return not self.store.stale_reason()

    def status(self, node_id: str) -> NodeStatus | None:
        node = self.state.node(node_id)
        return None if node is None else node.status

    def slot_types(self, node_id: str) -> Collection[str]:
        node = self.state.node(node_id)
        return () if node is None else node.slot_types

    async def until_live(self) -> None:
        await until(self.store.stale_reason, "")


@asynccontextmanager
async def following(etcd: EtcdClient) -> AsyncIterator[Followed]:
    followed = Followed(etcd)
    async with etcd:
        running = asyncio.create_task(followed.store.run())
        yield followed
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@pytest.fixture(autouse=True)
def _is_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "SILENCE_S", 0.3)
    monkeypatch.setattr(etcd_store, "STALE_S", 1.0)
    monkeypatch.setattr(etcd_store, "RETRY_S", (0.02, 0.05))


@pytest.fixture
async def proxy(mortal: EtcdServers) -> AsyncIterator[Proxy]:
    """The way of the gateway to `mortal`."""
    made = Proxy(mortal.endpoints[0])
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with capture_logs() as captured:
        yield captured


async def publish(etcd: EtcdClient, *numbers: int) -> None:
    for number in numbers:
        await etcd.put(f"{PREFIX}nodes/n{number}", node_report(number, 3))
        await etcd.put(f"{PREFIX}known/n{number}", b'{"first_seen": "2026", "url": ""}')


async def _drop(_: EtcdServers, proxy: Proxy) -> None:
    proxy.drop()


async def _mend(_: EtcdServers, proxy: Proxy) -> None:
    proxy.mend()


async def _pause(servers: EtcdServers, _: Proxy) -> None:
    servers.pause(0)


async def _resume(servers: EtcdServers, _: Proxy) -> None:
    servers.resume(0)


_Step = Callable[[EtcdServers, Proxy], Awaitable[None]]
OUTAGES: dict[str, tuple[_Step, _Step]] = {
    "frozen": (_pause, _resume),
    "killed": (lambda servers, _: servers.kill(0), lambda servers, _: servers.restart(0)),
    "behind a firewall": (_drop, _mend),
}


@pytest.mark.parametrize(("begin", "end"), OUTAGES.values(), ids=OUTAGES)
async def test_an_outage_is_one_without_a_break(
    mortal: EtcdServers, proxy: Proxy, lines: list[Any], begin: _Step, end: _Step
) -> None:
    """Every probe of readiness in it says the same, and the log says that it began and ended."""
    etcd = EtcdClient(EtcdCredentials((proxy.endpoint,)), timeout_s=TIMEOUT_S)
    async with following(etcd) as followed:
        await followed.until_live()
        await begin(mortal, proxy)
        await until(followed.store.stale_reason)
        await until(lambda: lines)
        samples = 0
        deadline = time.monotonic() + 3 * etcd_store.STALE_S
        while time.monotonic() < deadline:
            assert not followed.is_live, samples
            samples += 1
            await asyncio.sleep(0.002)
        await end(mortal, proxy)
        await followed.until_live()
    assert [line["event"] for line in lines] == ["store.lost", "store.recovered"]
    assert samples > 100


def test_an_outage_is_noticed_by_the_tenth_second() -> None:
    timeout_s = inspect.signature(EtcdClient).parameters["timeout_s"].default
    assert SILENCE_S + timeout_s + RETRY_S[1] < STALE_S < 10


async def test_an_outage_ends_when_every_part_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not when the first one has, and others become stale a second later."""
    followed = Followed(EtcdClient(EtcdCredentials(("http://127.0.0.1:1",))))
    for part in etcd_store.PARTS:
        followed.store._on_answer(part)
    assert followed.is_live
    followed.store._failures.update({"nodes/": "no answer", "free/": "no answer"})
    assert followed.is_live
    monkeypatch.setattr(etcd_store, "STALE_S", 0.0)
    assert not followed.is_live
    monkeypatch.setattr(etcd_store, "STALE_S", 1000.0)
    for part, is_live in (("nodes/", False), ("free/", True)):
        followed.store._on_answer(part)
        assert followed.is_live == is_live


async def test_a_store_without_an_answer_is_never_live(lines: list[Any]) -> None:
    refused = EtcdCredentials(("http://127.0.0.1:1",))
    async with following(EtcdClient(refused, timeout_s=TIMEOUT_S)) as followed:
        assert followed.store.stale_reason() == "etcd has not answered yet"
        await until(lambda: lines)
        assert "Cannot connect" in followed.store.stale_reason()
        assert [line["event"] for line in lines] == ["store.lost"]


async def test_a_broken_connection_is_no_outage(
    mortal: EtcdServers, proxy: Proxy, lines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A balancer that cuts what is idle, and a member that restarts, cost no create."""
    monkeypatch.setattr(etcd_store, "STALE_S", 20.0)
    async with following(EtcdClient(EtcdCredentials((proxy.endpoint,)))) as followed:
        await followed.until_live()
        for number in range(3):
            await proxy.cut()
            proxy.mend()
            async with EtcdClient(EtcdCredentials(mortal.endpoints)) as etcd:
                await publish(etcd, number)
            await until(lambda number=number: followed.status(f"n{number}"), NodeStatus.READY)
            assert followed.is_live
    assert lines == []


@pytest.mark.parametrize("is_ahead", [True, False], ids=["newer revision", "older revision"])
@pytest.mark.parametrize("is_empty", [True, False], ids=["emptied", "snapshot"])
async def test_a_store_that_came_back_lacks_what_died_meanwhile(
    mortal: EtcdServers, proxy: Proxy, lines: list[Any], *, is_empty: bool, is_ahead: bool
) -> None:
    """Its revision may be any, and its cluster id is that of before."""
    direct = EtcdClient(EtcdCredentials(mortal.endpoints))
    gateway = EtcdClient(EtcdCredentials((proxy.endpoint,)), timeout_s=TIMEOUT_S)
    async with direct, following(gateway) as followed:
        await publish(direct, 1, 2)
        backup = None if is_empty else await mortal.back_up()
        await publish(direct, 3, 3, 3)
        await until(lambda: followed.status("n3"), NodeStatus.READY)
        before = await direct.revision()
        await proxy.cut()
        await mortal.restore(backup)
        await publish(direct, 2)
        while is_ahead and await direct.revision() <= before:
            await direct.put("/filler", b"")
        proxy.mend()
        await until(lambda: followed.status("n3"), lambda status: status != NodeStatus.READY)
        await until(lambda: followed.status("n2"), NodeStatus.READY)
        assert (followed.status("n1") == NodeStatus.READY) == (not is_empty)
        await followed.until_live()
    reverted = [line["event"] for line in lines if line["event"] == "store.reverted"]
    assert reverted == ([] if is_ahead else ["store.reverted"])


class Deaf(EtcdClient):
    """A client whose watches stay open and yield nothing, as if etcd starved them."""

    async def watch(self, *args: Any, **options: Any) -> Any:
        watch = super().watch(*args, **options)
        async with contextlib.aclosing(watch):
            async for _ in watch:
                pass
        yield list[Change](), 0


async def test_lists_notice_what_an_open_watch_missed(
    servers: EtcdServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_store, "LIST_S", (0.05, 0.1))
    async with (
        EtcdClient(EtcdCredentials(servers.endpoints)) as etcd,
        following(Deaf(EtcdCredentials(servers.endpoints))) as followed,
    ):
        await publish(etcd, 1, 2)
        await until(lambda: followed.status("n1"), NodeStatus.READY)
        await etcd.delete(f"{PREFIX}nodes/n1")
        await until(lambda: followed.status("n1"), NodeStatus.LOST)
        await etcd.delete(f"{PREFIX}known/n1")
        await until(lambda: followed.status("n1"), None)
        assert followed.status("n2") == NodeStatus.READY
        slot = f"{PREFIX}slot-types/dev0.unit"
        await until(lambda: etcd.get(slot))
        await etcd.delete(slot)
        await until(lambda: etcd.get(slot), text="written again, because n2 offers it")


MISSED: dict[str, tuple[str, bytes | None, Callable[[Followed], bool]]] = {
    "put": ("n2", node_report(2, 3), lambda one: one.status("n2") == NodeStatus.READY),
    "overwrite": ("n1", node_report(1, 2), lambda one: len(one.slot_types("n1")) == 2),
    "delete": ("n1", None, lambda one: one.status("n1") == NodeStatus.LOST),
}


@pytest.mark.parametrize(("node", "value", "is_noticed"), MISSED.values(), ids=MISSED)
async def test_a_deaf_watch_is_noticed_by_its_probe(
    servers: EtcdServers,
    monkeypatch: pytest.MonkeyPatch,
    node: str,
    value: bytes | None,
    is_noticed: Callable[[Followed], bool],
) -> None:
    """A proxy may keep a connection open whose other end has died; new ones are answered."""
    read, is_deaf, swallowed = WatchStream.next, asyncio.Event(), asyncio.Event()

    async def next_unless_deaf(stream: WatchStream) -> dict[str, Any]:
        message = await read(stream)
        if is_deaf.is_set() and "events" in message:
            swallowed.set()
            await asyncio.Event().wait()
        return message

    monkeypatch.setattr(WatchStream, "next", next_unless_deaf)
    async with (
        EtcdClient(EtcdCredentials(servers.endpoints)) as etcd,
        following(EtcdClient(EtcdCredentials(servers.endpoints))) as followed,
    ):
        await publish(etcd, 1)
        await until(lambda: followed.status("n1"), NodeStatus.READY)
        is_deaf.set()
        key = f"{PREFIX}nodes/{node}"
        await (etcd.delete(key) if value is None else etcd.put(key, value))
        await swallowed.wait()
        is_deaf.clear()
        await until(lambda: is_noticed(followed))
        assert followed.is_live


async def test_a_watch_drops_what_is_older_than_the_list(
    servers: EtcdServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that lags behind sends what is before the first revision that was asked for."""
    read = WatchStream.next

    async def with_old_events(stream: WatchStream) -> dict[str, Any]:
        message = await read(stream)
        for event in message.get("events", ()):
            message["events"] = [{"kv": {**event["kv"], "mod_revision": "2"}}, event]
        return message

    async with EtcdClient(EtcdCredentials(servers.endpoints)) as etcd:
        revision = await etcd.put(f"{PREFIX}nodes/n1", b"1")
        monkeypatch.setattr(WatchStream, "next", with_old_events)
        async with contextlib.aclosing(etcd.watch(PREFIX, after=revision)) as watch:
            written = await etcd.put(f"{PREFIX}nodes/n1", b"2")
            changes, reached = await anext(watch)
    assert changes == [Change(f"{PREFIX}nodes/n1", b"2", written)]
    assert reached == written


async def test_a_list_of_what_is_known_changes_no_node(
    servers: EtcdServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 reports, read again at once, would block the gateway for a second."""
    monkeypatch.setattr(etcd_store, "LIST_S", (0.05, 0.1))
    client, lists = EtcdClient(EtcdCredentials(servers.endpoints)), 0
    read = client.range

    async def count(prefix: str) -> Any:
        nonlocal lists
        lists += prefix.endswith("nodes/")
        return await read(prefix)

    monkeypatch.setattr(client, "range", count)
    async with EtcdClient(EtcdCredentials(servers.endpoints)) as etcd, following(client) as one:
        await publish(etcd, 1)
        await until(lambda: one.status("n1"), NodeStatus.READY)
        node, listed = one.state.node("n1"), lists
        await until(lambda: lists, lambda count: count > listed + 3)
        assert one.state.node("n1") is node


async def test_a_node_that_returned_is_lost_again(mortal: EtcdServers) -> None:
    """It was forgotten at a revision that the restored store reaches only much later."""
    async with (
        EtcdClient(EtcdCredentials(mortal.endpoints)) as etcd,
        following(EtcdClient(EtcdCredentials(mortal.endpoints))) as followed,
    ):
        await publish(etcd, 1)
        await until(lambda: followed.status("n1"), NodeStatus.READY)
        await etcd.delete(f"{PREFIX}nodes/n1")
        await etcd.delete(f"{PREFIX}known/n1")
        await until(lambda: followed.status("n1"), None)
        await mortal.restore(None)
        await publish(etcd, 1)
        await until(lambda: followed.status("n1"), NodeStatus.READY)
        await etcd.delete(f"{PREFIX}nodes/n1")
        await until(lambda: followed.status("n1"), NodeStatus.LOST)


@pytest.mark.parametrize("is_signed", [True, False], ids=["jwt", "simple"])
async def test_a_view_stays_live_while_users_change(
    tmp_path: Path, running: list[EtcdServers], lines: list[Any], *, is_signed: bool
) -> None:
    running.append(EtcdServers(tmp_path / "etcd", is_signed=is_signed))
    servers = running[0]
    await servers.start()
    await servers.require_logins("secret", gate=(PREFIX,), node=(PREFIX,))
    node = EtcdClient(EtcdCredentials(servers.endpoints, "node", "secret"))
    gate = EtcdClient(EtcdCredentials(servers.endpoints, "gate", "secret"))
    async with node, following(gate) as followed:
        await followed.until_live()
        lines.clear()
        for number in range(3):
            await servers.add_user(f"other-{number}", "secret", PREFIX)
            await publish(node, number)
            await until(lambda number=number: followed.status(f"n{number}"), NodeStatus.READY)
            assert followed.is_live
    assert lines == []


async def test_a_user_that_is_deleted_and_made_again_is_no_restart(
    mortal: EtcdServers, lines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_transport, "LOGIN_PAUSE_S", 0.1)
    await mortal.require_logins("secret", gate=(PREFIX,), node=(PREFIX,))
    gate = EtcdClient(EtcdCredentials(mortal.endpoints, "gate", "secret"))
    async with following(gate) as followed:
        await followed.until_live()
        await mortal.ask("/v3/auth/user/delete", {"name": "gate"})
        await mortal.ask("/v3/auth/role/delete", {"role": "gate"})
        await until(followed.store.stale_reason)
        await mortal.add_user("gate", "secret", PREFIX)
        await followed.until_live()
        async with EtcdClient(EtcdCredentials(mortal.endpoints, "node", "secret")) as node:
            await publish(node, 1)
        await until(lambda: followed.status("n1"), NodeStatus.READY)
    assert [line["event"] for line in lines] == ["store.lost", "store.recovered"]


async def test_a_refused_login_does_not_delay_a_replaced_one(
    mortal: EtcdServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_transport, "LOGIN_PAUSE_S", 600.0)
    await mortal.require_logins("secret", a=(PREFIX,))
    async with EtcdClient(EtcdCredentials(mortal.endpoints, "a", "wrong")) as etcd:
        with pytest.raises(EtcdRefused):
            await publish(etcd, 1)
        etcd.replace_credentials(EtcdCredentials(mortal.endpoints, "a", "secret"))
        await publish(etcd, 1)


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, Any]:
    """Contexts of a server, and of clients with certificates and authorities that it refuses."""
    files = {}
    for name, days in (("server", 1), ("valid", 1), ("expired", -1)):
        (tmp_path / name).mkdir()
        files[name] = certificate_that_ends(tmp_path / name, days)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(*files["server"])
    server.verify_mode = ssl.CERT_REQUIRED
    contexts: dict[str, Any] = {"server": server}
    for name, own, trusted in (
        ("valid", "valid", "server"),
        ("with an expired certificate", "expired", "server"),
        ("with another authority", "valid", "expired"),
    ):
        server.load_verify_locations(files[own][0])
        contexts[name] = client_tls(cafile=str(files[trusted][0]))
        contexts[name].check_hostname = False  # the certificates have no name
        contexts[name].load_cert_chain(*files[own])
    return contexts


@pytest.mark.parametrize("client", ["with an expired certificate", "with another authority"])
async def test_a_refused_certificate_can_be_replaced(
    mortal: EtcdServers, tls: dict[str, Any], client: str
) -> None:
    proxy = Proxy(mortal.endpoints[0], tls["server"])
    await proxy.start()
    etcd = EtcdClient(EtcdCredentials((proxy.endpoint,), tls=tls[client]))
    async with following(etcd) as followed:
        with pytest.raises(EtcdUnavailable):
            await publish(etcd, 1)
        etcd.replace_credentials(EtcdCredentials((proxy.endpoint,), tls=tls["valid"]))
        await followed.until_live()
    await proxy.stop()
