"""Every command of the pages for operators is run, as it stands there, on the node."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.conftest import CONFIG, Node
from node.machine import Machine

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "how-to/run-a-node.md",
    "operations/hardening.md",
    "operations/troubleshoot.md",
    "operations/upgrade.md",
)
PROGRAMS = (
    "agentctl", "agentd", "systemctl", "journalctl", "systemd-cgls", "systemd-cgtop",
    "loginctl", "dpkg", "adduser", "python3", "stdbuf", "make",
)  # fmt: skip
MEANT = {
    "agentd_NEW.deb": "/payload/agentd_*.deb",
    "cuda0": "tpu0",
    "retry NAME": "retry tpu",
    "-AGENT": "-team-a",
    "run AGENT --id k1": "run team-a --id runs",
    "YOU": "mallory",
    "USER": "mallory",
    "my_plugin.whl": "/tmp/my_plugin-1-py3-none-any.whl",
    "systemd-cgtop": "systemd-cgtop --batch --iterations=1",
    "agentctl create … --dry-run": "agentctl create team-a -s mem=16m --dry-run -- sleep 1",
    "-f ": "",
}
"""Replacements for values of this node."""
ELSEWHERE = (
    "make deb && apt install", "systemctl reboot", "dpkg --purge agentd", "systemctl --user",
    "systemctl restart",
)  # fmt: skip
"""Run by other tests, which look at what comes of them."""
MENTIONED = (
    "agentctl forget", "agentctl release", "agentctl rm", "agentctl run", "agentctl stop",
    "agentd config init", "make test-node",
    "stdbuf -oL", "systemctl edit", "systemctl stop",
)  # fmt: skip
"""Names of commands, without what they need."""
EXPECTED = {
    "agentctl doctor": {0, 1},
    "agentctl plugins retry tpu": {0, 1},
    "agentctl forget tpu0": {1},
    "systemctl status docker dbus": {0, 3},
}
"""Exit statuses other than 0: findings; a plugin that is ready; a device that is there; a unit
that is not running."""


def commands() -> Iterator[str]:
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        for block in re.findall(r"```console node\n(.*?)```", text, re.DOTALL):
            for line in block.split("\n"):
                if command := line.strip().removeprefix("# "):
                    yield re.split(r"\s{2,}", command)[0]
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for code in re.findall(r"`([^`\n]+)`", prose):
            if code.split()[0] in PROGRAMS and " " in code:
                yield code


def meaning(command: str) -> str:
    """Return the command for this node."""
    for said, here in MEANT.items():
        command = command.replace(said, here)
    return command.strip()


COMMANDS = sorted(
    {meaning(command): command for command in sorted({*commands()} - {*MENTIONED})}.values()
)
"""One of those that mean the same here: the last, the same in each worker of pytest."""


def test_pages_have_commands() -> None:
    assert len(COMMANDS) > 25


@pytest.fixture(scope="module")
def prepared(machine: Machine, node: Node) -> Node:
    """The node with what the pages speak of: a user, a kernel, a plugin of one's own."""
    node.configure(CONFIG.format(runtime="systemd"))
    machine.must("id mallory || useradd --create-home mallory")
    wheel = (
        "import zipfile; w = zipfile.ZipFile('/tmp/my_plugin-1-py3-none-any.whl', 'w');"
        "i = 'my_plugin-1.dist-info/';"
        "w.writestr(i + 'METADATA', 'Metadata-Version: 2.1\\nName: my-plugin\\nVersion: 1\\n');"
        "w.writestr(i + 'WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any');"
        "w.writestr(i + 'RECORD', ''); w.close()"
    )
    node.must(f'python3 -c "{wheel}"')
    node.create("k1", "sleep", "9999")
    return node


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_pages_works(prepared: Node, command: str) -> None:
    if command.startswith(ELSEWHERE):
        return
    meant = meaning(command)
    done = prepared.machine.run(meant, timeout_s=300)
    assert done.status in EXPECTED.get(meant, {0}), f"{meant}: {done.status}\n{done.output}"
    assert "Traceback" not in done.output


def test_the_node_is_as_it_was(prepared: Node) -> None:
    prepared.must("systemctl start agentd.socket; loginctl disable-linger mallory")
    prepared.configure(CONFIG.format(runtime="systemd"))
    prepared.must("agentctl undrain tpu0")
    assert prepared.kernel("k1")["state"] == "running"
    prepared.remove("k1", "runs")
