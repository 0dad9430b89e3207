"""The check of devices on real hardware, on device files that can really be opened."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.daemon import AGENTS, Daemon
from support.engine import Engine

SCRIPT = Path(__file__).with_name("hardware_check.py")
pytestmark = pytest.mark.needs("root")


class Node:
    """A node with two device files and a configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for number in range(2):
            os.mknod(folder / f"acc{number}", 0o666 | 0o020000, os.makedev(1, 3))
            (folder / f"acc{number}").chmod(0o666)
        self.configure()

    def configure(self, engine: str = "/nowhere", more: str = "") -> None:
        (self.folder / "agent.toml").write_text(
            f'[runtime.docker]\nsocket = "{engine}"\n'
            f'[plugins.acc]\nplugin = "generic"\ndevices = ["{self.folder}/acc*"]\n{more}'
        )

    def check(self, *options: str) -> subprocess.CompletedProcess[str]:
        config = ["--config", str(self.folder / "agent.toml")]
        return subprocess.run(
            [sys.executable, str(SCRIPT), "acc", *config, *options],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "AGENTD_RUN_DIR": str(self.folder / "run")},
        )

    def rows(self, *options: str) -> dict[str, dict]:
        found = json.loads(self.check("--json", *options).stdout)
        return {row["check"]: row for row in found}


@pytest.fixture
def node(folder: Path) -> Node:
    return Node(folder)


def test_each_device_is_given_to_a_real_kernel(node: Node) -> None:
    result = node.check()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "| acc0 | " in result.stdout
    for number in range(2):
        line = f"| a kernel with acc{number} runs (process) | yes | opened {node.folder}/acc"
        assert line in result.stdout
    assert "plain processes are not kept from device files" in result.stdout
    assert "devices in containers | not tried | name an image with --image" in result.stdout


def test_probe_decides_whether_a_device_works(node: Node) -> None:
    sees = 'test -n "$ACC"'
    node.configure(more='env = { ACC = "{ids}" }\n')
    good = node.rows("--probe", sees)
    assert all(row["passed"] for row in good.values()), good
    other = node.rows("--probe", "echo acc1; true")
    hidden = other["what a kernel without devices sees (process)"]
    assert (hidden["passed"], "acc1" in hidden["detail"]) == (False, True)
    assert not other["a kernel with acc0 runs (process)"]["passed"]
    assert other["a kernel with acc1 runs (process)"]["passed"]
    never = node.rows("--probe", "echo broken; exit 3")
    given = never["a kernel with acc0 runs (process)"]
    assert (given["passed"], given["detail"]) == (False, "it ended with 3: " + given["detail"][17:])
    assert "broken" in given["detail"]


async def test_devices_that_a_daemon_serves_are_not_tried_beside_it(node: Node) -> None:
    (node.folder / "other").mkdir()
    other = Daemon(node.folder / "other", "process")
    try:
        table = f'[plugins.acc]\nplugin = "generic"\ndevices = ["{node.folder}/acc*"]\n'
        other.run_folder = node.folder / "run"
        await other.start(AGENTS + table)
        rows = await asyncio.to_thread(node.rows)
    finally:
        await other.close()
    assert "withheld: served by agentd test-other" in rows["acc0 can be given (process)"]["detail"]


def test_a_daemon_that_does_not_start_is_a_finding(node: Node) -> None:
    node.configure(more="required-version = 1\n")
    rows = node.rows()
    assert "unknown key" in rows["a daemon serves it (process)"]["detail"]


@pytest.mark.docker
def test_containers_have_what_they_were_given_and_nothing_else(node: Node, engine: Engine) -> None:
    node.configure(str(engine.socket))
    rows = node.rows("--image", "agentd-test:1")
    assert all(row["passed"] for row in rows.values()), rows
    assert rows["a kernel with acc1 runs (docker)"]["detail"] == f"opened {node.folder}/acc1"
    assert rows["what a kernel without devices sees (docker)"]["detail"] == ""
    assert engine.containers() == []
