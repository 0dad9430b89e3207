"""The attack suite: what local users and kernels try, and what they get for it.

The cases follow docs/explanation/trust.md: who (another local user, a kernel), what is tried, and
when (before, during and after a restart). Each asserts that the node is as it was: the same
kernels, devices and agents, and a daemon that answers.
"""

import asyncio
import os
import shutil
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
from support.checked_node import CheckedNode
from support.daemon import AGENTS, Daemon, gpus
from support.damage import forged

pytestmark = pytest.mark.needs("root")
NODE = '[plugins]\nallow = ["sim"]\n' + AGENTS + gpus(4)
ONE = {"cuda.device": 1, "cpu": 0, "mem": "64m"}
NOBODY = 65534
ANSWERS_WITHIN_S = 5.0


@pytest.fixture
async def node(folder: Path) -> AsyncIterator[CheckedNode]:
    """A node with a kernel of each agent, on the process runtime."""
    made = CheckedNode(Daemon(folder, "process"))
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


async def picture(node: CheckedNode) -> dict[str, Any]:
    """Everything that a forger would want to change."""
    daemon = node.daemon
    return {
        "kernels": await daemon.get("/v1/kernels"),
        "devices": await daemon.get("/v1/devices"),
        "agents": await daemon.get("/v1/agents"),
        "slots": await daemon.get("/v1/slot-types"),
    }


async def restarted(node: CheckedNode, number: int) -> None:
    await node.kill(number)
    await node.start()


@pytest.mark.parametrize("kernel_id", ["ghost", "of-agent-1", "../../etc", "/tmp/x", "a b"])
async def test_process_with_forged_marks_is_not_a_kernel(node, as_nobody, kernel_id) -> None:
    before = await picture(node)
    forger = as_nobody("sleep", "1000", **marks(node.node_id, kernel_id))
    for number in (signal.SIGKILL, signal.SIGTERM):
        await restarted(node, number)
        assert await picture(node) == before
        assert await node.daemon.failed_checks() == []
    assert forger.poll() is None, "agentd ended a process that is none of its own"


async def test_forged_container_does_not_block_its_kernel_id(node, as_nobody) -> None:
    as_nobody("sleep", "1000", **marks(node.node_id, "ghost2"))
    async with asyncio.timeout(ANSWERS_WITHIN_S):
        kernel = await node.daemon.running(kernel_id="ghost2", slots=ONE)
    assert (await node.remove("ghost2")).status == 204
    assert kernel["allocation"]["cuda"]


async def test_exec_refuses_a_setuid_process(node, as_nobody, folder) -> None:
    """Its environment is its caller's and its process is root's: what 0.1.0 was taken in by."""
    program = built("setuid.c", folder / "theirs" / "setuid")
    os.chown(program, 0, 0)
    program.chmod(0o4755)
    (folder / "theirs" / "output.log.0").symlink_to("/etc/shadow")
    before = await picture(node)
    claimed = str(folder / "theirs")
    daemon = node.daemon.process
    assert daemon is not None
    plugin = {"AGENTD_PLUGIN": f"999999.1.{new_mark().split('.', 2)[2]}"}
    forger = as_nobody(str(program), **marks(node.node_id, claimed), **plugin)
    assert forger.stdout is not None
    assert forger.stdout.readline() == b"euid 0\n"
    await restarted(node, signal.SIGKILL)
    assert await picture(node) == before
    for path in (claimed, "theirs", "..%2Ftheirs"):
        answer = await node.daemon.call("GET", f"/v1/kernels/{path.replace('/', '%2F')}/logs")
        assert answer.status == 404
    assert forger.poll() is None, "a stranger's program was ended"


async def test_the_name_of_a_kernel_s_cgroup_elsewhere_proves_nothing(node, folder) -> None:
    """A subtree that was delegated can have groups of any name."""
    cgroups = find_cgroups()
    assert cgroups is not None
    before = await picture(node)
    delegated = [item.folder.with_name("agentd-test-delegated") for item in cgroups.hierarchies]
    mine = [top / "agentd-kernels" / kernel_name(node.node_id, "ghost") for top in delegated]
    sleeper = subprocess.Popen(["sleep", "1000"], user=NOBODY)
    try:
        for group in mine:
            group.mkdir(parents=True)
            (group / "cgroup.procs").write_text(str(sleeper.pid))
        await restarted(node, signal.SIGKILL)
        assert await picture(node) == before
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
    "a file system's own": lambda kernels, _: _foreign(kernels / "lost+found", "precious"),
    "a backup": lambda kernels, _: _foreign(kernels / "backup", "record.json.bak"),
    "a copy": lambda kernels, _: shutil.copytree(kernels / "of-agent-1", kernels / "k1.bak"),
}


def _foreign(path: Path, file: str) -> None:
    path.mkdir()
    (path / file).write_text("mine")


def _folder(path: Path, owner: int, mode: int) -> None:
    path.mkdir()
    (path / "record.json").write_text('{"schema": 1}')
    (path / "identity.json").write_text('{"pid": 1}')
    (path / "output.log.0").symlink_to("/etc/shadow")
    path.chmod(mode)
    os.chown(path, owner, owner)


async def test_bundles_of_others_are_not_trusted(node, folder) -> None:
    (folder / "theirs").mkdir()
    before = await picture(node)
    await node.kill()
    kernels = folder / "state" / "kernels"
    for make in HOSTILE_BUNDLES.values():
        make(kernels, folder / "theirs")
    there = sorted(str(path) for path in kernels.rglob("*"))
    await node.start()
    assert await picture(node) == before
    assert sorted(str(path) for path in kernels.rglob("*")) == there, "nothing of it was touched"


@pytest.mark.parametrize("file", ["output.log.0", "record.json", "identity.json", "exit.json"])
async def test_no_link_in_a_bundle_is_followed(node, folder, file) -> None:
    """Only root could put one there; a bug elsewhere must not become a way to root's files."""
    bundle = folder / "state" / "kernels" / "of-agent-1"
    (bundle / file).unlink(missing_ok=True)
    (bundle / file).symlink_to("/etc/passwd")
    logs = await node.daemon.call("GET", "/v1/kernels/of-agent-1/logs")
    assert b"root:" not in logs.content
    await restarted(node, signal.SIGKILL)
    kernel = await node.daemon.get("/v1/kernels/of-agent-1")
    assert kernel["state"] == "running"
    assert kernel["allocation"]["cuda"] == {"cuda.device": {"cuda0": "1"}}
    assert Path("/etc/passwd").exists()


async def test_state_is_writable_by_agentd_only(node, as_nobody, folder) -> None:
    """The state folder, bundles, locks, cgroups and their attributes, as another user."""
    bundle = folder / "state" / "kernels" / "of-agent-1"
    cgroups = find_cgroups()
    assert cgroups is not None
    group = cgroups.group(kernel_name(node.node_id, "of-agent-1")).folders[0]
    tries = [
        f"ls {folder}/state/kernels",
        f"cat {bundle}/record.json",
        f"python3 -c \"import fcntl; fcntl.lockf(open('{bundle}/lock', 'w'), 2)\"",
        f"mkdir {group.parent}/{kernel_name(node.node_id, 'ghost')}",
        f"echo $$ > {group}/cgroup.procs",
        f"python3 -c \"import os; os.setxattr('{group}', 'trusted.agentd.devices', b'x')\"",
        f"python3 -c \"import os; os.setxattr('{group}', 'user.agentd.devices', b'x')\"",
        f"cat {folder}/state/devices.json",
        f"touch {folder}/state/x",
    ]
    for script in tries:
        forger = as_nobody("sh", "-c", script)
        assert await asyncio.to_thread(forger.wait, 20) != 0, script
    assert await node.daemon.failed_checks() == []


async def test_records_that_lie_rename_and_move_nothing(node, folder) -> None:
    """Not even a record that is believed: it keeps devices back, and that is all."""
    before = await picture(node)
    record = folder / "state" / "kernels" / "of-agent-1" / "record.json"
    text = record.read_text()
    lie = forged(text, ('"id": "cuda0"', '"id": "evil0"'), ('"agent-1"', '"agent-2"'))
    assert lie != text
    for _ in range(2):
        await node.kill()
        record.write_text(lie)
        await node.start()
        after = await picture(node)
        assert [(d["id"], d["stable_id"], d["agents"]) for d in after["devices"]] == [
            (d["id"], d["stable_id"], d["agents"]) for d in before["devices"]
        ]
    await node.kill()
    record.write_text(text)
    await node.start()
    assert await picture(node) == before


async def test_device_known_only_from_a_record_ends_with_it(node, folder) -> None:
    record = folder / "state" / "kernels" / "of-agent-1" / "record.json"
    await node.kill()
    lie = forged(record.read_text(), (f"SIM-{node.node_id}-cuda-cuda0", "SIM-nobody"))
    record.write_text(lie)
    await node.start()
    devices = {d["stable_id"]: d for d in await node.daemon.get("/v1/devices")}
    assert devices["SIM-nobody"]["state"] == "gone"
    assert "SIM-nobody" not in (folder / "state" / "devices.json").read_text()
    await node.remove("of-agent-1")
    await restarted(node, signal.SIGKILL)
    stable_ids = {d["stable_id"] for d in await node.daemon.get("/v1/devices")}
    assert "SIM-nobody" not in stable_ids


async def test_many_forged_kernels_do_not_delay_the_daemon(node, as_nobody) -> None:
    for number in range(50):
        as_nobody("sleep", "1000", **marks(node.node_id, f"ghost{number}"))
    await restarted(node, signal.SIGKILL)
    async with asyncio.timeout(ANSWERS_WITHIN_S):
        assert (await node.remove("of-agent-2")).status == 204
    assert node.daemon.log.count("\n") < 100
