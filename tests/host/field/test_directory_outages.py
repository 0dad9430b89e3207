"""A directory of users that fails: only a "not found" of each source makes a name unknown."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from native.libraries import built

WALK = """
import asyncio, json, os, pathlib, sys
from agentd.config.settings import Settings
from agentd.daemon.host_names import ALL_EVERY, HostNames

folder, number = pathlib.Path(os.environ["DIRECTORY"]), sys.argv[1]
users = [{"id": "ldap", "user": "team-ldap", "allowed-groups": ["ldap-a"]},
         {"id": "local", "user": "daemon"}]
settings = Settings.model_validate({"node": {"runtime": "process"}, "agents": users})

def shown(names):
    accounts = [getattr(names.accounts.own[agent], "groups", None) for agent in ("ldap", "local")]
    return [*accounts, names.group_id("ldap-a"), sorted(names.problems)]

async def walk():
    down, names, steps = folder / "down", HostNames(settings), {}
    await names.refresh(settings)
    steps["start"] = shown(names)
    down.write_text(number)
    await names.refresh(settings)
    steps["reload in the outage"] = shown(names)
    for _ in range(ALL_EVERY):
        await names.look_again()
    steps["looks in the outage"] = shown(names)
    late = HostNames(settings)
    await late.refresh(settings)
    steps["start in the outage"] = shown(late)
    down.unlink()
    for _ in range(ALL_EVERY):
        await late.look_again()
    steps["looks after that"] = shown(late)
    (folder / "empty").touch()
    await names.refresh(settings)
    steps["reload after a removal"] = shown(names)
    print(json.dumps(steps))

asyncio.run(walk())
"""
EVERYTHING = [[1, 5001, 5002], [1, 5001, 5002], 5001, []]
UNANSWERED = ["agents.0.allowed-groups.0", "agents.0.user"]
PRIVATE = 'mount --bind "$1" /etc/nsswitch.conf && shift && exec "$@"'
"""Runs a command on a host whose name service has other sources."""


@pytest.mark.needs("root", "gcc")
@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESRCH, errno.ECONNREFUSED, errno.EAGAIN])
@pytest.mark.parametrize("sources", ["files directory", "directory [NOTFOUND=continue] files"])
def test_outage_of_a_directory_forgets_no_name(tmp_path: Path, sources: str, number: int) -> None:
    """The numbers are those of nslcd and sssd that do not run; the last source may answer."""
    library = built("nss_directory.c", tmp_path / "libnss_directory.so.2")
    configuration = tmp_path / "nsswitch.conf"
    configuration.write_text(f"passwd: {sources}\ngroup: {sources}\n")
    command = ["unshare", "--mount", "sh", "-c", PRIVATE, "sh", configuration]
    environ = {**os.environ, "DIRECTORY": str(tmp_path), "LD_LIBRARY_PATH": str(library.parent)}
    command += [sys.executable, "-c", WALK, str(number)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "start": EVERYTHING,
        "reload in the outage": [*EVERYTHING[:3], [*UNANSWERED, "agents.1.user"]],
        "looks in the outage": [*EVERYTHING[:3], [*UNANSWERED, "agents.1.user"]],
        "start in the outage": [None, [1], None, UNANSWERED],
        "looks after that": EVERYTHING,
        "reload after a removal": [None, [1], None, UNANSWERED],
    }
