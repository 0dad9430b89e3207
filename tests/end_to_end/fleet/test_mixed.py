"""Nodes with different plugins, behind a cable that is cut, and with clocks that are set."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Self

from end_to_end.fleet.fleet_world import SLEEP, World
from native.libraries import built
from support.needs import require
from support.waiting import until


async def test_nodes_with_different_plugins_are_one_fleet(world: World) -> None:
    await world.start_etcd()
    slots = {
        "cuda": "cuda.device", "rocm": "rocm.device", "tpu": "tpu.device", "shares": "cuda.shares"
    }  # fmt: skip
    nodes = dict(zip((*slots, "none"), await world.start_nodes(*slots, "none"), strict=True))
    for node in nodes.values():
        world.join(node)
    gateway = world.gateway()
    await gateway.until(dict.fromkeys(nodes.values(), "ready"))
    await until(
        lambda: gateway.get("/v1/slot-types"),
        lambda value: {t["name"] for t in value} >= {*slots.values()},
    )
    for kind, slot in slots.items():
        made = await gateway.create(kernel_id=kind, slots={slot: 1})
        assert (made.status, made.json.get("node_id")) == (201, nodes[kind]), made.content
    bare = await gateway.create(placement={"nodes": [nodes["none"]]}, slots={"cpu": 1})
    assert bare.json["node_id"] == nodes["none"]
    stats = (await gateway.get("/v1/stats"))["slots"]
    assert {slot: stats[slot]["capacity"] for slot in slots.values()} == {
        "cuda.device": "4", "rocm.device": "2", "tpu.device": "4", "cuda.shares": "2"
    }  # fmt: skip


def ip(*words: str) -> list[str]:
    return ["ip", *words]


async def ran(*words: str) -> None:
    process = await asyncio.create_subprocess_exec(*words)
    assert await process.wait() == 0, words


class Cable:
    """A network namespace on a cable, and what listens at this end of it for the store."""

    def __init__(self, store_port: int) -> None:
        self.name = f"fleet{os.getpid() % 10000}"
        self.here, self.store_port = f"169.254.{os.getpid() % 250 + 1}.1", store_port
        self.server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        name, near, far = self.name, f"{self.name}a", f"{self.name}b"
        await ran(*ip("netns", "add", name))
        await ran(*ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name))
        await ran(*ip("addr", "add", f"{self.here}/24", "dev", near))
        await ran(*ip("link", "set", near, "up"))
        there = self.here.removesuffix("1") + "2"
        await ran(*ip("-n", name, "addr", "add", f"{there}/24", "dev", far))
        await ran(*ip("-n", name, "link", "set", far, "up"))
        self.server = await asyncio.start_server(self._serve, self.here, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.server is not None:
            self.server.close()
        await ran(*ip("netns", "del", self.name))

    @property
    def port(self) -> int:
        assert self.server is not None
        return int(self.server.sockets[0].getsockname()[1])

    async def set(self, state: str) -> None:
        await ran(*ip("link", "set", f"{self.name}a", state))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", self.store_port)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65536):
                    target.write(data)
            except OSError:
                pass
            finally:
                target.close()

        await asyncio.gather(pump(reader, forth), pump(back, writer))


async def test_a_node_that_is_cut_off_is_lost_and_comes_back_as_it_was(world: World) -> None:
    require("root")
    servers = await world.start_etcd()
    near, far = await world.start_nodes("none", "cuda")
    world.join(near)
    gateway = world.gateway()
    async with Cable(servers.ports[0]) as cable:
        there = f'[fleet]\netcd = ["http://{cable.here}:{cable.port}"]\n'
        publisher = world.join(far, kept_in=there, prefix=tuple(ip("netns", "exec", cable.name)))
        await gateway.until({near: "ready", far: "ready"})
        await gateway.create(kernel_id="k1", slots={"cuda.device": 1})
        await cable.set("down")
        await gateway.until({near: "ready", far: "lost"}, within_s=15)
        assert (await gateway.get("/v1/kernels/k1"))["state"] == "unknown"
        assert (await gateway.create(slots={"cuda.device": 1})).status == 409
        assert (await world.nodes[far].get("/v1/kernels/k1"))["state"] == "running"
        await world.nodes[far].running(kernel_id="meanwhile", **SLEEP)
        await cable.set("up")
        await gateway.until({far: "ready"}, within_s=30)
        assert (await gateway.get("/v1/kernels/k1"))["state"] == "running"
        assert await world.census() == {"k1": [far], "meanwhile": [far]}
        await publisher.stop(signal.SIGKILL)


async def test_a_clock_that_is_set_changes_nothing(world: World, tmp_path: Path) -> None:
    """One clock goes a day back, the other ahead; each has a node and a gateway."""
    preload = str(built("clock.c", tmp_path / "clock.so"))
    await world.start_etcd()
    nodes = await world.start_nodes("cuda", "none")
    offsets, gateways = {}, []
    for node, seconds in zip(nodes, ("-86400", "86400"), strict=True):
        offset = tmp_path / f"offset{seconds}"
        offset.write_text("0")
        offsets[offset] = seconds
        clock = {"LD_PRELOAD": preload, "CLOCK_OFFSET": str(offset)}
        world.join(node, environ=clock)
        gateways.append(world.gateway(environ=clock))
    are_ready = dict.fromkeys(nodes, "ready")
    for gateway in gateways:
        await gateway.until(are_ready)
    before = {node: (await gateways[0].get(f"/v1/nodes/{node}"))["generation"] for node in nodes}
    for offset, seconds in offsets.items():
        offset.write_text(seconds)
    loop = asyncio.get_running_loop()
    end = loop.time() + 3
    while loop.time() < end:
        for gateway in gateways:
            assert await gateway.states() == are_ready
        await asyncio.sleep(0.2)
    for number, node in enumerate(nodes):
        for gateway in gateways:
            only = {"placement": {"nodes": [node]}}
            made = await gateway.create(kernel_id=f"k{number}-{gateways.index(gateway)}", **only)
            assert (made.status, made.json["node_id"]) == (201, node)
        assert (await gateways[0].get(f"/v1/nodes/{node}"))["generation"] == before[node]
