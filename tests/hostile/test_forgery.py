"""The attack suite: what local users and kernels try, and what they get for it.

The cases follow docs/explanation/trust.md: who (another local user, a kernel), what is tried, and
when (before, during and after a restart). Each asserts that the node is as it was: the same
kernels, devices and agents, and a daemon that answers.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentd.core.kernel.plan import kernel_name
from agentd.host.cgroups.hierarchies import find_cgroups
from agentd.pluginhost.descendants import new_mark
from native.libraries import built
from support.daemon import AGENTS, Daemon, gpus
from support.world import World

pytestmark = pytest.mark.needs("root")
NODE = '[plugins]\nallow = ["sim"]\n' + AGENTS + gpus(4)
ONE = {"cuda.device": 1, "cpu": 0, "mem": "64m"}
NOBODY = 65534
ANSWERS_WITHIN_S = 5.0


@pytest.fixture
async def world(folder: Path) -> AsyncIterator[World]:
    """A node with a kernel of each agent, on the process runtime."""
    made = World(Daemon(folder, "process"))
    await made.start(text=NODE)
    for agent in ("agent-1", "agent-2"):
        await made.daemon.running(agent, kernel_id=f"of-{agent}", slots=ONE)
    yield made
    await made.daemon.close()


@pytest.fixture
def as_nobody(folder: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a program as another local user, with any environment and folder."""
    theirs = folder / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    running: list[subprocess.Popen[bytes]] = []

    def start(*command: str, **env: str) -> subprocess.Popen[bytes]:
        made = subprocess.Popen(
            command,
            env={"PATH": "/usr/bin:/bin", **env},
            cwd=theirs,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running.append(made)
        return made

    yield start
    for process in running:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def marks(node: str, kernel_id: str) -> dict[str, str]:
    """The marks that version 0.1.0 trusted, and those of a kernel today."""
    stated = "cuda/cuda0/cuda.device=1@SIM-cuda-cuda0 cuda/evil/cuda.device=1@SIM-cuda-cuda1"
    return {
        "AGENTD_KEEPER": node,
        "AGENTD_NODE": node,
        "AGENTD_KERNEL": kernel_id,
        "AGENTD_AGENT": "agent-2",
        "AGENTD_DEVICES": stated,
    }


async def picture(world: World) -> dict[str, Any]:
    """Everything that a forger would want to change."""
    daemon = world.daemon
    return {
        "kernels": await daemon.get("/v1/kernels"),
        "devices": await daemon.get("/v1/devices"),
        "agents": await daemon.get("/v1/agents"),
        "slots": await daemon.get("/v1/slot-types"),
    }


async def is_sound(world: World) -> None:
    """The node by its own rules; what looks at it from outside believes environments."""
    checks = (await world.daemon.get("/v1/node?check=true"))["checks"]
    assert [check for check in checks if not check["passed"]] == []


async def restarted(world: World, number: int) -> None:
    await world.kill(number)
    await world.start()


@pytest.mark.parametrize("kernel_id", ["ghost", "of-agent-1", "../../etc", "/tmp/x", "a b"])
async def test_process_with_forged_marks_is_not_a_kernel(world, as_nobody, kernel_id) -> None:
    before = await picture(world)
    forger = as_nobody("sleep", "1000", **marks(world.node, kernel_id))
    for number in (signal.SIGKILL, signal.SIGTERM):
        await restarted(world, number)
        assert await picture(world) == before
        await is_sound(world)
    assert forger.poll() is None, "agentd ended a process that is none of its own"


async def test_forged_container_does_not_block_its_kernel_id(world, as_nobody) -> None:
    as_nobody("sleep", "1000", **marks(world.node, "ghost2"))
    async with asyncio.timeout(ANSWERS_WITHIN_S):
        kernel = await world.daemon.running(kernel_id="ghost2", slots=ONE)
    assert (await world.remove("ghost2")).status == 204
    assert kernel["allocation"]["cuda"]


async def test_exec_refuses_a_setuid_process(world, as_nobody, folder) -> None:
    """Its environment is its caller's and its process is root's: what 0.1.0 was taken in by."""
    program = built("setuid.c", folder / "theirs" / "setuid")
    os.chown(program, 0, 0)
    program.chmod(0o4755)
    (folder / "theirs" / "output.log").symlink_to("/etc/shadow")
    before = await picture(world)
    claimed = str(folder / "theirs")
    daemon = world.daemon.process
    assert daemon is not None
    plugin = {"AGENTD_PLUGIN": f"999999.1.{new_mark().split('.', 2)[2]}"}
    forger = as_nobody(str(program), **marks(world.node, claimed), **plugin)
    assert forger.stdout is not None
    assert forger.stdout.readline() == b"euid 0\n"
    await restarted(world, signal.SIGKILL)
    assert await picture(world) == before
    for path in (claimed, "theirs", "..%2Ftheirs"):
        answer = await world.daemon.call("GET", f"/v1/kernels/{path.replace('/', '%2F')}/logs")
        assert answer.status == 404, answer.content
    assert forger.poll() is None, "a stranger's program was ended"


async def test_the_name_of_a_kernel_s_cgroup_elsewhere_proves_nothing(world, folder) -> None:
    """A subtree that was delegated can have groups of any name."""
    cgroups = find_cgroups()
    assert cgroups is not None
    before = await picture(world)
    delegated = [item.folder.with_name("agentd-test-delegated") for item in cgroups.hierarchies]
    mine = [top / "agentd-kernels" / kernel_name(world.node, "ghost") for top in delegated]
    sleeper = subprocess.Popen(["sleep", "1000"], user=NOBODY)
    try:
        for group in mine:
            group.mkdir(parents=True)
            (group / "cgroup.procs").write_text(str(sleeper.pid))
        await restarted(world, signal.SIGKILL)
        assert await picture(world) == before
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()
        for group in mine:
            for folder_ in (group, group.parent, group.parent.parent):
                folder_.rmdir()


HOSTILE_BUNDLES: dict[str, Callable[[Path, Path], object]] = {
    "a link to another kernel's": lambda kernels, _: (kernels / "l1").symlink_to("of-agent-1"),
    "a link to a user's folder": lambda kernels, theirs: (kernels / "l2").symlink_to(theirs),
    "a folder of a user's": lambda kernels, _: _folder(kernels / "theirs", NOBODY, 0o700),
    "a folder that others can write": lambda kernels, _: _folder(kernels / "open", 0, 0o777),
    "names that are paths": lambda kernels, _: _folder(kernels / "..x", 0, 0o700),
    "a file": lambda kernels, _: (kernels / "file").write_text("{}"),
}


def _folder(path: Path, owner: int, mode: int) -> None:
    path.mkdir()
    (path / "record.json").write_text('{"schema": 1}')
    (path / "identity.json").write_text('{"pid": 1}')
    (path / "output.log").symlink_to("/etc/shadow")
    path.chmod(mode)
    os.chown(path, owner, owner)


@pytest.mark.parametrize("name", HOSTILE_BUNDLES)
async def test_bundle_of_another_owner_is_not_trusted(world, folder, name) -> None:
    (folder / "theirs").mkdir()
    before = await picture(world)
    await world.kill()
    kernels = folder / "state" / "kernels"
    HOSTILE_BUNDLES[name](kernels, folder / "theirs")
    there = sorted(str(path) for path in kernels.rglob("*"))
    await world.start()
    assert await picture(world) == before
    assert sorted(str(path) for path in kernels.rglob("*")) == there, "nothing of it was touched"


@pytest.mark.parametrize("file", ["output.log", "record.json", "identity.json", "exit.json"])
async def test_no_link_in_a_bundle_is_followed(world, folder, file) -> None:
    """Only root could put one there; a bug elsewhere must not become a way to root's files."""
    bundle = folder / "state" / "kernels" / "of-agent-1"
    (bundle / file).unlink(missing_ok=True)
    (bundle / file).symlink_to("/etc/passwd")
    logs = await world.daemon.call("GET", "/v1/kernels/of-agent-1/logs")
    assert b"root:" not in logs.content
    await restarted(world, signal.SIGKILL)
    kernel = await world.daemon.get("/v1/kernels/of-agent-1")
    assert kernel["state"] == "running"
    assert kernel["allocation"]["cuda"] == {"cuda.device": {"cuda0": "1"}}
    assert Path("/etc/passwd").exists()


async def test_state_is_writable_by_agentd_only(world, as_nobody, folder) -> None:
    """The state folder, bundles, locks, cgroups and their attributes, as another user."""
    bundle = folder / "state" / "kernels" / "of-agent-1"
    cgroups = find_cgroups()
    assert cgroups is not None
    group = cgroups.group(kernel_name(world.node, "of-agent-1")).folders[0]
    tries = [
        f"ls {folder}/state/kernels",
        f"cat {bundle}/record.json",
        f"python3 -c \"import fcntl; fcntl.lockf(open('{bundle}/lock', 'w'), 2)\"",
        f"mkdir {group.parent}/{kernel_name(world.node, 'ghost')}",
        f"echo $$ > {group}/cgroup.procs",
        f"python3 -c \"import os; os.setxattr('{group}', 'trusted.agentd.devices', b'x')\"",
        f"python3 -c \"import os; os.setxattr('{group}', 'user.agentd.devices', b'x')\"",
        f"cat {folder}/state/devices.json",
        f"touch {folder}/state/x",
    ]
    for script in tries:
        forger = as_nobody("sh", "-c", script)
        assert await asyncio.to_thread(forger.wait, 20) != 0, script
    await is_sound(world)


async def test_records_that_lie_rename_and_move_nothing(world, folder) -> None:
    """Not even a record that is believed: it keeps devices back, and that is all."""
    before = await picture(world)
    record = folder / "state" / "kernels" / "of-agent-1" / "record.json"
    text = record.read_text()
    lie = text.replace('"id":"cuda0"', '"id":"evil0"').replace('"agent-1"', '"agent-2"')
    assert lie != text
    for _ in range(2):
        await world.kill()
        record.write_text(lie)
        await world.start()
        after = await picture(world)
        assert [(d["id"], d["stable_id"], d["agents"]) for d in after["devices"]] == [
            (d["id"], d["stable_id"], d["agents"]) for d in before["devices"]
        ]
    await world.kill()
    record.write_text(text)
    await world.start()
    assert await picture(world) == before


async def test_device_known_only_from_a_record_ends_with_it(world, folder) -> None:
    record = folder / "state" / "kernels" / "of-agent-1" / "record.json"
    await world.kill()
    lie = record.read_text().replace(f"SIM-{world.node}-cuda-cuda0", "SIM-nobody")
    record.write_text(lie)
    await world.start()
    devices = {d["stable_id"]: d for d in await world.daemon.get("/v1/devices")}
    assert devices["SIM-nobody"]["state"] == "gone"
    assert "SIM-nobody" not in (folder / "state" / "devices.json").read_text()
    await world.remove("of-agent-1")
    await restarted(world, signal.SIGKILL)
    stable_ids = {d["stable_id"] for d in await world.daemon.get("/v1/devices")}
    assert "SIM-nobody" not in stable_ids


async def test_many_forged_kernels_do_not_delay_the_daemon(world, as_nobody) -> None:
    for number in range(50):
        as_nobody("sleep", "1000", **marks(world.node, f"ghost{number}"))
    await restarted(world, signal.SIGKILL)
    async with asyncio.timeout(ANSWERS_WITHIN_S):
        assert (await world.remove("of-agent-2")).status == 204
    assert world.daemon.log.count("\n") < 100
