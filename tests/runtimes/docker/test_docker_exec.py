"""Commands left behind in containers are found by one read of each process."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from agentd.core.kernel.exec_spec import ExecSpec
from agentd.errors import CommandNotFound
from agentd.runtimes.docker import docker_exec

NODE = "test-inside"
CONTAINERS = [f"{number:064x}" for number in range(100)]


@pytest.fixture
def marked() -> subprocess.Popen[bytes]:
    """A process that looks like a command which an earlier daemon ran."""
    env = {**os.environ, docker_exec.MARK: NODE}
    with subprocess.Popen(["sleep", "1000"], env=env) as process:
        yield process
        process.kill()


@pytest.fixture
def reads() -> Counter[str]:
    """Return how often each file of /proc was opened, by path."""
    counted: Counter[str] = Counter()
    is_on = True

    def count(event: str, args: tuple[object, ...]) -> None:
        if is_on and event == "open" and str(args[0]).startswith("/proc/"):
            counted[str(args[0])] += 1

    sys.addaudithook(count)  # for ever: a hook cannot be taken away
    yield counted
    is_on = False


def test_exec_sweep_reads_each_process_once(marked, reads) -> None:
    docker_exec.kill_orphaned_execs(NODE, CONTAINERS)
    assert marked.poll() is None, "it is in no container of the node's"
    assert {count for path, count in reads.items() if path.startswith(f"/proc/{marked.pid}/")} == {
        1
    }
    assert max(reads.values()) == 1


def test_a_marked_process_of_a_container_is_killed(marked, monkeypatch) -> None:
    cgroup = f"/system.slice/docker-{CONTAINERS[7]}.scope"
    monkeypatch.setattr(
        docker_exec, "read_cgroups", lambda pid: [cgroup] if pid == marked.pid else []
    )
    docker_exec.kill_orphaned_execs("another-node", CONTAINERS)
    docker_exec.kill_orphaned_execs(NODE, CONTAINERS[8:])
    assert marked.poll() is None
    docker_exec.kill_orphaned_execs(NODE, CONTAINERS)
    assert marked.wait(10) == -9


class Engine:
    """An engine that answers every call with what it was given."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.asked: list[str] = []

    async def call(self, method: str, path: str, *_: object) -> object:
        self.asked.append(f"{method} {path}")
        return self.answer


async def test_an_engine_s_reason_for_no_process_is_cut(monkeypatch) -> None:
    session = docker_exec.DockerExec(Engine({"ExitCode": 126}), CONTAINERS[0], ExecSpec(("sh",)))
    session._reader.feed_data((b"\2\0\0\0" + (1 << 20).to_bytes(4, "big") + b"x" * (1 << 20)) * 4)
    session._reader.feed_eof()
    refused = await session._start_error(126)
    assert isinstance(refused, CommandNotFound)
    assert len(str(refused)) < 1200
