"""What is left behind inside containers is found by one look at each process."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from agentd.runtimes.docker import inside

NODE = "test-inside"
CONTAINERS = [f"{number:064x}" for number in range(100)]


@pytest.fixture
def marked() -> subprocess.Popen[bytes]:
    """A process that looks like a command which an earlier daemon ran."""
    env = {**os.environ, inside.MARK: NODE}
    with subprocess.Popen(["sleep", "1000"], env=env) as process:
        yield process
        process.kill()


@pytest.fixture
def reads() -> Counter[str]:
    """How often each file of /proc was opened since, by its path."""
    counted: Counter[str] = Counter()
    is_on = True

    def count(event: str, args: tuple[object, ...]) -> None:
        if is_on and event == "open" and str(args[0]).startswith("/proc/"):
            counted[str(args[0])] += 1

    sys.addaudithook(count)  # for ever: a hook cannot be taken away
    yield counted
    is_on = False


def test_each_process_is_read_once_whatever_the_number_of_containers(marked, reads) -> None:
    inside.end_left_behind(NODE, CONTAINERS)
    assert marked.poll() is None, "it is in no container of the node's"
    assert {count for path, count in reads.items() if path.startswith(f"/proc/{marked.pid}/")} == {
        1
    }
    assert max(reads.values()) == 1


def test_a_marked_process_of_a_container_is_killed(marked, monkeypatch) -> None:
    cgroup = f"/system.slice/docker-{CONTAINERS[7]}.scope"
    monkeypatch.setattr(inside, "groups_of", lambda pid: [cgroup] if pid == marked.pid else [])
    inside.end_left_behind("another-node", CONTAINERS)
    inside.end_left_behind(NODE, CONTAINERS[8:])
    assert marked.poll() is None
    inside.end_left_behind(NODE, CONTAINERS)
    assert marked.wait(10) == -9
