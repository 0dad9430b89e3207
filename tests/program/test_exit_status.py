"""One table of exit statuses: of the code, the reference and the man pages."""

import importlib.util
from pathlib import Path
from types import ModuleType

import click

from agentd.cli.agentctl.main import agentctl
from agentd.cli.agentd.main import agentd
from agentd.program.exit_status import MEANINGS, ExitStatus
from agentd_fleet.cli import agentd_fleet

ROOT = Path(__file__).parents[2]
PROGRAMS: dict[str, click.Command] = {
    "agentd": agentd,
    "agentctl": agentctl,
    "agentd-fleet": agentd_fleet,
}


def module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_every_status_has_a_meaning() -> None:
    assert {row.status for row in MEANINGS} == {*ExitStatus, None}
    assert len({(row.commands, row.status) for row in MEANINGS}) == len(MEANINGS)


def test_every_command_of_a_meaning_exists() -> None:
    for row in MEANINGS:
        for path in row.commands:
            program, *words = path.split()
            command = PROGRAMS[program]
            for word in words:
                assert isinstance(command, click.Group), path
                command = command.commands[word]


def test_man_page_has_the_statuses_of_its_program() -> None:
    manual = module("packaging/manual.py")
    of_agentctl, of_agentd = manual.exit_status("agentctl"), manual.exit_status("agentd")
    assert "agentctl wait: The wait timed out." in of_agentctl
    assert "78" not in of_agentctl
    assert "The configuration was refused" in of_agentd
    assert "wait" not in of_agentd
