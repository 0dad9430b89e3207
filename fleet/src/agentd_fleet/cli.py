"""The commands of `agentd-fleet`: the gateway, and the publisher of a node."""

from __future__ import annotations

import asyncio
import os
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
    """Print the settings for a reload of `join`."""
    click.echo(_read_join_options(config_file, refuses_expired=True))


def _read_join_options(config_file: str | None, *, refuses_expired: bool = False) -> bytes:
    """Return the settings of a publisher as JSON; end if they are unusable."""
    import msgspec

    from agentd.http.credentials import expiry_problems, key_pair_weaknesses
    from agentd_fleet.credentials import etcd_credentials
    from agentd_fleet.join.options import JoinOptions
    from agentd_fleet.settings import load

    try:
        settings = load(config_file)
        fleet = settings.fleet
        if not fleet.etcd:
            raise ConfigRefused([Problem("fleet.etcd", "missing: expected the addresses of etcd")])
        values = {**fleet.model_dump(mode="json"), **settings.join.model_dump(mode="json")}
        options = msgspec.convert({**values, "config": config_file}, JoinOptions)
        options = msgspec.structs.replace(
            options,
            changed_at=options.read_times(),
            password=etcd_credentials(fleet).password,
            weaknesses=tuple(key_pair_weaknesses(fleet.cert, fleet.key)),
        )
        if refuses_expired and (expired := expiry_problems("fleet.cert", fleet.cert, fleet.key)):
            raise ConfigRefused(expired)
    except AgentdError as error:
        _end_refused(error)
    return msgspec.json.encode(options)


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
