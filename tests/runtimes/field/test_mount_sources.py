"""Mount sources of the field: automounts, and file systems that fail, each by its right name."""

import asyncio
import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentd.concurrency import silent_subjects
from agentd.core.kernel.edits import ContainerEdits, Mount
from agentd.errors import InvalidRequest, RuntimeFailure, RuntimeUnavailable
from agentd.runtimes.docker import mounts
from agentd.runtimes.docker.mounts import refuse_missing, refuse_replaced, resolve_sources
from end_to_end.containers import MOUNTABLE, printed
from support.automount import automount, expire, is_triggered
from support.daemon import AGENTS, Daemon
from support.engine import Engine
from support.host_faults import hung_mount
from support.needs import require
from support.waiting import until_blocking


@pytest.fixture
def share(folder: Path) -> Iterator[Path]:
    """An automount below a folder from which kernels may mount."""
    require("root")
    path = folder / "data" / "share"
    path.mkdir(parents=True)
    with automount(path):
        yield path


def test_automount_is_triggered_before_it_is_identified(share: Path) -> None:
    wanted = [Mount(str(share), "/share")]
    for _ in range(2):  # the second time after an idle time
        assert not is_triggered(share)
        [source] = resolve_sources(wanted, [share.parent])
        assert is_triggered(share)
        assert (source.device, source.inode) == (share.stat().st_dev, share.stat().st_ino)
        refuse_replaced(wanted, [source])
        expire(share)


@pytest.mark.parametrize("path", ["", "/x", "/../share/x", "/x/../../../ok"])
def test_no_automount_is_triggered_outside_of_allowed_folders(share: Path, path: str) -> None:
    """Otherwise any caller mounts /net/HOST of a host that it chooses."""
    allowed = share.parent.parent / "ok"
    allowed.mkdir()
    (allowed / "link").symlink_to(share)
    for source in (share, allowed / "link"):
        with pytest.raises(InvalidRequest, match="is not below an allowed folder"):
            resolve_sources([Mount(f"{source}{path}", "/x")], [allowed])
    assert not is_triggered(share)


def test_link_into_an_allowed_folder_is_followed(folder: Path) -> None:
    (folder / "data" / "a").mkdir(parents=True)
    (folder / "link").symlink_to("data/../data")
    [source] = resolve_sources([Mount(f"/{folder}/link/a", "/x")], [folder / "data"])
    assert source.path == str(folder / "data" / "a")


def test_silent_folder_holds_up_no_mount_of_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allowed before it or after it; what only it could have is refused for the moment."""
    data, dead, answered = folder / "data", folder / "dead", threading.Event()
    for path in (data, dead):
        path.mkdir()
    readlink = Path.readlink

    def wait(path: Path) -> Path:
        if path.is_relative_to(dead):
            answered.wait(20)
        return readlink(path)

    monkeypatch.setattr(Path, "readlink", wait)
    monkeypatch.setattr("agentd.concurrency.ANSWER_TIMEOUT_S", 0.1)
    for allowed in ([data, dead], [dead, data]):
        [source] = resolve_sources([Mount(str(data), "/x")], allowed)
        assert source.path == str(data)
        for wanted in (dead / "x", folder / "elsewhere"):
            with pytest.raises(RuntimeUnavailable, match=f"^{dead}.* no answer within"):
                resolve_sources([Mount(str(data), "/x"), Mount(str(wanted), "/y")], allowed)
    assert [thread.name for thread in threading.enumerate()].count(str(dead)) == 1
    answered.set()
    until_blocking(silent_subjects, [])


async def test_agents_do_not_wait_for_the_mounts_of_others(
    field_node: Daemon, folder: Path
) -> None:
    require("fuse")
    for name in ("hung", "b"):
        (folder / name).mkdir()
    agent = '[[agents]]\nid = "{}"\nallowed-mounts = ["{}"]\n'
    field_node.configure(
        agent.format("agent-1", folder / "hung") + agent.format("agent-2", folder / "b")
    )
    await field_node.start()
    with hung_mount(folder / "hung"):
        mount = {"source": f"{folder}/hung/x", "target": "/x"}
        creates = (field_node.create("agent-1", mounts=[mount]) for _ in range(5))
        refused = await asyncio.gather(*creates)
        assert {answer.status for answer in refused} == {503}
        assert "a mount's source does not answer" in refused[0].json["detail"]
        mount = {"source": f"{folder}/b", "target": "/x"}
        assert (await field_node.create("agent-2", mounts=[mount])).status == 201


def test_automount_of_a_plugin_is_triggered(share: Path) -> None:
    refuse_missing(ContainerEdits(mounts=(Mount(str(share), "/opt/driver"),)))
    assert is_triggered(share)


@pytest.mark.docker
@pytest.mark.parametrize("propagation", ["--make-shared", "--make-private"])
async def test_kernels_mount_an_automount_after_each_idle_time(
    engine: Engine, folder: Path, propagation: str
) -> None:
    """On a private tree, no mount that the container triggers would reach the container."""
    share = folder / "data" / "share"
    share.mkdir(parents=True)
    node = Daemon(folder, "docker", engine)
    await node.start(MOUNTABLE.format(folder=folder) + AGENTS)
    subprocess.run(["mount", "--bind", share.parent, share.parent], check=True)
    try:
        subprocess.run(["mount", propagation, share.parent], check=True)
        with automount(share):
            for _ in range(2):
                mount = {"source": str(share), "target": "/share"}
                assert await printed(node, "cat /share/content", mounts=[mount]) == "hello\n"
                expire(share)
    finally:
        await node.close()
        subprocess.run(["umount", "--lazy", share.parent], check=True)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOENT, "{path} does not exist"),
        (errno.ENOTDIR, "{path} does not exist"),
        (errno.EACCES, "agentd cannot open {path}: Permission denied"),
        (errno.EPERM, "agentd cannot open {path}: Operation not permitted"),
        (errno.ELOOP, "agentd cannot open {path}: Too many levels of symbolic links"),
    ],
)
def test_source_that_a_request_cannot_have_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    raise_at_open(monkeypatch, code)
    with pytest.raises(InvalidRequest) as caught:
        resolve_sources([Mount(f"{folder}/x", "/x")], [folder])
    [problem] = caught.value.problems
    assert (problem.where, problem.why) == ("mounts.0.source", reason.format(path=folder / "x"))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ESTALE, "Stale file handle"),
        (errno.ETIMEDOUT, "Connection timed out"),
        (errno.EIO, "Input/output error"),
        (errno.EHOSTDOWN, "Host is down"),
        (errno.ENOTCONN, "Transport endpoint is not connected"),
    ],
)
def test_file_system_that_fails_is_named_with_its_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    """Such a failure is the node's, and may pass; it never reads as a missing or replaced file."""
    wanted = [Mount(str(folder), "/x")]
    sources = resolve_sources(wanted, [folder])
    raise_at_open(monkeypatch, code)
    expected = f"the file system of {folder} fails: {reason}"
    with pytest.raises(RuntimeUnavailable, match=expected):
        resolve_sources(wanted, [folder])
    with pytest.raises(RuntimeUnavailable, match=expected):
        refuse_replaced(wanted, sources)


def test_file_system_without_its_server_is_named(folder: Path) -> None:
    require("fuse")
    source = folder / "bucket"
    source.mkdir()
    expected = f"the file system of {source} fails: Transport endpoint is not connected"
    with hung_mount(source, is_dead=True), pytest.raises(RuntimeUnavailable, match=expected):
        resolve_sources([Mount(str(source), "/x")], [folder])


def test_file_system_of_another_user_is_named(folder: Path) -> None:
    """FUSE without `allow_root`: not even root can open it."""
    require("fuse")
    source = folder / "home"
    source.mkdir()
    expected = f"agentd cannot open {source}: Permission denied"
    with hung_mount(source, user=1000), pytest.raises(InvalidRequest, match=expected):
        resolve_sources([Mount(str(source), "/x")], [folder])


def test_failure_outside_of_allowed_folders_is_not_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_at_open(monkeypatch, errno.ESTALE)
    with pytest.raises(InvalidRequest, match="is not below an allowed folder"):
        resolve_sources([Mount("/elsewhere", "/x")], [folder])


def test_file_that_is_replaced_by_a_link_is_still_refused(folder: Path) -> None:
    (folder / "file").touch()
    wanted = [Mount(str(folder / "file"), "/x")]
    sources = resolve_sources(wanted, [folder])
    (folder / "file").unlink()
    (folder / "file").symlink_to(folder / "file")
    with pytest.raises(RuntimeFailure, match="was replaced during the create"):
        refuse_replaced(wanted, sources)


def raise_at_open(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(mounts.os, "open", fail)
