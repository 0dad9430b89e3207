"""Record the files that this version of agentd writes, for later versions to read.

    python tests/recorded/record.py NAME CGROUPS

It starts the daemon on the process and docker runtimes (with an engine of its own), does the same
things on both, and writes NAME.json: the state folder, the labels of containers, and the views.
Then it starts a fleet on etcd, and writes the keys to NAME-etcd.json. `names.py` records names.

It takes root, dockerd, etcd, and a cgroup hierarchy of version 2 (`unshare -m` and a mount of one
are enough).
"""

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parents[1]))
from end_to_end.fleet.etcd_server import EtcdServers
from end_to_end.fleet.fleet_world import Pool, World
from support.daemon import AGENTS, Daemon
from support.engine import Engine

HERE = Path(__file__).parent
BODIES = {
    "lives": {"slots": {"cuda.device": 1, "cpu": 1, "mem": "64m"}, "env": {"A": "b"}},
    "ended": {"slots": {"cuda.device": 1}, "command": ["sh", "-c", "exit 3"]},
    "from-claim": {
        "slots": {"cuda.device": 1},
        "claim": "c-used",
        "keep_claim": True,
        "labels": {"job": "7"},
    },
}
"""Kernels of agent-1, created in this order."""
LONG = {"slots": {"cuda.device": 1}, "labels": {"owner": "a"}}
GPUS = """
[plugins.cuda]
plugin = "sim"
links = [["cuda0", "cuda1"]]
devices = [{devices}]
"""
ORDER = """
[resource]
allocation-mode = "auto-split"
auto-split-order = "plugin"
engine-devices = { slurm = { cuda = ["cuda6"] } }
"""


def config(*stable_ids: str) -> str:
    """Return the configuration for GPUs with these UUIDs."""
    entries = (f'{{id = "cuda{n}", stable-id = "{uuid}"}}' for n, uuid in enumerate(stable_ids))
    return AGENTS + ORDER + GPUS.format(devices=", ".join(entries))


def gpu_uuids(*names: str) -> list[str]:
    return [f"GPU-{name}" for name in names]


BEFORE, AFTER = gpu_uuids(*"abcdefghijklmnop"), gpu_uuids(*"abcdefghijklmnoq")
"""The UUIDs of the GPUs; the last one is replaced."""


async def record_node(
    folder: Path, runtime: str, engine: Engine | None, cgroup: Path | None = None
) -> dict[str, Any]:
    """Do everything that leaves a file on one runtime, and return the files and views.

    Without a cgroup to make, a claim that a cgroup holds is left out.
    """
    folder.chmod(0o755)
    daemon = Daemon(folder, runtime, engine)
    daemon.node = f"recorded-{runtime}"
    member = subprocess.Popen(["sleep", "1000"])
    if cgroup is not None:
        cgroup.mkdir()
        (cgroup / "cgroup.procs").write_text(str(member.pid))
    try:
        await daemon.start(config(*BEFORE))
        await daemon.stop()
        await daemon.start(config(*AFTER))
        views = await fill(daemon, member.pid, cgroup)
        await daemon.stop(signal.SIGKILL)
        containers = containers_of(engine) if engine is not None else {}
        files = read_files(folder / "state")
        return views | {"node": daemon.node, "files": files, "containers": containers}
    finally:
        if daemon.process is None:
            await daemon.start(config(*AFTER))
        await daemon.close()
        member.kill()
        member.wait()
        if cgroup is not None:
            cgroup.rmdir()


async def fill(daemon: Daemon, pid: int, cgroup: Path | None) -> dict[str, Any]:
    """Create a drain, claims of each kind of holder, a ready engine and kernels."""
    await call(daemon, "POST", "/v1/devices/cuda/cuda5/drain", {"reason": "fan"}, 200)
    await call(daemon, "PUT", "/v1/engines/slurm", {"ready": True}, 200)
    start_time = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    holders: dict[str, Any] = {
        "c-pid": {"pid": pid, "start_time": start_time},
        "c-ttl": {"ttl": 3600},
        "c-name": {"name": "job-7", "survives_reboot": True},
        "c-used": {"name": "job-8"},
    }
    if cgroup is not None:
        holders["c-cgroup"] = {"cgroup": f"/{cgroup.name}"}
    for claim_id, holder in holders.items():
        body = {"claim_id": claim_id, "holder": holder, **LONG}
        await call(daemon, "POST", "/v1/agents/agent-1/claims", body, 201)
    for name, body in BODIES.items():
        answer = await daemon.create(kernel_id=name, **body)
        assert answer.status == 201, answer.content
        if name == "ended":
            await daemon.until(name, "terminated")
    paths = ("kernels", "claims", "devices", "agents", "engines", "slot-types")
    views = {path: await daemon.get(f"/v1/{path}") for path in paths}
    return views | {"metrics": families((await daemon.call("GET", "/metrics")).content)}


def families(exposition: bytes) -> dict[str, list[str]]:
    """Return type, help text and label names of each metric."""
    return {
        family.name: [
            family.type,
            family.documentation,
            *sorted({label for sample in family.samples for label in sample.labels}),
        ]
        for family in text_string_to_metric_families(exposition.decode())
    }


async def call(daemon: Daemon, method: str, path: str, body: Any, status: int) -> Any:
    answer = await daemon.call(method, path, body)
    assert answer.status == status, (path, answer.content)
    return answer.json


def read_files(state: Path) -> dict[str, str]:
    """Return the texts of a state folder, without locks and output."""
    return {
        str(path.relative_to(state)): path.read_text()
        for path in sorted(state.rglob("*"))
        if path.is_file() and path.name not in ("lock", "output.log.0")
    }


def containers_of(engine: Engine) -> dict[str, Any]:
    """Return name and labels of each kernel's container."""
    return {
        container["Labels"]["io.agentd.kernel"]: {
            "name": container["Names"][0].removeprefix("/"),
            "labels": container["Labels"],
        }
        for container in engine.containers()
    }


async def record_etcd(folder: Path) -> dict[str, Any]:
    """Return the keys of a fleet of one node with one kernel, with their values."""
    pool = Pool(folder)
    servers = EtcdServers(folder / "etcd")
    await servers.start()
    world = World(folder / "world", pool)
    world.folder.mkdir()
    world.etcd = servers
    try:
        [node] = await world.start_nodes("cuda")
        world.join(node)
        gateway = world.gateway()
        await gateway.until({node: "ready"})
        async with asyncio.timeout(20):  # a gateway writes a new slot type after it saw the node
            while "cuda.device" not in {s["name"] for s in await gateway.get("/v1/slot-types")}:
                await asyncio.sleep(0.02)
        await gateway.until_free(node, "cuda.device", "4")
        answer = await gateway.create(kernel_id="k1", slots={"cuda.device": 1})
        assert answer.status == 201, answer.content
        await gateway.until_free(node, "cuda.device", "3")
        metrics = families((await gateway.call("GET", "/metrics")).content)
        return {"node": node, "keys": await read_keys(servers), "metrics": metrics}
    finally:
        await world.close()
        await pool.close()
        await servers.stop()


async def read_keys(servers: EtcdServers) -> dict[str, Any]:
    """Return all keys with their values."""
    every = {"key": "AA==", "range_end": "AA=="}
    pairs = (await servers.ask("/v3/kv/range", every))["kvs"]
    return {decode(pair["key"]): json.loads(decode(pair["value"])) for pair in pairs}


def decode(text: str) -> str:
    return base64.b64decode(text).decode()


async def main(name: str, cgroups: Path) -> None:
    home = Path(tempfile.mkdtemp(prefix="agentd-engine-", dir="/tmp"))
    engine = Engine(home)
    engine.start()
    engine.import_image()
    found: dict[str, Any] = {"bodies": BODIES, "config": config(*AFTER)}
    try:
        for runtime in ("process", "docker"):
            folder = Path(tempfile.mkdtemp(prefix="agentd-", dir="/tmp"))
            group = cgroups / f"agentd-recorded-{os.getpid()}-{runtime}"
            found[runtime] = await record_node(folder, runtime, engine, group)
            shutil.rmtree(folder)
        folder = Path(tempfile.mkdtemp(prefix="agentd-", dir="/tmp"))
        keys = await record_etcd(folder)
        shutil.rmtree(folder)
    finally:
        engine.end()
        shutil.rmtree(home, ignore_errors=True)
    (HERE / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (HERE / f"{name}-etcd.json").write_text(json.dumps(keys, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
