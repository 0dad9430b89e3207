"""Which process a command may be put beside: all that it has is what the command gets."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentd.runtimes.host.exec_target import (
    Target,
    find_target,
    lower_limit,
    read_limits,
    read_status,
    start_time,
)
from support.host_faults import HOSTILE_NAMES, named_process

TAME = ("setpriv", "--no-new-privs")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process such as a kernel's, which can gain no privileges."""
    with sleeping(*TAME) as process:
        yield process


@contextmanager
def sleeping(*before: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps, once what comes before it has become it."""
    env = {"A": "b", "PATH": os.environ["PATH"]}
    with subprocess.Popen([*before, "sleep", "100000"], env=env) as process:
        proc = Path(f"/proc/{process.pid}")
        while (proc / "comm").read_text() != "sleep\n" or not (proc / "environ").read_bytes():
            assert process.poll() is None
        yield process
        process.kill()


def test_all_of_a_process_is_read(sleeper) -> None:
    target = Target(sleeper.pid, start_time(sleeper.pid), [])
    assert (target.uid, target.gid) == (os.geteuid(), os.getegid())
    assert target.env["A"] == "b"
    assert target.cores == os.sched_getaffinity(0)
    assert target.namespaces == 0
    assert target.folder == str(Path.cwd())


def test_one_that_could_gain_privileges_is_refused() -> None:
    with sleeping() as process, pytest.raises(PermissionError, match="could gain privileges"):
        Target(process.pid, start_time(process.pid), [])


def test_one_that_is_root_of_its_own_user_namespace_is_refused() -> None:
    """There it has every capability, which would be every one of the machine here."""
    with (
        sleeping(*TAME, "unshare", "--user", "--map-root-user") as process,
        pytest.raises(PermissionError, match="user namespace"),
    ):
        Target(process.pid, start_time(process.pid), [])


def test_one_that_is_in_no_group_of_the_kernel_is_refused(sleeper, tmp_path: Path) -> None:
    procs = tmp_path / "cgroup.procs"
    procs.write_text("1\n")
    with pytest.raises(ProcessLookupError):
        Target(sleeper.pid, start_time(sleeper.pid), [str(procs)])
    procs.write_text(f"1\n{sleeper.pid}\n")
    assert Target(sleeper.pid, start_time(sleeper.pid), [str(procs)]).gid == os.getegid()


def test_the_first_one_that_can_be_is_taken(sleeper) -> None:
    started = start_time(sleeper.pid)
    order = {"targets": [[1, 7], [sleeper.pid, started]], "cgroup_procs": []}
    target = find_target(order)
    assert target.env["A"] == "b"
    with pytest.raises(ProcessLookupError):
        find_target({"targets": [[sleeper.pid, started + 1]], "cgroup_procs": []})
    with pytest.raises(ProcessLookupError):
        find_target({"targets": [], "cgroup_procs": []})


def test_limits_are_those_that_the_system_tells(sleeper) -> None:
    limits = read_limits(sleeper.pid)
    assert len(limits) == 15
    for number, limit in limits.items():
        assert limit == resource.getrlimit(number)
    assert lower_limit(resource.RLIM_INFINITY, 5) == lower_limit(5, 7) == lower_limit(9, 5) == 5


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_process_of_any_name_has_its_status(name: bytes) -> None:
    with named_process(name) as process:
        assert start_time(process.pid) > 0
        status = read_status(process.pid)
        assert status["Uid"].split() == [str(os.geteuid())] * 4
        assert status["NoNewPrivs"] == "0"
