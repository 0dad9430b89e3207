"""Publishers that share a node id, whose keys are deleted, and that cannot write.

A node's key in etcd has the revision at which it was created, so it tells whether the node was ever
lost.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
from structlog.testing import capture_logs

from agentd_fleet.join.options import JoinOptions
from agentd_fleet.join.publisher import Publisher
from agentd_fleet.store.etcd_client import EtcdClient, KeyValue
from agentd_fleet.store.etcd_transport import EtcdCredentials
from agentd_fleet.view.reports import KnownNode, NodeReading, NodeReport
from end_to_end.fleet.etcd_server import EtcdServers
from end_to_end.fleet.fleet_world import Program, World
from support.waiting import until

PASSWORD = "secret"  # noqa: S105
WITHIN_S = 40.0


@pytest.fixture
async def etcd(world: World) -> AsyncIterator[EtcdClient]:
    """The store of a world, which also has a node with a publisher."""
    await world.start_etcd()
    async with world.client() as client:
        yield client


class JoinedNode:
    """A node, its publisher, and its keys."""

    def __init__(self, world: World, node: str, publisher: Program, etcd: EtcdClient) -> None:
        self.world, self.node, self.publisher, self._etcd = world, node, publisher, etcd

    @classmethod
    async def started(cls, world: World, etcd: EtcdClient, lease: int = 2) -> "JoinedNode":
        (node,) = await world.start_nodes("none")
        joined = cls(world, node, world.join(node, lease=lease), etcd)
        await until(lambda: joined.pair("free"))
        return joined

    def key(self, part: str) -> str:
        return f"/agentd/main/{part}/{self.node}"

    async def pair(self, part: str) -> KeyValue | None:
        return await self._etcd.get(self.key(part))

    async def report(self) -> tuple[NodeReport, KeyValue]:
        pair = await self.pair("nodes")
        assert pair is not None, "the node is lost"
        return msgspec.json.decode(pair.value, type=NodeReport), pair

    async def until_url_has(self, text: str) -> None:
        """Wait until the publisher at an address has the node id."""
        key = self.key("nodes")

        async def is_there() -> bool:
            pair = await self._etcd.get(key)
            return pair is not None and text in msgspec.json.decode(pair.value)["url"]

        await until(is_there, within_s=WITHIN_S)


READING = NodeReading(node_id="n-in-process", version="1")


def node_key(part: str, reading: NodeReading = READING) -> str:
    return f"/agentd/main/{part}/{reading.node_id}"


@asynccontextmanager
async def publishing(
    etcd: EtcdClient, url: str, install_id: str = "i@1:1", lease: int = 30
) -> AsyncIterator[Publisher]:
    """Run a publisher in this process."""
    options = JoinOptions(name="main", etcd=(), socket="", url=url, lease=lease, state_dir="")
    publisher = Publisher(etcd, options, install_id, "boot")
    await publisher.set_reading(READING)
    running = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def delete(joined: JoinedNode, etcd: EtcdClient, part: str) -> None:
    await etcd.delete(joined.key(part))


async def overwrite(joined: JoinedNode, etcd: EtcdClient, part: str) -> None:
    await etcd.put(joined.key(part), b"{}")


@pytest.mark.parametrize("part", ["nodes", "free", "known"])
@pytest.mark.parametrize("damage", [delete, overwrite])
async def test_keys_are_written_again(
    world: World,
    etcd: EtcdClient,
    part: str,
    damage: Callable[[JoinedNode, EtcdClient, str], Awaitable[None]],
) -> None:
    joined = await JoinedNode.started(world, etcd)
    before = {name: await joined.pair(name) for name in ("nodes", "free", "known")}
    await damage(joined, etcd, part)

    async def is_restored() -> bool:
        for name, old in before.items():
            pair = await joined.pair(name)
            if pair is None or old is None or pair.lease != old.lease:
                return False
            if name != "known" and pair.value != old.value:
                return False
        record = await joined.pair("known")
        return record is not None and b"first_seen" in record.value

    await until(is_restored)
    assert ("node.keys_deleted" in joined.publisher.log) == (damage is delete)


@pytest.mark.parametrize("part", ["nodes", "free", "known"])
async def test_keys_are_written_again_while_the_daemon_is_down(etcd: EtcdClient, part: str) -> None:
    down = msgspec.structs.replace(READING, reason="unreachable: no answer", is_down=True)
    async with publishing(etcd, "unix:/there", lease=2) as publisher:
        await until(lambda: etcd.get(node_key("free")))
        await publisher.set_reading(down)
        await until(
            lambda: etcd.get(node_key("nodes")), lambda pair: pair and b"no answer" in pair.value
        )
        await etcd.delete(node_key(part))
        await until(lambda: etcd.get(node_key(part)))


async def test_emptied_store_has_the_node_again(world: World, etcd: EtcdClient) -> None:
    joined = await JoinedNode.started(world, etcd)
    assert world.etcd is not None
    await world.etcd.wipe()
    for part in ("nodes", "free", "known"):
        await until(lambda part=part: joined.pair(part))


@pytest.mark.parametrize("is_restored", [True, False], ids=["from a snapshot", "empty"])
async def test_restored_store_has_the_node_again(world: World, *, is_restored: bool) -> None:
    servers = await world.start_etcd(is_own=True)
    async with world.client() as etcd:
        joined = await JoinedNode.started(world, etcd)
        backup = await servers.back_up() if is_restored else None
        kernel = await world.nodes[joined.node].create(kernel_id="k1", slots={"cpu": 1})
        assert kernel.status == 201
        free = await until(lambda: joined.pair("free"), lambda pair: b'"cpu":"1"' in pair.value)
        await servers.restore(backup)

        async def is_current() -> bool:
            pair = await joined.pair("free")
            return pair is not None and pair.value == free.value

        await until(is_current, within_s=WITHIN_S)
        await until(lambda: joined.pair("known"))


async def test_second_publisher_by_hand_changes_nothing(world: World, etcd: EtcdClient) -> None:
    joined = await JoinedNode.started(world, etcd)
    before = await joined.report()
    second = world.join(joined.node)
    await second.until_logged("is taken by")
    await joined.publisher.until_logged("node.duplicate_id")
    await second.stop(signal.SIGINT)
    assert await joined.report() == before
    record = await joined.pair("known")
    assert record is not None

    async def is_alone() -> bool:
        known = await joined.pair("known")
        return known is not None and not msgspec.json.decode(known.value, type=KnownNode).rival

    await until(is_alone)


async def test_clone_gets_the_id_after_the_lease(world: World, etcd: EtcdClient) -> None:
    joined = await JoinedNode.started(world, etcd)
    before = (await joined.report())[0]
    own_address = before.url
    clone = await world.clone(joined.node)
    second = world.join(clone)
    await second.until_logged("is taken by")
    await joined.publisher.until_logged("node.duplicate_id")
    clone_address = f"unix:{world.nodes[clone].folder}/agentd.sock"
    for program in (joined.publisher, second):
        assert own_address in program.log
        assert clone_address in program.log
    assert (await joined.report())[0] == before
    os.kill(joined.publisher.pid, signal.SIGSTOP)
    await joined.until_url_has(clone_address)
    os.kill(joined.publisher.pid, signal.SIGCONT)
    await joined.publisher.until_logged(f"is taken by {clone_address}")
    await second.until_logged("node.duplicate_id")
    assert (await joined.report())[0].url == clone_address
    await second.stop()
    await joined.until_url_has(own_address)


@pytest.mark.parametrize("part", ["nodes", "free"])
async def test_clone_waits_for_the_lease_of_either_key(etcd: EtcdClient, part: str) -> None:
    async with publishing(etcd, "unix:/first", lease=9):
        await until(lambda: etcd.get(node_key("free")))
        await etcd.delete(node_key(part))
        with capture_logs() as lines:
            async with publishing(etcd, "unix:/clone", "i@1:2"):
                line = (await until(lambda: lines))[0]
                assert line["event"] == "node.publish_failed"
                assert "is taken by unix:/first; this one is at unix:/clone" in line["reason"]
                await until(lambda: etcd.get(node_key(part)))
    report = await etcd.get(node_key("nodes"))
    assert report is not None
    assert msgspec.json.decode(report.value)["url"] == "unix:/first"


async def test_waiting_clone_waits_also_once_both_keys_are_deleted(etcd: EtcdClient) -> None:
    async with publishing(etcd, "unix:/first", lease=9):
        await until(lambda: etcd.get(node_key("free")))
        with capture_logs() as lines:
            async with publishing(etcd, "unix:/clone", "i@1:2"):
                await until(lambda: lines)
                for _ in range(3):
                    await etcd.delete(node_key("nodes"))
                    await etcd.delete(node_key("free"))
                    report = await until(lambda: etcd.get(node_key("nodes")))
                    assert msgspec.json.decode(report.value)["url"] == "unix:/first"


async def test_waiting_clone_has_the_id_once_the_lease_has_ended(etcd: EtcdClient) -> None:
    async with AsyncExitStack() as stack:
        lines = stack.enter_context(capture_logs())
        async with publishing(etcd, "unix:/first", lease=4):
            await until(lambda: etcd.get(node_key("free")))
            await stack.enter_async_context(publishing(etcd, "unix:/clone", "i@1:2"))
            await until(lambda: lines)
        await etcd.delete(node_key("nodes"))
        await etcd.delete(node_key("free"))
        report = await until(lambda: etcd.get(node_key("nodes")), within_s=WITHIN_S)
        assert msgspec.json.decode(report.value)["url"] == "unix:/clone"


@pytest.mark.parametrize("call", ["get", "grant", "put_if", "keep_alive"])
async def test_renamed_node_has_its_new_id_alone(
    etcd: EtcdClient, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The name changes while the publisher waits for an answer of etcd."""
    renamed = msgspec.structs.replace(READING, node_id="n-renamed")
    original, original_get = getattr(etcd, call), etcd.get
    async with publishing(etcd, "unix:/there", lease=2) as publisher:

        async def answer(*args: object, **options: object) -> object:
            answer = await original(*args, **options)
            await publisher.set_reading(renamed)
            return answer

        monkeypatch.setattr(etcd, call, answer)
        for part in ("nodes", "free", "known"):
            await until(lambda part=part: original_get(node_key(part, renamed)))
        await until(lambda: original_get(node_key("nodes")), None)
        await until(lambda: original_get(node_key("free")), None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_restarted_publisher_keeps_the_node(
    world: World, etcd: EtcdClient, number: signal.Signals
) -> None:
    joined = await JoinedNode.started(world, etcd, lease=30)
    before = (await joined.report())[1]
    await joined.publisher.stop(number)
    joined.publisher.start()
    await joined.publisher.until_logged("node.published", 2)
    after = (await joined.report())[1]
    assert after.create_revision == before.create_revision
    assert after.lease != before.lease
    assert "is taken by" not in joined.publisher.log


async def test_publisher_of_an_older_version_is_not_replaced(
    world: World, etcd: EtcdClient
) -> None:
    """Its report does not tell it from a clone's, so its lease has to end."""
    joined = await JoinedNode.started(world, etcd)
    report, _ = await joined.report()
    await joined.publisher.stop()
    older = msgspec.structs.replace(report, install_id=report.install_id.partition("@")[0])
    lease = await etcd.grant(600)
    await etcd.put(joined.key("nodes"), msgspec.json.encode(older), lease=lease)
    joined.publisher.start()
    await joined.publisher.until_logged("is taken by")
    await etcd.delete(joined.key("nodes"))
    await joined.publisher.until_logged("node.published", 2)


async def test_copied_state_is_another_install(world: World, etcd: EtcdClient) -> None:
    joined = await JoinedNode.started(world, etcd)
    await joined.publisher.stop()
    folder = world.folder / f"install-{joined.node}"
    shutil.copytree(folder, world.folder / "copy")
    folder.rename(world.folder / "original")
    (world.folder / "copy").rename(folder)
    joined.publisher.start()
    await joined.publisher.until_logged("is taken by")
    await joined.publisher.until_logged("node.published", 2)


async def lose_role(servers: EtcdServers, node: str) -> None:
    await servers.revoke(node)


async def lose_password(servers: EtcdServers, node: str) -> None:
    await servers.change_password(node, "another")
    await servers.restart(0)  # simple tokens end with their member


async def regain_role(servers: EtcdServers, node: str) -> None:
    await servers.grant(node)


async def regain_password(servers: EtcdServers, node: str) -> None:
    await servers.change_password(node, PASSWORD)


UNWRITABLE: Mapping[str, tuple[Callable[[EtcdServers, str], Awaitable[None]], ...]] = {
    "role": (lose_role, regain_role),
    "password": (lose_password, regain_password),
}


@pytest.mark.parametrize("changed", [True, False], ids=["changed node", "idle node"])
@pytest.mark.parametrize("case", UNWRITABLE)
async def test_node_without_a_right_is_lost_and_returns(
    world: World, case: str, *, changed: bool
) -> None:
    lose, regain = UNWRITABLE[case]
    servers = await world.start_etcd(is_own=True)
    (node,) = await world.start_nodes("none")
    own_keys = tuple(f"/agentd/main/{part}/{node}" for part in ("nodes", "free", "known"))
    await servers.require_logins(PASSWORD, **{node: own_keys, "gate": ("/agentd/main/",)})
    credentials = EtcdCredentials(servers.endpoints, "gate", PASSWORD)
    async with EtcdClient(credentials) as etcd:
        publisher = world.join(node, kept_in=world.kept_as(node, PASSWORD))
        joined = JoinedNode(world, node, publisher, etcd)
        await until(lambda: joined.pair("free"))
        await lose(servers, node)
        if changed:
            created = await world.nodes[node].create(kernel_id="k1", slots={"cpu": 1})
            assert created.status == 201
        await until(lambda: joined.pair("nodes"), lambda pair: pair is None, within_s=WITHIN_S)
        assert "node.publish_failed" in publisher.log
        await regain(servers, node)
        await until(lambda: joined.pair("nodes"), within_s=WITHIN_S)
        assert publisher.log.count("node.publish_failed") <= 3


async def test_node_that_a_full_store_cannot_update_is_lost(world: World) -> None:
    servers = await world.start_etcd(quota_bytes=4 * 2**20)
    async with world.client() as etcd:
        joined = await JoinedNode.started(world, etcd)
        alarm = {"member_id": "1", "alarm": "NOSPACE"}
        await servers.ask("/v3/maintenance/alarm", {"action": "ACTIVATE", **alarm})
        created = await world.nodes[joined.node].create(kernel_id="k1", slots={"cpu": 1})
        assert created.status == 201
        await until(lambda: joined.pair("nodes"), lambda pair: pair is None, within_s=WITHIN_S)
        await joined.publisher.until_logged("space")
        await servers.ask("/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})
        await until(lambda: joined.pair("nodes"), within_s=WITHIN_S)
        assert joined.publisher.is_running


async def test_suspended_publisher_returns_at_once(world: World, etcd: EtcdClient) -> None:
    joined = await JoinedNode.started(world, etcd)
    os.kill(joined.publisher.pid, signal.SIGSTOP)
    await until(lambda: joined.pair("nodes"), lambda pair: pair is None)
    os.kill(joined.publisher.pid, signal.SIGCONT)
    await until(lambda: joined.pair("free"))


async def test_node_returns_after_a_network_that_dropped_packets(world: World) -> None:
    """The outage is longer than the lease, and no connection was ever closed."""
    servers = await world.start_etcd()
    proxy = await world.proxy(servers.endpoints[0])
    (node,) = await world.start_nodes("none")
    async with world.client() as etcd:
        publisher = world.join(node, kept_in=f'[fleet]\netcd = ["{proxy.endpoint}"]\n')
        joined = JoinedNode(world, node, publisher, etcd)
        await until(lambda: joined.pair("free"))
        proxy.drop()
        await until(lambda: joined.pair("nodes"), lambda pair: pair is None, within_s=WITHIN_S)
        created = await world.nodes[node].create(kernel_id="k1", slots={"cpu": 1})
        assert created.status == 201
        await publisher.until_logged("node.publish_failed")
        proxy.mend()
        await until(
            lambda: joined.pair("free"),
            lambda pair: pair is not None and b'"allocated":{"agent-1":{"cpu":"1"' in pair.value,
            within_s=WITHIN_S,
        )
        assert publisher.log.count("node.publish_failed") == 1


async def test_node_outlives_a_leader_that_hung_for_a_lease(world: World) -> None:
    """A leader that is back may end leases that were renewed at its successor."""
    servers = await world.start_etcd(3)
    async with world.client() as etcd:
        joined = await JoinedNode.started(world, etcd)
        status = await servers.ask("/v3/maintenance/status", {})
        members = await servers.ask("/v3/cluster/member/list", {})
        name = next(m["name"] for m in members["members"] if m["ID"] == status["leader"])
        leader = int(name.removeprefix("m"))
        servers.pause(leader)
        others = EtcdCredentials(
            tuple(e for e in servers.endpoints if e != servers.endpoints[leader])
        )
        async with EtcdClient(others) as client:
            seen = JoinedNode(world, joined.node, joined.publisher, client)
            for kernel in ("k1", "k2"):
                before = await until(lambda: seen.pair("free"), within_s=WITHIN_S)
                created = await world.nodes[joined.node].create(kernel_id=kernel, slots={"cpu": 1})
                assert created.status == 201
                await until(
                    lambda: seen.pair("free"),
                    lambda pair, before=before: pair is not None and pair.value != before.value,
                    within_s=WITHIN_S,
                )
            servers.resume(leader)
            free = await until(lambda: seen.pair("free"), within_s=WITHIN_S)
            await world.nodes[joined.node].create(kernel_id="k3", slots={"cpu": 1})
            await until(
                lambda: seen.pair("free"),
                lambda pair: pair is not None and pair.value != free.value,
                within_s=WITHIN_S,
            )
            assert await seen.pair("nodes") is not None
            assert joined.publisher.is_running
