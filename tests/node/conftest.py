"""The virtual machines that the tests here run on, one for each worker of pytest-xdist.

The modules of a group run on one machine, in the order in which they stand.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from node import images
from node.machine import Machine, MachineError
from support.waiting import until_blocking

collect_ignore_glob = [] if os.environ.get("AGENTD_TEST_NODE") else ["test_*.py"]
"""`make test-node` sets it: the machine takes minutes, and QEMU."""
if not os.environ.get("AGENTD_SOAK"):
    collect_ignore_glob += ["test_node_reboots.py"]

LIBRARIES = "PYTHONPATH=/payload/libraries:/payload/tests"
SITE = "/opt/agentd/lib/python3.11/site-packages"
ASK = "python3 /payload/tests/node/ask.py"
"""Makes a request as another user, or on another socket; `Node.ask` is quicker."""
TOGETHER = ("test_node.py", "test_node_down.py", "test_node_reboots.py")
"""The modules of one group; the second machine has all others."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the two machines their modules."""
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue  # a hook of a conftest sees the items of all folders
        group = "first" if item.path.name in TOGETHER else "second"
        item.add_marker(pytest.mark.xdist_group(f"{group} machine"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Generator[None, None, None]:
    """Delete the kernels of a test that fails: run again, it makes them again (`--reruns`)."""
    node: Node | None = item.funcargs.get("node")
    if node is None:
        return (yield)
    node.created.clear()
    try:
        yield
    except BaseException:
        for kernel_id in node.created:
            with contextlib.suppress(OSError, MachineError):
                node.machine.request("DELETE", f"/v1/kernels/{kernel_id}?timeout=0", "", 30)
        raise


class Node:
    """agentd on the machine, as its operators and callers use it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.must, self.run = machine.must, machine.run
        self.created: list[str] = []
        """The kernels that the current test created."""

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Make a request on the main socket; return the status and the JSON of the answer."""
        given = "" if body is None else json.dumps(body)
        status, content = self.machine.request(method, path, given, 120)
        assert status, content
        try:
            return status, json.loads(content)
        except ValueError:
            return status, content

    def create(self, kernel_id: str, *command: str, agent: str = "team-a", **body: Any) -> Any:
        """Create a kernel, which has to succeed."""
        body.setdefault("slots", {"cpu": 0, "mem": "32m"})
        body |= {"kernel_id": kernel_id, "command": list(command)}
        self.created.append(kernel_id)
        status, content = self.ask("POST", f"/v1/agents/{agent}/kernels", body)
        assert status == 201, content
        return content

    def kernel(self, kernel_id: str) -> Any:
        """Return a kernel as it is shown."""
        status, content = self.ask("GET", f"/v1/kernels/{kernel_id}")
        assert status == 200, content
        return content

    def until(self, kernel_id: str, state: str, within_s: float = 60) -> Any:
        """Wait until a kernel is in a state; return it."""
        return until_blocking(
            lambda: self.kernel(kernel_id),
            lambda kernel: kernel["state"] == state,
            text=f"kernel {kernel_id} is {state}",
            within_s=within_s,
            every_s=0.2,  # an answer costs the one processor that the kernel waits for
        )

    def logs(self, kernel_id: str, query: str = "") -> str:
        """Return what a kernel printed."""
        status, content = self.ask("GET", f"/v1/kernels/{kernel_id}/logs{query}")
        assert status == 200, content
        return str(content).rstrip("\n")

    def printed(self, kernel_id: str, *command: str, **body: Any) -> str:
        """Run a command as a kernel to its end, and return what it printed."""
        self.create(kernel_id, *command, **body)
        self.until(kernel_id, "terminated")
        text = self.logs(kernel_id)
        self.remove(kernel_id)
        return text

    def remove(self, *kernels: str) -> None:
        """Delete kernels."""
        for kernel_id in kernels:
            status, content = self.ask("DELETE", f"/v1/kernels/{kernel_id}?timeout=0")
            assert status == 204, content

    def configure(self, text: str) -> None:
        """Replace the configuration and restart the daemon; keep one that runs with this text."""
        write = f"printf %s {shlex.quote(text)}"
        same = self.run(f"{write} | cmp -s - /etc/agentd/agent.toml && systemctl is-active agentd")
        if same.status:
            self.must(f"{write} >/etc/agentd/agent.toml; systemctl restart agentd", 300)

    def passed(self, tests: str, timeout_s: float) -> str:
        """Run tests of this repository on the machine, which must pass; return their output.

        They find the simulated devices, which the package does not have.
        """
        self.must("cp -r /payload/pyproject.toml /payload/tests /tmp/")
        self.must(f"python3 -m zipfile -e /payload/agentd_plugin_sim-*.whl {SITE}")
        done = self.run(
            f"cd /tmp && AGENTD_SEED={os.environ['AGENTD_SEED']} AGENTD_TEST_READY_S=150"
            f" {LIBRARIES} /opt/agentd/bin/python -m pytest {tests}"
            " -p no:hypothesispytest 2>&1 | tail -60",
            timeout_s,
        )
        self.must(f"rm -r {SITE}/agentd_plugin_sim*")
        summary = done.output.splitlines()[-1]
        assert " passed" in summary, done.output
        assert not re.search("failed|error", summary), done.output
        return done.output

    def findings(self) -> list[Any]:
        """Return the checks of the node that found something."""
        checks = self.ask("GET", "/v1/node?check=true")[1]["checks"]
        return [check for check in checks if check["findings"]]

    def restarts(self) -> str:
        """Return how often systemd has restarted agentd."""
        return self.must("systemctl show agentd -p NRestarts --value").strip()

    def unit(self, kernel_id: str) -> str:
        """Return the unit of a kernel."""
        listed = self.must(
            f"systemctl list-units --all --plain --no-legend 'agentd-*-{kernel_id}.service'"
        )
        return listed.split()[0]

    def main_pid(self, kernel_id: str) -> str:
        """Return the main process of a kernel's unit, "0" if there is none."""
        shown = self.must(f"systemctl show {self.unit(kernel_id)} -p MainPID --value")
        return shown.strip()


def until_ready(node: Node, within_s: float = 120) -> None:
    until_blocking(
        lambda: node.machine.request("GET", "/readyz", "", 30),
        lambda answer: answer[0] == 200,
        within_s=within_s,
    )


CONFIG = """
[node]
runtime = "{runtime}"
[[agents]]
id = "team-a"
[[agents]]
id = "team-b"
[plugins]
allow = ["generic"]
[plugins.tpu]
plugin = "generic"
devices = ["/dev/tpu*"]
"""
"""Other plugins than that of its devices would only make each start slower."""


@pytest.fixture(scope="session")
def machine() -> Iterator[Machine]:
    """A machine that has booted, with the package installed and nothing configured.

    For who works on these tests: $AGENTD_NODE_FOLDER is one that `python -m node boot` made.
    """
    if (running := os.environ.get("AGENTD_NODE_FOLDER")) is not None:
        yield images.machine(Path(running))
        return
    folder = Path(tempfile.mkdtemp(prefix="agentd-node-", dir="/var/tmp"))
    made = images.machine(folder)
    try:
        images.start_installed(made)
        yield made
    finally:
        made.pull_plug()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def node(machine: Machine) -> Node:
    """The machine as agentd's, with the device files of two accelerators."""
    made = Node(machine)
    for number, minor in enumerate((229, 200)):
        made.must(f"test -e /dev/tpu{number} || mknod -m 666 /dev/tpu{number} c 10 {minor}")
    return made
