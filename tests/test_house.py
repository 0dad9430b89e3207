"""The house: directions, sizes, and what is shipped with it."""

import ast
import errno
import gc
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from agentd.cli.agentctl.main import agentctl
from agentd.cli.agentd.main import agentd
from agentd.http.problems import STATUSES
from agentd.rpc.routes import ROUTES
from agentd.service.sd_notify import Notifier
from agentd_fleet.cli import agentd_fleet
from agentd_slurm.cli import agentctl_slurm, agentd_slurm
from code_size import class_names, modules_of
from support.needs import require

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    [
        *ROOT.glob("src/**/*.py"),
        *ROOT.glob("plugins/*/src/**/*.py"),
        *ROOT.glob("fleet/src/**/*.py"),
        *ROOT.glob("engines/*/src/**/*.py"),
    ]
)


def parsed(text: str) -> ast.Module:
    """Parse with the collector off, which can break parsing before Python 3.11.8.

    https://github.com/python/cpython/issues/106905
    """
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


def test_imports_point_one_way() -> None:
    command = [Path(sys.executable).parent / "lint-imports"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_for_and_keeps_to_its_size(path: Path) -> None:
    text = path.read_text()
    tree = parsed(text)
    assert ast.get_docstring(tree), "no module docstring"
    assert text.count("\n") <= 600
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 80, node.name


@pytest.mark.parametrize("path", [p for p in SOURCES if "plugins" in p.parts], ids=str)
def test_plugin_imports_only_the_plugin_api_of_agentd(path: Path) -> None:
    for node in ast.walk(parsed(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.partition(".")[0] != "agentd" or name == "agentd.plugin_api"


SERVICES = sorted([*ROOT.glob("src/agentd/services/*.py"), *ROOT.glob("src/agentd/rpc/*.py")])


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.stem)
def test_no_class_writes_another_s_attributes_or_shows_its_own(path: Path) -> None:
    """Attributes of a service are private, so that no other class uses them (ruff's SLF001)."""
    for node in ast.walk(parsed(path.read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []
        for target in targets:
            if isinstance(target, ast.Attribute):
                assert isinstance(target.value, ast.Name), ast.unparse(target)
                assert target.value.id == "self", f"{ast.unparse(target)} is another's"
                assert target.attr.startswith("_"), f"{ast.unparse(target)} must be private"


@pytest.mark.parametrize("path", sorted(ROOT.glob("tests/**/*.py")), ids=lambda path: path.stem)
def test_a_test_file_is_read_in_one_go(path: Path) -> None:
    assert path.read_text().count("\n") <= 600


def test_timeout_of_test_repeats() -> None:
    assert signal.getitimer(signal.ITIMER_REAL)[1] > 0


def test_there_is_no_drawer_for_odds_and_ends() -> None:
    drawers = {"utils", "helpers", "common", "base", "types", "manager"}
    assert not drawers & {path.stem for path in SOURCES}


def test_no_class_name_stands_for_two_things() -> None:
    assert [name for name, count in class_names(modules_of(ROOT)).items() if count > 1] == []


def test_no_package_has_more_than_sixteen_modules() -> None:
    modules = Counter(path.parent for path in SOURCES if path.stem != "__init__")
    assert max(modules.values()) <= 16, modules.most_common(1)


def test_architecture_page_names_files_that_exist() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    named = set(re.findall(r"[a-z_]+(?:/[a-z_*]+)+\.(?:py|toml)", page))
    folders = [ROOT / "src/agentd", ROOT / "fleet/src/agentd_fleet", ROOT]
    assert len(named) > 40
    assert [name for name in named if not any(list(at.glob(name)) for at in folders)] == []


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, f"{path} {name}")


PROGRAMS = [agentctl, agentd, agentd_fleet, agentctl_slurm, agentd_slurm]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda it: it.name)
def test_help_fits_its_line_and_every_option_has_a_text(program: click.Group) -> None:
    for path, command in commands(program, program.name or ""):
        assert len((command.help or "").split("\n")[0]) in range(1, 46), path
        options = [item for item in command.params if isinstance(item, click.Option)]
        assert [option.opts for option in options if not option.help] == [], path


UNITS = {
    "agentd": (
        "Type=notify",
        "KillMode=mixed",
        "RestartPreventExitStatus=78",
        "StartLimitBurst=",
        "StartLimitIntervalSec=",
        "SyslogIdentifier=agentd",
        "WatchdogSec=",
    ),
    "agentd-fleet-join": ("Type=notify", "RestartPreventExitStatus=78", "Wants=agentd.service"),
    "agentd-slurm": ("Type=notify", "Wants=agentd.service munge.service"),
    "agentd-fleet-gateway": ("Type=notify", "RestartPreventExitStatus=78", "WatchdogSec=60"),
}
"""Some required lines of each unit file."""
EXPOSED = 40
"""Tenths of systemd's own points that a unit may have."""
INSTALLED = "agentd is not executable: No such file or directory"
"""A message about a program that only the package has; tests/node verifies with that installed."""


def analyzed(*arguments: str, unit: str) -> subprocess.CompletedProcess[str]:
    require("systemd-analyze")
    command = ["systemd-analyze", *arguments, ROOT / "systemd" / f"{unit}.service"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_unit_file_is_looked_at() -> None:
    assert {path.stem for path in ROOT.glob("systemd/*.service")} == UNITS.keys()


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_file_is_one_that_systemd_takes(unit: str) -> None:
    done = analyzed("verify", "--man=no", unit=unit)
    said = [line for line in done.stderr.splitlines() if INSTALLED not in line]
    assert (done.stdout, said) == ("", [])
    lines = (ROOT / "systemd" / f"{unit}.service").read_text().splitlines()
    for wanted in UNITS[unit]:
        assert any(line.startswith(wanted) for line in lines), wanted


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_has_little_that_it_does_not_need(unit: str) -> None:
    done = analyzed("security", "--offline=true", f"--threshold={EXPOSED}", unit=unit)
    assert done.returncode == 0, done.stdout[-200:]


def test_a_manager_that_does_not_listen_is_no_harm(tmp_path: Path) -> None:
    Notifier({}).ready("x")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "none")}).ready("x")
    assert Notifier({"WATCHDOG_USEC": "2000000"}).watchdog_s == 2
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "deaf"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "deaf")})
        for number in range(1000):  # more than its queue takes
            notifier.status(f"{number}")
    assert Notifier({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}).watchdog_s is None


def test_a_notice_without_a_descriptor_is_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("agentd.service.sd_notify.socket.socket", refuse)
    Notifier({"NOTIFY_SOCKET": "/run/none"}).alive()


def test_every_route_code_and_command_is_documented() -> None:
    reference = ROOT / "docs" / "reference"
    rpc = (reference / "rpc.md").read_text()
    for route in ROUTES:
        path = route.path.removesuffix("/undrain")
        assert path in rpc, route.path
    for code in STATUSES:
        assert f"`{code}`" in rpc, code
    commands = (reference / "commands.md").read_text()
    for group in (agentd, agentctl):
        for name in group.commands:
            assert name in commands, name
