"""Six nodes with different plugins, real ones over libraries that this test compiles."""

import asyncio
import os
import signal
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import pytest

from end_to_end.fleet.fleet_world import SLEEP, World
from native.libraries import built, nvml_library
from support.daemon import AGENTS, Daemon, gpus
from support.needs import require

GPU = """gpu uuid=GPU-{name}-{n} pci=0000000{n}:3B:00.0 mem=85899345920 used=0 util=0 temp=40 \
power=70000 lost=0 mig={mig} recovery=0 events=8 name=NVIDIA H100 80GB HBM3
"""
MIG = "mig gpu=0 idx=0 uuid=MIG-{name} gi=1 ci=0 gslices=1 cslices=1 mem_mb=9984 name=x\n"
AMD = """handles big
gpu pci={pci} mem=206141652992 numa=-1 lost=0 name=AMD Instinct MI300X OAM
"""


class Mixed:
    """The daemons, each with what its plugin needs in place of hardware."""

    def __init__(self, world: World, factory: pytest.TempPathFactory) -> None:
        self.world = world
        self.nvml = nvml_library(factory)
        self.amd = built("amdsmi.c", factory.getbasetemp() / "rocm" / "lib" / "libamd_smi.so")

    async def start(self, kind: str, text: str, **environ: str) -> str:
        folder = self.world.folder / kind
        daemon = Daemon(folder, "process")
        daemon.node = f"{kind}-{self.world.folder.name.removeprefix('agentd-')}"
        self.world.nodes[daemon.node] = daemon
        self.world.kinds[daemon.node] = ""
        daemon.configure(AGENTS + text)
        await daemon.start(**environ)
        return daemon.node

    async def start_all(self) -> dict[str, str]:
        for kind in ("cuda", "mig", "rocm", "tpu", "shares", "none"):
            (self.world.folder / kind).mkdir()
        name, folder = self.world.folder.name[-8:], self.world.folder
        cuda = [GPU.format(name=name, n=n, mig=0) for n in (1, 2)]
        mig = GPU.format(name=f"m{name}", n=3, mig="1 maxmig=7") + MIG.format(name=name)
        (folder / "cuda" / "gpus").write_text("driver 570.124.06\ninit 0\n" + "".join(cuda))
        (folder / "mig" / "gpus").write_text("driver 570.124.06\ninit 0\n" + mig)
        pci = f"0002:05:{os.getpid() % 32:02x}.7"
        (folder / "rocm" / "gpus").write_text(AMD.format(pci=pci))
        (folder / "rocm/sys/bus/pci/devices" / pci / "drm/renderD129").mkdir(parents=True)
        for number in range(2):
            os.mknod(folder / f"tpu/accel{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (cat := folder / "rocm" / "cat").write_text("#!/bin/sh\necho live\n")
        cat.chmod(0o755)
        nvml = {"LD_LIBRARY_PATH": str(self.nvml)}
        amd = {
            "ROCM_PATH": str(self.amd.parent.parent),
            "PATH": f"{cat.parent}:{os.environ['PATH']}",
        }
        amd_table = f'[plugins.rocm]\nsysfs = "{folder}/rocm/sys"\n'
        tpu = f'[plugins.tpu]\nplugin = "generic"\ndevices = ["{folder}/tpu/accel*"]\n'
        starts = {
            "cuda": self.start(
                "cuda", "[plugins.cuda]\n", FAKE_NVML_FILE=f"{folder}/cuda/gpus", **nvml
            ),
            "mig": self.start(
                "mig", "[plugins.cuda]\n", FAKE_NVML_FILE=f"{folder}/mig/gpus", **nvml
            ),
            "rocm": self.start("rocm", amd_table, FAKE_AMDSMI_FILE=f"{folder}/rocm/gpus", **amd),
            "tpu": self.start("tpu", tpu),
            "shares": self.start("shares", gpus(2, mode="shares", table="npu")),
            "none": self.start("none", ""),
        }
        return dict(zip(starts, await asyncio.gather(*starts.values()), strict=True))


@pytest.fixture
async def mixed(world: World, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mixed]:
    made = Mixed(world, tmp_path_factory)
    yield made
    daemons, world.nodes = list(world.nodes.values()), {}
    await asyncio.gather(*(daemon.close() for daemon in daemons))


async def test_six_nodes_with_different_plugins_are_one_fleet(mixed: Mixed) -> None:
    world = mixed.world
    await world.start_etcd()
    nodes = await mixed.start_all()
    for node in nodes.values():
        world.join(node)
    gateway = world.gateway()
    await gateway.until(dict.fromkeys(nodes.values(), "ready"))
    kinds = {
        "cuda.device": "cuda",
        "cuda.device:1g.10gb-mig": "mig",
        "rocm.device": "rocm",
        "tpu.device": "tpu",
        "npu.shares": "shares",
    }
    async with asyncio.timeout(20):
        while {t["name"] for t in await gateway.get("/v1/slot-types")} < {"cpu", "mem", *kinds}:
            await asyncio.sleep(0.05)
    for slot, kind in kinds.items():
        amount = "0.25" if slot == "npu.shares" else "1"
        made = await gateway.create(kernel_id=kind, slots={slot: amount})
        assert (made.status, made.json.get("node_id")) == (201, nodes[kind]), made.content
    bare = await gateway.create(placement={"nodes": [nodes["none"]]}, slots={"cpu": 1})
    assert bare.json["node_id"] == nodes["none"]
    model = {"models": ["NVIDIA H100 80GB HBM3"]}
    again = await gateway.create(kernel_id="by-model", slots={"cpu": 1}, placement=model)
    assert again.json["node_id"] in (nodes["cuda"], nodes["mig"])
    refused = await gateway.create(slots={"rocm.device": 2})
    assert {row["reason"] for row in refused.json["classes"]} == {
        "lack rocm.device", "too small for rocm.device",
    }  # fmt: skip
    stats = (await gateway.get("/v1/stats"))["slots"]
    assert {slot: stats[slot]["capacity"] for slot in kinds} == {
        "cuda.device": "2", "cuda.device:1g.10gb-mig": "1", "rocm.device": "1", "tpu.device": "2",
        "npu.shares": "2",
    }  # fmt: skip
    census = await world.census()
    assert census["cuda"] == [nodes["cuda"]]
    assert len(census) == 7


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
