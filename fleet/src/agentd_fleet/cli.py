"""The commands of `agentd-fleet`: the gateway, and the publisher of a node."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from functools import partial

import click

from agentd import __version__, log, stderr
from agentd.errors import AgentdError, ConfigRefused, Problem
from agentd.program.command_line import Program
from agentd.program.exit_status import exit_refused
from agentd.program.process import prepare_daemon, python_command

config_option = click.option(
    "--config",
    "config_file",
    metavar="FILE",
    help="Default: $AGENTD_FLEET_CONFIG, else /etc/agentd/fleet.toml.",
)


@click.group("agentd-fleet", cls=Program)
@click.version_option(__version__, prog_name="agentd-fleet")
def agentd_fleet() -> None:
    """Run many nodes of agentd as one fleet.

    Exit status: 0 done, 1 cannot run on this host, 2 wrong usage, 78 unusable configuration.
    """
    os.umask(os.umask(0o777) | 0o022)  # no other user may write to the folders of a path


_end_refused = partial(exit_refused, "agentd-fleet")


@agentd_fleet.command()
@config_option
def gateway(config_file: str | None) -> None:
    """Serve the fleet in the foreground."""
    stderr.guard()
    prepare_daemon()
    from agentd_fleet.daemon import GatewayDaemon
    from agentd_fleet.settings import load

    log.configure()
    try:
        settings = load(config_file)

        async def daemon() -> None:
            await GatewayDaemon(settings, lambda: load(config_file)).run()

        asyncio.run(daemon())
    except AgentdError as error:
        _end_refused(error)


@agentd_fleet.command()
@config_option
def join(config_file: str | None) -> None:
    """Publish this host's node to the fleet.

    The node stays published while this command runs.
    """
    stderr.guard()
    program = python_command()
    descriptor = os.memfd_create("join", 0)
    os.write(descriptor, _read_join_options(config_file))
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.execv(  # noqa: S606 - what read the settings takes 15 MiB that a publisher does not need
        program[0], [*program, "-m", "agentd_fleet.join.publisher", str(descriptor)]
    )


@agentd_fleet.command("join-options", hidden=True)
@config_option
def join_options(config_file: str | None) -> None:
    """Print the settings for a reload of `join`, whose options in force are the input."""
    click.echo(_read_join_options(config_file, sys.stdin.buffer.read()))


def _read_join_options(config_file: str | None, in_force: bytes = b"") -> bytes:
    """Return the settings of a publisher as JSON.

    If any are unusable, those in force stay, with the reason; without options in force it ends.
    """
    import msgspec

    from agentd.http.credentials import expiry_problems, key_pair_weaknesses
    from agentd_fleet.credentials import read_etcd_password, read_tls
    from agentd_fleet.join.options import JoinOptions
    from agentd_fleet.settings import FleetSettings, load

    previous = msgspec.json.decode(in_force, type=JoinOptions) if in_force else None
    refused: dict[str, str] = {}

    def refuse(part: str, error: AgentdError) -> JoinOptions:
        if previous is None:
            _end_refused(error)
        refused[part] = str(error)
        return previous

    try:
        settings = load(config_file)
        fleet = settings.fleet
        if not fleet.etcd:
            raise ConfigRefused([Problem("fleet.etcd", "missing: expected the addresses of etcd")])
        values = {**fleet.model_dump(mode="json"), **settings.join.model_dump(mode="json")}
        options = msgspec.convert({**values, "config": config_file}, JoinOptions)
    except AgentdError as error:
        options = refuse("settings", error)
        values = {name: getattr(options, name, ()) for name in FleetSettings.model_fields}
        fleet = FleetSettings.model_validate(values, by_name=True)
    changed_at = options.read_times()
    login, unread = {"etcd_user": fleet.etcd_user}, []
    try:
        login["password"] = read_etcd_password(fleet)
    except AgentdError as error:
        old = refuse("password", error)
        login = {
            name: getattr(old, name) for name in ("etcd_user", "password", "etcd_password_file")
        }
        unread.append(options.etcd_password_file)
    try:
        if previous and (expired := expiry_problems("fleet.cert", fleet.cert, fleet.key)):
            raise ConfigRefused(expired)
        read_tls(fleet)
    except AgentdError as error:
        refuse("tls", error)
        unread += options.tls_files
    if previous is not None:  # unread files count as changed, so they are read again
        changed_at |= {file: previous.changed_at.get(file, -1) for file in unread if file}
    weaknesses = tuple(key_pair_weaknesses(fleet.cert, fleet.key))
    values = {**login, "changed_at": changed_at, "refused": refused, "weaknesses": weaknesses}
    return msgspec.json.encode(msgspec.structs.replace(options, **values))


@agentd_fleet.command("check-config")
@config_option
def check_config(config_file: str | None) -> None:
    """Check the configuration without running."""
    from agentd_fleet.credentials import credential_weaknesses, refuse_unusable
    from agentd_fleet.settings import load

    try:
        settings = load(config_file)
        refuse_unusable(settings)
    except AgentdError as error:
        _end_refused(error)
    for weakness in credential_weaknesses(settings):
        if weakness.holds_at(time.time()):
            click.echo(f"agentd-fleet: warning: {weakness.text}", err=True)
    click.echo("configuration OK")
