"""Whether kernels outlive a logout, as logind says: no name of the user is looked up for it."""

import pwd
from pathlib import Path

import pytest

from agentd.host.systemd.availability import is_lingering

LOGINS = {
    "lingers": ("echo yes", True),
    "does not": ("echo no", False),
    "is not logged in": ("echo 'User ID 4711 is not logged in or lingering' >&2; exit 1", False),
    "logind does not answer": ("echo 'Failed to connect to bus' >&2; exit 1", False),
    "no logind": (None, False),
}


@pytest.mark.parametrize(("script", "lingers"), LOGINS.values(), ids=LOGINS)
def test_lingering_is_told_by_logind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, lingers: bool
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.setattr(pwd, "getpwuid", pytest.fail)
    if script is not None:
        program = tmp_path / "loginctl"
        wanted = "show-user 4711 --property=Linger --value"
        program.write_text(f'#!/bin/sh\n[ "$*" = "{wanted}" ] || exit 9\n{script}\n')
        program.chmod(0o755)
    assert is_lingering(4711) is lingers
