"""Damaged records, a state folder that fails, and a machine that runs out or is set wrong.

The daemon starts, says what is wrong in one line each, touches nothing that it is not sure
of, and serves everything else.
"""

import asyncio
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agentd.core.record import SCHEMA
from agentd.runtimes.process.shim import PR_SET_CHILD_SUBREAPER
from daemon import AGENTS, Daemon, gpus
from engine import Engine
from native.libraries import built
from world import World, session, started

ROOT_ONLY = pytest.mark.skipif(
    os.geteuid() != 0 and not os.environ.get("AGENTD_REQUIRE_ALL"), reason="mounts need root"
)
NODE = '[plugins]\nallow = ["sim"]\n' + AGENTS + gpus(32)
ONE = {"cuda.device": 1, "cpu": 0, "mem": "16m"}


@pytest.fixture
async def world(world: World) -> World:
    """A node that has started, on either runtime."""
    await world.start(text=NODE)
    return world


@pytest.fixture
async def plain_world(plain_world: World) -> World:
    """A node that has started, on the process runtime."""
    await plain_world.start(text=NODE)
    return plain_world


@contextmanager
def mounted(*arguments: str, at: Path) -> Iterator[None]:
    subprocess.run(["mount", *arguments, str(at)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def flipped(path: Path, bit: int = 100) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


def changed(path: Path, **members: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


INIT = {"pid": 1, "start_time": started(1)}
KEPT_BY_INIT = {"shim_pid": 1, "shim_start_time": started(1)}
DAMAGE = {
    "record-truncated": lambda f: (f / "record.json").write_text("{"),
    "record-empty": lambda f: (f / "record.json").write_text(""),
    "record-gone": lambda f: (f / "record.json").unlink(),
    "record-flipped": lambda f: flipped(f / "record.json"),
    "record-newer": lambda f: changed(f / "record.json", schema=SCHEMA + 1),
    "record-unknown-members": lambda f: changed(f / "record.json", colour="red"),
    "identity-truncated": lambda f: (f / "identity.json").write_text("{"),
    "identity-gone": lambda f: (f / "identity.json").unlink(),
    "identity-flipped": lambda f: flipped(f / "identity.json", 17),
    "identity-unknown-members": lambda f: changed(f / "identity.json", colour="red"),
    "identity-endless": lambda f: changed(f / "identity.json", pid=float("inf")),
    "identity-deep": lambda f: (f / "identity.json").write_text("[" * 100_000),
    "identity-other-boot": lambda f: changed(f / "identity.json", boot_id="another"),
    "identity-other-start": lambda f: changed(f / "identity.json", start_time=1),
    "identity-of-init": lambda f: changed(f / "identity.json", **INIT, **KEPT_BY_INIT),
    "identity-of-init-kept": lambda f: changed(f / "identity.json", **INIT),
    "record-of-another": lambda f: changed(f / "record.json", kernel_id="another"),
    "record-of-another-node": lambda f: changed(f / "record.json", node_id="another"),
    "record-deep": lambda f: (f / "record.json").write_text("[" * 100_000),
    "exit-is-a-folder": lambda f: (f / "exit.json").mkdir(),
    "exit-is-a-loop": lambda f: (f / "exit.json").symlink_to("exit.json"),
    "exit-truncated": lambda f: (f / "exit.json").write_text("{"),
    "folder-empty": lambda f: [path.unlink() for path in f.iterdir()],
    "folder-gone": shutil.rmtree,
}
AS_BEFORE = (
    "record-unknown-members",
    "exit-is-a-folder",
    "exit-is-a-loop",
    "exit-truncated",
)


async def test_a_damaged_kernel_harms_only_itself_and_is_charged(plain_world: World) -> None:
    world, daemon = plain_world, plain_world.daemon
    before = {name: await daemon.running(kernel_id=name, slots=ONE) for name in DAMAGE}
    census, lives = await world.check(), world.lives()
    await world.kill()
    for name, damage in DAMAGE.items():
        damage(daemon.folder / "state" / "kernels" / name)
    await world.start()
    assert world.lives() == lives
    after = {k["kernel_id"]: k for k in await daemon.get("/v1/kernels")}
    for name, kernel in before.items():
        now = after[name]
        expected = "unreadable" if name == "record-newer" else "running"
        assert (now["state"], now["pid"]) == (expected, kernel["pid"]), name
        assert now["allocation"] == kernel["allocation"], name
        assert (now["reason"] == "") == (name in AS_BEFORE or "identity" in name), now
    looked = await world.look()
    assert looked.holdings == census.holdings
    assert (await daemon.create(slots={"cuda.device": 32 - len(DAMAGE) + 1})).status == 409
    assert (await daemon.create(slots={"cuda.device": 32 - len(DAMAGE)})).status == 201
    for name in DAMAGE:
        assert (await world.remove(name)).status == 204, (name, daemon.log[-3000:])
    assert not [name for name in world.lives() if name in DAMAGE]
    await world.check()


STRANGERS = {
    "lost+found": lambda folder: (folder / "precious").write_text("mine"),
    "backup": lambda folder: (folder / "record.json.bak").write_text("mine"),
    "k1.bak": lambda folder: shutil.copytree(folder.parent / "k1", folder, dirs_exist_ok=True),
}


async def test_what_is_no_kernel_s_folder_is_left_alone(plain_world: World) -> None:
    world, daemon = plain_world, plain_world.daemon
    kernel = await daemon.running(kernel_id="k1", slots=ONE)
    await world.kill()
    folder = daemon.folder / "state" / "kernels"
    for name, put in STRANGERS.items():
        (folder / name).mkdir()
        put(folder / name)
    (folder / "link").symlink_to(folder / "k1")
    before = sorted(str(path) for path in folder.rglob("*"))
    await world.start()
    assert await daemon.get("/v1/kernels") == [kernel]
    assert sorted(str(path) for path in folder.rglob("*")) == before
    assert await daemon.free("cuda.device") == "31"


FORGERY = """
exec env AGENTD_NODE={node} AGENTD_KERNEL=k1 AGENTD_SHIM=1 AGENTD_AGENT=agent-2 \\
  AGENTD_DEVICES=cuda/cuda9/cuda.device=1@SIM-cuda-cuda9 sh -c 'sleep 1000 & wait' shim.py
"""


async def test_what_a_kernel_says_of_itself_proves_nothing(world: World) -> None:
    """A kernel calls itself another one, and a shim, and starts a shim.py."""
    daemon = world.daemon
    await daemon.running("agent-2", kernel_id="k1", slots=ONE)
    script = FORGERY.format(node=world.node)
    await daemon.running(kernel_id="forger", command=["sh", "-c", script], slots=ONE)
    before = {k["kernel_id"]: k for k in await daemon.get("/v1/kernels")}
    await world.kill()
    (daemon.folder / "state" / "intents" / "k9.json").write_text("{")
    await world.start()
    after = {k["kernel_id"]: k for k in await daemon.get("/v1/kernels")}
    assert after["k1"] == before["k1"]
    assert {m: after["forger"][m] for m in ("allocation", "agent_id", "state")} == {
        m: before["forger"][m] for m in ("allocation", "agent_id", "state")
    }
    assert after.keys() == {"k1", "forger", "k9"}
    assert (await world.remove("forger")).status == 204
    assert (await daemon.get("/v1/kernels/k1"))["state"] == "running"


FILES = {
    "devices.json": ("truncated", '{"devices": ['),
    "node.json": ("of another shape", '["node"]'),
    "intents/gone.json": ("an intent of nothing", "{"),
}


async def test_damaged_files_of_the_node_are_told_of_and_harm_nothing(world: World) -> None:
    daemon = world.daemon
    await daemon.running(kernel_id="k1", slots=ONE)
    await daemon.call("POST", "/v1/devices/cuda/cuda7/drain")
    before, lives = await world.check(), world.lives()
    await world.kill()
    state = daemon.folder / "state"
    for name, (_, text) in FILES.items():
        (state / name).write_text(text)
    await world.start()
    warnings = (await daemon.get("/v1/node"))["warnings"]
    for name in ("devices.json", "node.json"):
        assert len([w for w in warnings if name in w and "set aside" in w]) == 1, warnings
        assert (state / f"{name}.unreadable").read_text() == FILES[name][1]
    gone = await daemon.get("/v1/kernels/gone")
    assert "its record cannot be read" in gone["reason"]
    assert world.lives() == lives
    refused = await daemon.create(slots=ONE)
    assert refused.status == 409, refused.content  # whatever 'gone' had is kept back
    await world.check(before)
    async with asyncio.timeout(20):
        while "gone" in [k["kernel_id"] for k in await daemon.get("/v1/kernels")]:
            await asyncio.sleep(0.1)
    assert (await daemon.create(slots=ONE)).status == 201


async def test_a_newer_agentd_s_files_are_read_as_far_as_they_are_known(plain_world: World) -> None:
    world, daemon = plain_world, plain_world.daemon
    await daemon.call("POST", "/v1/devices/cuda/cuda7/drain")
    await world.kill()
    devices = daemon.folder / "state" / "devices.json"
    changed(devices, schema=99, colour="red")
    text = devices.read_text()
    await world.start()
    assert (await daemon.device("cuda7"))["state"] == "drained"
    assert any("of a newer agentd" in w for w in (await daemon.get("/v1/node"))["warnings"])
    assert (daemon.folder / "state" / "devices.json.schema-99").read_text() == text


async def is_served_without_being_remembered(world: World) -> None:
    """What needs no memory works; what does is refused, and leaves nothing."""
    daemon = world.daemon
    before = await world.look()
    refused = await daemon.create(kernel_id="k2", slots=ONE)
    assert (refused.status, refused.json["code"]) == (503, "StateUnavailable"), refused.content
    assert "cannot be written" in refused.json["detail"]
    drained = await daemon.call("POST", "/v1/devices/cuda/cuda9/drain")
    assert (drained.status, drained.json["code"]) == (503, "StateUnavailable")
    assert (await daemon.device("cuda9"))["state"] == "ok"
    assert (await daemon.call("GET", "/v1/kernels/k1/logs")).status == 200
    stopped = await daemon.call("POST", "/v1/kernels/k0/stop", {"timeout": 0})
    assert (stopped.status, stopped.json["state"]) == (200, "terminated")
    after = await world.look()
    assert after.accounted.keys() == before.accounted.keys()


@ROOT_ONLY
async def test_a_read_only_state_folder_keeps_nobody_from_being_served(world: World) -> None:
    daemon = world.daemon
    for name in ("k0", "k1"):
        await daemon.running(kernel_id=name, slots=ONE)
    before, lives = await world.check(), world.lives()
    await world.kill()
    state = daemon.folder / "state"
    with mounted("--bind", str(state), at=state):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(state)], check=True)
        await world.start()
        assert world.lives() == lives
        warnings = (await daemon.get("/v1/node"))["warnings"]
        assert [w for w in warnings if "the inventory is not remembered" in w], warnings
        await is_served_without_being_remembered(world)
        assert await world.kill(signal.SIGTERM) == 0
    await world.start()
    assert (await daemon.get("/v1/kernels/k0"))["state"] == "terminated"
    await world.check(before, {"k0"})
    assert (await daemon.create(kernel_id="k2", slots=ONE)).status == 201


@ROOT_ONLY
async def test_a_full_state_folder_is_the_same_and_mends_when_there_is_room(
    folder: Path,
) -> None:
    world, state = World(Daemon(folder, "process")), folder / "state"
    daemon = world.daemon
    state.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=512k,mode=711", "none", at=state):
        await world.start(text=NODE)
        for name in ("k0", "k1"):
            await daemon.running(kernel_id=name, slots=ONE)
        fill(state / "filler")
        await is_served_without_being_remembered(world)
        lives = world.lives()
        await world.kill()
        await world.start()
        assert world.lives() == lives
        assert (await daemon.create(kernel_id="k2", slots=ONE)).status == 503
        (state / "filler").unlink()
        assert (await daemon.create(kernel_id="k2", slots=ONE)).status == 201
        async with asyncio.timeout(10):
            while any("not remembered" in w for w in (await daemon.get("/v1/node"))["warnings"]):
                await asyncio.sleep(0.05)
        await world.check()
        await daemon.close()


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(b"x" * 4096)


async def test_a_state_folder_that_is_gone_costs_no_kernel(world: World) -> None:
    daemon, state = world.daemon, world.daemon.folder / "state"
    for agent in ("agent-1", "agent-2"):
        await daemon.running(agent, kernel_id=f"k-{agent}", slots=ONE)
    lives = world.lives()
    shutil.rmtree(state)
    assert (await daemon.create(kernel_id="k3", slots=ONE)).status == 201
    await world.check(allowed=["stray"])  # records are written anew when something happens
    shutil.rmtree(state)
    await world.kill()
    await world.start()
    assert {k: v for k, v in world.lives().items() if k != "k3"} == lives
    census = await world.check()
    assert census.accounted.keys() == {"k-agent-1", "k-agent-2", "k3"}
    assert {k: h for k, h in census.holdings.items() if k.startswith("cuda")} == {
        f"cuda/cuda{n}": ({f"k-agent-{n + 1}": 10**6} if n < 2 else {"k3": 10**6} if n == 2 else {})
        for n in range(32)
    }
    for kernel_id in census.accounted:
        assert (await world.remove(kernel_id)).status == 204
    await world.check()
    assert world.lives() == {}


EDITS = {
    "record-truncated": {"io.agentd.record": "{"},
    "devices-wrong": {"io.agentd.devices": "cuda/cuda9/cuda.device=1@SIM-cuda-cuda9"},
    "agent-wrong": {"io.agentd.agent": "agent-9"},
    "schema-wrong": {"io.agentd.schema": "what?"},
    "kernel-wrong": {"io.agentd.kernel": "somebody"},
    "all-wrong": {"io.agentd.record": "?", "io.agentd.devices": "?"},
}


@pytest.mark.docker
async def test_labels_that_somebody_edits_free_no_device(folder: Path, own_engine: Engine) -> None:
    world = World(Daemon(folder, "docker", own_engine))
    daemon = world.daemon
    await world.start(text=NODE)
    before = {name: await daemon.running(kernel_id=name, slots=ONE) for name in EDITS}
    lives = set(world.lives().values())
    await world.kill()
    own_engine.stop()
    for name, labels in EDITS.items():
        path = own_engine.folder / "data/containers" / before[name]["container_id"]
        content = json.loads((path / "config.v2.json").read_text())
        content["Config"]["Labels"] |= labels
        (path / "config.v2.json").write_text(json.dumps(content))
    own_engine.start()
    await world.start()
    after = {k["container_id"]: k for k in await daemon.get("/v1/kernels")}
    states = {name: after[kernel["container_id"]]["state"] for name, kernel in before.items()}
    assert states == dict.fromkeys(EDITS, "running") | {"all-wrong": "unreadable"}
    for name in states.keys() - {"all-wrong"}:
        assert after[before[name]["container_id"]]["allocation"] == before[name]["allocation"]
    assert {(pid, started(pid)) for pid, _ in lives} == lives
    assert await daemon.free("cuda.device") == "0"
    assert (await world.remove("all-wrong")).status == 204
    assert await daemon.free("cuda.device") == str(32 - len(EDITS) + 1)
    for kernel in after.values():
        await world.remove(kernel["kernel_id"])
    assert own_engine.containers() == []
    await daemon.close()


async def test_a_clock_that_is_set_back_moves_no_deadline(world: World) -> None:
    daemon = world.daemon
    await daemon.running(kernel_id="k1", slots=ONE)
    before, lives = await world.check(), world.lives()
    await world.kill()
    (daemon.folder / "state" / "intents" / "k2.json").write_text("{")
    offset = daemon.folder / "offset"
    offset.write_text("0")
    library = built("clock.c", daemon.folder / "clock.so")
    await daemon.start(LD_PRELOAD=str(library), CLOCK_OFFSET=str(offset))
    assert "k2" in [k["kernel_id"] for k in await daemon.get("/v1/kernels")]
    offset.write_text("-86400")
    async with asyncio.timeout(20):
        while "k2" in [k["kernel_id"] for k in await daemon.get("/v1/kernels")]:
            await asyncio.sleep(0.1)
    assert world.lives() == lives
    young = await daemon.running(kernel_id="k3", slots=ONE)
    old = await daemon.get("/v1/kernels/k1")
    assert young["created_at"] < old["created_at"], "the clock was set back for the daemon"
    await world.check(before)
    assert (await world.remove("k3")).status == 204


@contextmanager
def few_descriptors(pid: int) -> Iterator[None]:
    """Let a process open nothing more."""
    usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    free = next(number for number in range(len(used) + 1) if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, usual[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)


async def test_no_file_descriptors_left_is_no_end_of_a_kernel(world: World) -> None:
    daemon = world.daemon
    for name in ("k1", "k2"):
        await daemon.running(kernel_id=name, slots=ONE)
    before, lives = await world.check(), world.lives()
    assert daemon.process is not None
    with few_descriptors(daemon.process.pid):
        os.kill(lives["k2"][0], signal.SIGKILL)
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(2):
                await daemon.create(kernel_id="k3", slots=ONE)
    await daemon.until("k2", "terminated")
    await world.check(before, {"k2", "k3"})
    assert world.lives()["k1"] == lives["k1"]
    assert daemon.process.poll() is None


@ROOT_ONLY
async def test_a_pid_that_is_used_again_is_somebody_else(plain_world: World) -> None:
    world, daemon = plain_world, plain_world.daemon
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    kernel = await daemon.running(kernel_id="k1", slots=ONE)
    await world.kill()
    identity = daemon.folder / "state" / "kernels" / "k1" / "identity.json"
    shim = json.loads(identity.read_text())["shim_pid"]
    for pid in (shim, kernel["pid"]):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    other = reincarnated(kernel["pid"])
    try:
        await world.start()
        after = await daemon.get("/v1/kernels/k1")
        assert (after["state"], after["exit_code"]) == ("terminated", None)
        assert await daemon.free("cuda.device") == "32"
        assert (await world.remove("k1")).status == 204
        assert other.poll() is None
        await world.check()
    finally:
        other.kill()
        other.wait()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def reincarnated(pid: int) -> subprocess.Popen[bytes]:
    """Start a process that leads a session under this very pid."""
    for _ in range(200):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        made = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        if made.pid == pid:
            assert session(pid) == pid
            assert started(pid)
            return made
        made.kill()
        made.wait()
    raise AssertionError(f"pid {pid} could not be had again")
