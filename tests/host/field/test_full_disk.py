"""Disks that are full in small ways, read-only, and writable again, on the runtimes of the host."""

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from agentd.config.runtimes import ProcessSettings, SystemdSettings
from agentd.core.kernel.exec_spec import ExecSpec
from agentd.core.kernel.states import KernelRef
from agentd.errors import (
    AgentdError,
    InvalidRequest,
    RuntimeFailure,
    RuntimeUnavailable,
    StateUnavailable,
)
from agentd.host.systemd.dbus import NoSuchUnit, SystemdManager, UnitRefused
from agentd.runtimes.docker import runtime as docker_runtime
from agentd.runtimes.docker.docker_errors import DockerError
from agentd.runtimes.docker.runtime import DockerRuntime
from agentd.runtimes.host import host_exec
from agentd.runtimes.host.user_accounts import UserAccounts
from agentd.runtimes.process.runtime import ProcessRuntime
from agentd.runtimes.process.spawn import start_error
from agentd.runtimes.systemd.runtime import SystemdRuntime
from contracts.test_runtime import NODE, docker_settings, plan, process_runtime
from support.daemon import AGENTS, Daemon, gpus
from support.waiting import until

ROOT_ONLY = pytest.mark.needs("root")
PAGE = 4096
K1 = KernelRef("k1")
Runtime = ProcessRuntime | SystemdRuntime


@contextmanager
def small_disk(folder: Path, options: str = "size=2m") -> Iterator[None]:
    """Mount a file system of its own on a folder."""
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"mode=711,{options}", "none", folder], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def take_all_inodes_but(folder: Path, count: int) -> Callable[[], object]:
    taken: list[Path] = []
    with suppress(OSError):
        while True:
            taken.append(folder / f"taken-{len(taken)}")
            taken[-1].touch()
    for path in taken[:count]:
        path.unlink()
    return lambda: [path.unlink(missing_ok=True) for path in taken]


def take_all_room_but(folder: Path, pages: int) -> Callable[[], object]:
    path = folder / "filler"
    with path.open("wb", buffering=0) as filler:
        with suppress(OSError):
            while True:
                filler.write(bytes(PAGE))
        filler.truncate((filler.tell() // PAGE - pages) * PAGE)
    return path.unlink


def make_read_only(folder: Path) -> Callable[[], object]:
    def remount(mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", folder], check=True)

    remount("ro")
    return lambda: remount("rw")


def inodes_left(count: int) -> Callable[[Path], Callable[[], object]]:
    return lambda folder: take_all_inodes_but(folder, count)


def pages_left(pages: int) -> Callable[[Path], Callable[[], object]]:
    return lambda folder: take_all_room_but(folder, pages)


TROUBLES = {
    **{f"{count}-inodes": ("nr_inodes=64", inodes_left(count)) for count in (0, 2)},
    "read-only": ("size=2m", make_read_only),
    **{f"{pages}-pages": ("size=2m", pages_left(pages)) for pages in range(3)},
}
"""The mount's options, and what takes the room and returns what gives it back."""


def systemd_runtime(folder: Path) -> SystemdRuntime:
    """Return a runtime whose manager knows no unit."""
    made = SystemdRuntime(
        folder, "n", "boot", SystemdSettings(), UserAccounts(is_unprivileged=True)
    )
    made._manager = AsyncMock(get_properties=AsyncMock(return_value=None))
    made._observer._manager = made._manager
    made._ends = AsyncMock()
    return made


RUNTIMES: dict[str, Callable[[Path], Runtime]] = {
    "process": process_runtime, "systemd": systemd_runtime
}  # fmt: skip


CASES = [("process", trouble) for trouble in TROUBLES]
CASES += [
    ("systemd", trouble) for trouble in ("0-inodes", "2-inodes", "read-only", "0-pages", "1-pages")
]


@ROOT_ONLY
@pytest.mark.parametrize(("runtime", "trouble"), CASES)
async def test_create_on_a_full_disk_leaves_nothing(
    folder: Path, runtime: str, trouble: str
) -> None:
    options, take = TROUBLES[trouble]
    with small_disk(bundles := folder / "kernels", options):
        made, give_back = RUNTIMES[runtime](bundles), take(bundles)
        with pytest.raises(StateUnavailable):
            await made.create(plan("true"), lambda *_: None)
        give_back()
        assert [path.name for path in bundles.iterdir()] == []
        await made.close()


@ROOT_ONLY
@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_removal_on_a_read_only_disk_is_unavailable(folder: Path, runtime: str) -> None:
    with small_disk(bundles := folder / "kernels"):
        made = RUNTIMES[runtime](bundles)
        (bundles / "k1").mkdir(mode=0o700)
        give_back = make_read_only(bundles)
        with pytest.raises(StateUnavailable):
            await made.remove(K1)
        await made.remove(KernelRef("none"))
        give_back()
        await made.remove(K1)
        assert [path.name for path in bundles.iterdir()] == []
        await made.close()


ERRORS = {
    "full": (errno.ENOSPC, StateUnavailable),
    "quota": (errno.EDQUOT, StateUnavailable),
    "broken": (errno.EIO, StateUnavailable),
    "no-descriptor": (errno.ENFILE, RuntimeUnavailable),
    "no-memory": (errno.ENOMEM, RuntimeUnavailable),
    "forbidden": (errno.EPERM, RuntimeFailure),
}


@pytest.mark.parametrize(("number", "expected"), ERRORS.values(), ids=ERRORS)
def test_shim_that_does_not_start_says_why(number: int, expected: type[AgentdError]) -> None:
    for step in ("bundle", "identity", "fork", "shim", "cgroup"):
        error = start_error(plan("true"), {"step": step, "errno": number}, ProcessSettings())
        assert type(error) is expected
        assert str(error) == f"the kernel did not start; {step}: {os.strerror(number)}"


@pytest.mark.parametrize(("number", "expected"), ERRORS.values(), ids=ERRORS)
async def test_unit_that_systemd_cannot_write_is_unavailable(
    folder: Path, number: int, expected: type[AgentdError]
) -> None:
    made = systemd_runtime(folder)
    error = UnitRefused("cannot write the unit")
    error.number = number
    made._manager.start = AsyncMock(side_effect=error)  # type: ignore[method-assign]
    with pytest.raises(expected, match="systemd: cannot write the unit"):
        await made.create(plan("true"), lambda *_: None)
    assert not (folder / "k1").exists()


async def test_unit_that_systemd_has_lost_at_once_found_no_room(folder: Path) -> None:
    manager = SystemdManager(is_user=True)
    lost = NoSuchUnit("Unit agentd-x-k1.service not found.")
    manager._run_job = AsyncMock(side_effect=lost)  # type: ignore[method-assign]
    made = systemd_runtime(folder)
    made._manager.start = manager.start  # type: ignore[method-assign]
    with pytest.raises(StateUnavailable, match=r"k1\.service cannot be written"):
        await made.create(plan("true"), lambda *_: None)
    assert not (folder / "k1").exists()


async def test_unit_without_resources_is_unavailable(folder: Path) -> None:
    """As with a full /tmp, in which systemd makes the folder of `PrivateTmp=`."""
    made = systemd_runtime(folder)

    async def get_properties(_: str, names: tuple[str, ...]) -> dict[str, object] | None:
        return {"Result": "resources", "ExecMainStatus": 0} if "Result" in names else None

    made._manager.get_properties = get_properties  # type: ignore[assignment]
    made._manager.start = AsyncMock(return_value="failed")  # type: ignore[method-assign]
    with pytest.raises(RuntimeUnavailable, match="start failed: resources, status 0"):
        await made.create(plan("true"), lambda *_: None)
    assert not (folder / "k1").exists()


async def test_full_disk_of_an_engine_is_shown_for_a_while(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = DockerRuntime(NODE, docker_settings(folder / "none"))
    monkeypatch.setattr(made, "_fetch_facts", AsyncMock(return_value=Mock()))
    failure = DockerError(500, "write /data/docker/x: no space left on device")
    monkeypatch.setattr(made, "_create_or_pull", AsyncMock(side_effect=failure))
    assert made.unready_reason == ""
    with pytest.raises(StateUnavailable):
        await made.create(plan("true"), lambda *_: None)
    assert made.unready_reason == "the disk of the node's engine is full or not writable"
    monkeypatch.setattr(docker_runtime, "DISK_PAUSE_S", 0.0)
    with pytest.raises(StateUnavailable):
        await made.create(plan("true"), lambda *_: None)
    assert made.unready_reason == ""
    await made.close()


@ROOT_ONLY
@pytest.mark.parametrize("trouble", TROUBLES)
async def test_condition_lasts_until_there_is_room(folder: Path, trouble: str) -> None:
    options, take = TROUBLES[trouble]
    daemon, slots = Daemon(folder, "process"), {"cuda.device": 1}
    bundles = folder / "state" / "kernels"
    bundles.mkdir(parents=True, mode=0o700)
    with small_disk(bundles, options):
        await daemon.start(AGENTS + gpus())
        give_back = take(bundles)
        refused = await daemon.create(kernel_id="k2", slots=slots)
        assert (refused.status, refused.json["code"]) == (503, "StateUnavailable"), refused
        assert "Retry-After" in refused.headers
        node = await daemon.get("/v1/node")
        about = [item["about"] for item in node["conditions"] if str(bundles) in item["reason"]]
        assert about == ["state-dir"]
        assert await daemon.free("cuda.device") == "2"
        give_back()
        await until(daemon.warnings, lambda them: not any(str(bundles) in w for w in them))
        assert (await daemon.create(kernel_id="k2", slots=slots)).status == 201
        await daemon.close()


@ROOT_ONLY
@pytest.mark.parametrize("is_first", [True, False], ids=["first-start", "later-start"])
async def test_warnings_of_a_read_only_start_end(folder: Path, is_first: bool) -> None:
    daemon, state = Daemon(folder, "process"), folder / "state"
    with small_disk(state):
        daemon.configure(AGENTS + gpus())
        if not is_first:
            await daemon.start()
            await daemon.stop()
        give_back = make_read_only(state)
        await daemon.start()
        assert len(await daemon.warnings()) > 1
        assert (await daemon.create(kernel_id="k1")).status == 503
        give_back()
        await until(daemon.warnings, [])
        assert (await daemon.create(kernel_id="k1")).status == 201
        node = json.loads((state / "node.json").read_text())
        assert (node["node_id"], node["runtimes"]) == (daemon.node, ["process"])
        assert (state / "lock").read_text().strip().isdecimal()
        await daemon.close()


FOLDERS: dict[str, type[AgentdError]] = {
    "ENOENT": InvalidRequest,
    "EACCES": InvalidRequest,
    "ENOMEM": RuntimeUnavailable,
    "ESTALE": RuntimeUnavailable,
    "ENOTCONN": RuntimeUnavailable,
    "EIO": StateUnavailable,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_working_dir_is_refused_for_what_the_client_can_mend(name: str) -> None:
    answer = {"step": "working_dir", "errno": getattr(errno, name)}
    assert type(start_error(plan("true"), answer, ProcessSettings())) is FOLDERS[name]
    assert type(host_exec._start_error(ExecSpec(("true",)), answer)) is FOLDERS[name]
