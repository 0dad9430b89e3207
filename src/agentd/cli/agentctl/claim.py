"""The commands `agentctl claim`, `claims`, `renew` and `release`: devices for other engines."""

from __future__ import annotations

import os
import pwd
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import click

from agentd.cli.agentctl import completion
from agentd.cli.agentctl.options import (
    CommandLine,
    device_cell,
    device_option,
    given_members,
    pairs,
    remove_each,
    slot_option,
    suggesting_agents,
)
from agentd.cli.output import client_command, print_answer, print_text
from agentd.client import Client
from agentd.procfs import read_lines
from agentd.program.exit_status import ExitStatus
from agentd.program.process import python_command

_SCOPE = "AGENTCTL_SCOPE"
"""Names the scope of systemd that this process was moved into; not passed on."""
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores from its start; the command, which would inherit that, needs them."""
CLAIM_COLUMNS = ["claim", "agent", "state", "slots", "devices", "holder", "age"]


@click.command(cls=CommandLine)
@click.argument("agent", shell_complete=completion.agents)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--id", "claim_id", help="Id of the claim. Default: a generated one.")
@slot_option
@device_option
@click.option("--label", multiple=True, metavar="NAME=VALUE", help="Label of the claim.")
@click.option("--scope", is_flag=True, help="Use a systemd scope, which includes children.")
@click.option("--user", metavar="NAME", help="User to run COMMAND as (root only).")
@click.pass_obj
def claim(
    client: Client,
    /,
    agent: str,
    command: Sequence[str],
    claim_id: str | None,
    label: Sequence[str],
    scope: bool,
    user: str | None,
    **options: Any,
) -> None:
    """Run a command on claimed devices.

    Options end at the first word of COMMAND, which replaces this process and finds its devices in
    its environment. The claim ends with the process; with --scope, with the last process that it
    started. With --user, that user owns the claim and can release it.

    Exit status: the command's; 1 the claim was refused, 127 the command cannot be executed.

    \b
    agentctl claim agent-1 -s cuda.device=1 -- jupyter lab
    agentctl claim agent-1 --scope -s cuda.device=4 -- ray start --block
    agentctl claim agent-1 --scope --user ada -s cuda.device=1 -- jupyter lab
    """
    account = None if user is None else _find_account(user)
    unit = os.environ.pop(_SCOPE, "")
    if scope and not unit:
        _enter_scope()
    body: dict[str, Any] = {
        **given_members(options),
        "labels": pairs(label),
        "holder": {"cgroup": _own_cgroup()} if scope else {"pid": os.getpid()},
    }
    if claim_id is not None:
        body["claim_id"] = claim_id
    if account is not None:
        body["owner_uid"] = account.pw_uid
    with suggesting_agents(client, agent):
        new_claim = client.create_claim(agent, body)
    claim_env = {"AGENTD_CLAIM": new_claim["claim_id"], "AGENTD_AGENT": agent}
    _execute(command, {**os.environ, **new_claim["edits"]["env"], **claim_env}, account)


def _find_account(user: str) -> pwd.struct_passwd:
    """Return a user's entry.

    Raises:
        ClickException: there is none, or this process may not become another user.
    """
    if os.geteuid() != 0:
        raise click.ClickException("--user needs root")
    with suppress(KeyError, ValueError):
        return pwd.getpwnam(user)
    raise click.ClickException(f"unknown user {user!r}")


def _become(account: pwd.struct_passwd, env: Mapping[str, str]) -> dict[str, str]:
    """Take a user's ids and groups, and return the environment with the user's own variables.

    The working directory stays unless the user may not enter it.
    """
    os.initgroups(account.pw_name, account.pw_gid)
    os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
    os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    for folder in (os.getcwd, lambda: account.pw_dir, lambda: "/"):
        with suppress(OSError):
            os.chdir(folder())
            break
    name, shell = account.pw_name, account.pw_shell or "/bin/sh"
    own = {"HOME": account.pw_dir, "USER": name, "LOGNAME": name, "SHELL": shell}
    return {key: value for key, value in env.items() if not key.startswith("XDG_")} | own


def _execute(
    command: Sequence[str], env: Mapping[str, str], account: pwd.struct_passwd | None = None
) -> None:
    for number in IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        env = _become(account, env) if account else env
        os.execvpe(command[0], list(command), env)  # noqa: S606 - the caller's own command
    except (OSError, ValueError) as error:
        print_text(f"agentctl: cannot execute {command[0]}: {error}", err=True)
        sys.exit(ExitStatus.NOT_FOUND)


def _enter_scope() -> None:
    """Execute this command again in a transient scope of systemd."""
    unit = f"agentd-claim-{uuid.uuid4().hex[:12]}.scope"
    entry = "from agentd.cli.agentctl.main import agentctl; agentctl(prog_name='agentctl')"
    program = [*python_command(), "-c", entry, *sys.argv[1:]]
    command = ["systemd-run", "--scope", "--quiet", "--collect", f"--unit={unit}", "--", *program]
    _execute(command, {**os.environ, _SCOPE: unit})


def _own_cgroup() -> str:
    """Return this process's cgroup of version 2.

    Raises:
        ClickException: it has none.
    """
    lines = read_lines("/proc/self/cgroup")
    cgroup = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    if cgroup == "/":
        raise click.ClickException("no cgroup of version 2: this host has none, or no systemd")
    return cgroup


@click.command()
@click.option("--agent", help="Only claims of this agent.", shell_complete=completion.agents)
@click.option(
    "--label", "-l", multiple=True, metavar="KEY=VALUE", help="Only claims with this label."
)
@client_command
def claims(client: Client, agent: str | None, label: Sequence[str]) -> None:
    """List the claims."""
    rows = client.claims(agent, labels=pairs(label))
    print_answer(rows, CLAIM_COLUMNS, claim_row, wide=["labels", "created_by", "expires_at"])


def claim_row(claim: Mapping[str, Any]) -> dict[str, Any]:
    """Return a claim with its columns for people."""
    from agentd.cli.tables import format_age

    holder = next(
        f"{kind} {claim['holder'][kind]}"
        for kind in ("pid", "cgroup", "ttl", "name")
        if kind in claim["holder"]
    )
    return {
        **claim,
        "claim": claim["claim_id"],
        "agent": claim["agent_id"],
        "devices": device_cell(claim["allocation"]),
        "holder": holder,
        "age": format_age(claim["created_at"]),
    }


@click.command()
@click.argument("claim", shell_complete=completion.claims)
@click.option("--ttl", type=click.IntRange(min=1), help="Seconds; default: the time it had.")
@client_command
def renew(client: Client, claim: str, ttl: int | None) -> None:
    """Restart the time limit of a claim."""
    print_answer(client.renew_claim(claim, ttl), [*CLAIM_COLUMNS, "expires_at"], claim_row)


@click.command()
@click.argument("claims", nargs=-1, required=True, shell_complete=completion.claims)
@client_command
def release(client: Client, claims: Sequence[str]) -> None:
    """Release claims."""
    remove_each(claims, client.release_claim)
