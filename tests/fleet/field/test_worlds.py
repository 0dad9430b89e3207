"""The worlds of these tests are as they say: stores, networks and containers."""

import asyncio
import sys

import pytest

from agentd_fleet.store.etcd_client import EtcdClient
from agentd_fleet.store.etcd_transport import EtcdCredentials
from end_to_end.fleet.etcd_server import EtcdServers
from end_to_end.fleet.fleet_world import World
from end_to_end.fleet.network import SilentNameServer
from support.waiting import until

KEY = "/agentd/main/nodes/a"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("is_empty", [False, True], ids=["snapshot", "empty"])
async def test_a_restored_store_is_what_it_was(world: World, count: int, *, is_empty: bool) -> None:
    servers = await world.start_etcd(count, is_own=True)
    async with world.client() as etcd:
        await etcd.put(KEY, b"1")
        backup = None if is_empty else await servers.back_up()
        await etcd.put(KEY, b"2")
        await servers.restore(backup)
        pair = await etcd.get(KEY)
        assert (None if pair is None else pair.value) == (None if is_empty else b"1")


async def test_a_store_with_users_is_restored_with_them(world: World) -> None:
    servers = await world.start_etcd(is_signed=True)
    await servers.require_logins("secret", a=(KEY,))
    async with EtcdClient(EtcdCredentials(servers.endpoints, "a", "secret")) as etcd:
        await etcd.put(KEY, b"1")
        backup = await servers.back_up()
        await servers.revoke("a")
        await servers.grant("a")
        await servers.restore(backup)
        pair = await etcd.get(KEY)
    assert pair is not None
    assert pair.value == b"1"


async def test_a_firewall_drops_what_is_new_and_what_was_open(
    servers: EtcdServers, world: World
) -> None:
    proxy = await world.proxy(servers.endpoints[0])
    port = int(proxy.endpoint.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asked = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    writer.write(asked)
    assert b"200" in await reader.readline()
    proxy.drop()
    accepted = proxy.accepted
    writer.write(asked)
    opening = asyncio.create_task(asyncio.open_connection("127.0.0.1", port))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readuntil(b"HTTP/1.1"), 0.5)
    assert not opening.done()
    assert proxy.accepted == accepted
    proxy.mend()
    await reader.readuntil(b"HTTP/1.1")
    for open_writer in (writer, (await opening)[1]):
        open_writer.close()


async def test_a_silent_name_server_is_asked_and_answers_nothing(
    name_server: SilentNameServer,
) -> None:
    script = "import socket; socket.getaddrinfo('node-1.invalid-zone', 1)"
    process = await asyncio.create_subprocess_exec(
        *name_server.prefix, sys.executable, "-c", script
    )
    await until(lambda: name_server.asked)
    assert process.returncode is None
    process.kill()
    await process.wait()


async def test_a_clone_is_another_node_of_the_same_id(world: World) -> None:
    await world.start_etcd()
    (node,) = await world.start_nodes("none")
    first = world.join(node)
    await first.until_logged("node.published")
    clone = await world.clone(node)
    for name in (node, clone):
        assert (await world.nodes[name].get("/v1/node"))["id"] == node
        assert (await world.nodes[name].create(kernel_id="k1", slots={"cpu": 1})).status == 201
    assert await world.census() == {"k1": [node, clone]}
    installs = [(world.folder / f"install-{name}/install-id").read_text() for name in (node, clone)]
    assert installs[0] == installs[1]
