"""The commands `agentd …`: run the daemon, and look at a configuration without running it.

Exit status: 0 done, 1 it cannot run here, 2 wrong usage, 78 the configuration cannot be
used (EX_CONFIG of sysexits.h).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from msgspec.structs import asdict

from agentd import __version__, failpoints
from agentd.cli.output import say
from agentd.errors import AgentdError, ConfigRefused, DaemonFailed, Problem, StartRefused
from agentd.service.exit_status import end_refused, print_problems
from agentd.tomlfile.regular_files import UnusableFile, read_regular

_T = TypeVar("_T")

config_option = click.option(
    "--config",
    "config_file",
    metavar="FILE",
    help="Default: $AGENTD_CONFIG, else /etc/agentd/agent.toml, else the defaults.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
@click.version_option(__version__, prog_name="agentd")
def agentd() -> None:
    """Divide a node's devices among its agents."""


_refused = partial(end_refused, "agentd")


def _settings(config_file: str | None) -> Any:
    from agentd.config.loading import find_config, load

    try:
        return load(find_config(config_file, os.environ))
    except ConfigRefused as error:
        _refused(error)


def _log_from(level: str) -> None:
    from agentd import log

    log.configure(level)


def _run(work: Coroutine[Any, Any, _T], source: str) -> _T:
    import asyncio

    try:
        return asyncio.run(work)
    except (ConfigRefused, DaemonFailed, StartRefused) as error:
        _refused(error, source)


@agentd.command()
@config_option
@click.option(
    "--log-level",
    help="Default: node.log-level.",
    type=click.Choice(["debug", "info", "warning", "error"]),
)
def run(config_file: str | None, log_level: str | None) -> None:
    """Run the daemon in the foreground."""
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type] # see docs/adr/0019
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it asks for a reload, and never ends a daemon
    loaded = _settings(config_file)
    try:
        failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
    except ValueError as error:
        _refused(ConfigRefused([Problem(failpoints.VARIABLE, str(error))]))
    _log_from(log_level or loaded.settings.node.log_level)
    from agentd.daemon.lifecycle import Daemon

    async def daemon() -> None:
        await Daemon(loaded).run()

    _run(daemon(), loaded.source)


@agentd.command()
@config_option
def reload(config_file: str | None) -> None:
    """Reload the configuration of the daemon.

    It takes tokens, certificates, the limits of runtimes and the log level, and names what needs a
    restart. A configuration that is refused changes nothing.

    Exit status: 0 reloaded, 1 no daemon answers, 78 refused.
    """
    loaded = _settings(config_file)
    from agentd.client import Client

    try:
        waiting = Client(str(loaded.settings.rpc.socket)).reload()["needs_restart"]
    except AgentdError as error:
        _refused(error)
    say("reloaded")
    for key in waiting:
        say(f"{key} differs, and needs a restart")


@agentd.command("check-config")
@config_option
@json_option
def check_config(config_file: str | None, as_json: bool) -> None:
    """Check the configuration without running.

    Reads everything that "agentd run" reads and prints every problem in one pass. Plugins are
    started to validate their tables; nothing is written, and a running daemon is not disturbed.

    Exit status: 0 fine; otherwise the one of "agentd run": 78 the configuration cannot be used,
    1 it cannot run here, or a plugin did not validate its table.
    """
    import asyncio

    from agentd.config.loading import find_config
    from agentd.daemon.config_check import check

    _log_from("error")
    try:
        found = asyncio.run(check(find_config(config_file, os.environ)))
    except ConfigRefused as error:
        _refused(error)
    if found.problems:
        print_problems("agentd", ConfigRefused(found.problems, found.source).lines())
        sys.exit(found.status)
    if as_json:
        click.echo(json.dumps({"ok": True, "warnings": found.warnings}))
        return
    for warning in found.warnings:
        say(f"warning: {warning}", err=True)
    say("configuration OK")


def _split(config_file: str | None) -> Any:
    """Return the partition as the daemon would make it; nothing is changed."""
    loaded = _settings(config_file)
    _log_from("error")
    from agentd.daemon import assembly, runtime_factory
    from agentd.events import EventLog
    from agentd.host.probe import probe
    from agentd.state.folder import ReadOnlyState

    async def divided() -> Any:
        problems: list[Problem] = []
        with _noting(problems):
            runtime_factory.refuse_unknown_users(loaded.settings)
        memory = ReadOnlyState(loaded.settings.node.state_dir)
        host = assembly.plugin_host(loaded.settings, memory)
        try:
            await host.open(loaded.settings.plugins.open_timeout)
            with _noting(problems):
                devices = assembly.discover(loaded.settings, probe(), host, memory, EventLog())
            if problems:
                raise ConfigRefused(problems)
            assembly.withhold_devices_of_peers(loaded.settings, devices)
            return devices.split
        finally:
            await host.close()

    return _run(divided(), loaded.source)


@contextlib.contextmanager
def _noting(problems: list[Problem]) -> Iterator[None]:
    """Add what a configuration is refused for to the problems, and go on."""
    try:
        yield
    except ConfigRefused as error:
        problems += error.problems


@agentd.command()
@config_option
@json_option
@click.option("--live", is_flag=True, help="Also: what it would leave held, given the kernels now.")
def plan(config_file: str | None, as_json: bool, live: bool) -> None:
    """Print the partition; start nothing."""
    from agentd.rpc.plan import plan_view

    split = _split(config_file)
    content = plan_view(split)
    if live:
        from agentd.cli.agentd.live_plan import held_under

        try:
            content["held"] = held_under(split, _settings(config_file).settings.rpc.socket)
        except AgentdError as error:
            why = f"what kernels hold is not known: {error}"
            content["warnings"] = [*split.warnings, why]
    if as_json:
        click.echo(json.dumps(content, indent=1))
        return
    from agentd.cli.tables import print_plan

    print_plan(content)


@agentd.command()
@config_option
@json_option
def plugins(config_file: str | None, as_json: bool) -> None:
    """List the plugins, opened as by the daemon."""
    loaded = _settings(config_file)
    _log_from("error")
    from agentd.daemon import assembly
    from agentd.state.folder import ReadOnlyState

    async def look() -> list[dict[str, Any]]:
        memory = ReadOnlyState(loaded.settings.node.state_dir)
        host = assembly.plugin_host(loaded.settings, memory)
        await host.open(loaded.settings.plugins.open_timeout)
        rows = [asdict(status) for status in host.statuses(everything=True)]
        await host.close()
        return rows

    rows = _run(look(), loaded.source)
    if as_json:
        click.echo(json.dumps(rows))
        return
    from agentd.cli.tables import print_rows

    print_rows(rows, ["name", "plugin", "state", "slots", "reason"])


@agentd.group()
def plugin() -> None:
    """Test a plugin."""


@plugin.command()
@config_option
@json_option
@click.argument("name")
@click.option("--hardware", is_flag=True, help="Also: try its devices, and print a report.")
@click.option("--image", help="With --hardware: try containers of this image too.")
@click.option("--probe", default="", help="With --hardware: a shell command that sees a device.")
def check(
    config_file: str | None,
    as_json: bool,
    name: str,
    hardware: bool,
    image: str | None,
    probe: str,
) -> None:
    """Run the conformance suite on a plugin.

    NAME is a table of the file, or an entry point.

    With --hardware a daemon of its own then gives each device to a real kernel. The probe is to
    end with 0 in a kernel that has a device, and with another status in one that has none; if it
    prints anything, it is to name the devices that it sees.
    """
    loaded = _settings(config_file)
    _log_from("error")
    from agentd.cli.tables import print_rows
    from agentd.daemon import assembly
    from agentd.pluginhost.conformance import Conformance
    from agentd.state.folder import ReadOnlyState

    memory = ReadOnlyState(loaded.settings.node.state_dir)
    host = assembly.plugin_host(loaded.settings, memory)
    try:
        wanted = host.wanted(name)
    except LookupError as error:
        raise click.ClickException(str(error)) from None
    conformance = Conformance(wanted, assembly.pace_of(loaded.settings))
    findings = _run(conformance.run(), loaded.source)
    if hardware:
        from agentd.cli.agentd.hardware_check import Ways, tried

        report = tried(wanted, loaded, conformance.files, Ways(image, probe), findings)
        findings = report.findings
    if hardware and not as_json:
        say(report.text())
        sys.exit(0 if all(finding.passed for finding in findings) else 1)
    rows = [asdict(finding) for finding in findings]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    else:
        words = {True: "yes", False: "NO"}
        shown = [{**row, "passed": words[row["passed"]] if row["tried"] else "-"} for row in rows]
        print_rows(shown, ["check", "passed", "detail"])
    sys.exit(0 if all(row["passed"] for row in rows) else 1)


@agentd.group()
def config() -> None:
    """Show, write and change the configuration."""


@config.command()
@config_option
@json_option
def show(config_file: str | None, as_json: bool) -> None:
    """Print the settings and their origins."""
    loaded = _settings(config_file)
    rows = [
        {"key": ".".join(keys), "value": value, "origin": loaded.origin(keys)}
        for keys, value in loaded.effective()
    ]
    if as_json:
        content = {row["key"]: {"value": row["value"], "origin": row["origin"]} for row in rows}
        click.echo(json.dumps(content, indent=1, default=str))
        return
    from agentd.cli.tables import print_rows

    shown = [{**row, "value": json.dumps(row["value"], default=str)} for row in rows]
    print_rows(shown, ["key", "value", "origin"])


@config.command()
@click.argument("file", type=click.Path(), required=False)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def init(file: str | None, force: bool) -> None:
    """Write the commented default.

    It goes to FILE or to standard output.

    On a node with systemd and without a Docker Engine it proposes the runtime systemd.
    """
    from agentd.config.default_file import default_text
    from agentd.config.document import write_file
    from agentd.config.runtimes import DockerSettings
    from agentd.host.systemd.availability import why_no_systemd

    proposes = not DockerSettings().socket.exists() and not why_no_systemd()
    text = default_text("systemd" if proposes else None)
    if file is None:
        say(text, nl=False)
        return
    path = Path(file)
    if path.exists() and not force:
        raise click.ClickException(f"{file} exists; --force replaces it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from None


@config.command()
@click.argument("old", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="Write it there; default: print.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def migrate(old: Path, output: Path | None, force: bool) -> None:
    """Migrate an older configuration.

    OLD is a slot-based configuration of an older agent.
    """
    from agentd.config.document import write_file
    from agentd.config.loading import load_text
    from agentd.config.migration import migrated

    try:
        text = migrated(read_regular(old).text, old)
        load_text(text, None, {})
        if output is None:
            say(text, nl=False)
        elif output.exists() and not force:
            raise click.ClickException(f"{output} exists; --force replaces it")
        else:
            write_file(output, text)
    except (OSError, UnusableFile) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise click.ClickException(f"{old} to {output or 'standard output'}: {why}") from None
    except ConfigRefused as error:
        _refused(error)


@config.command("set")
@config_option
@click.argument("key")
@click.argument("value")
def set_(config_file: str | None, key: str, value: str) -> None:
    """Change one setting in the file.

    Comments and order stay.

    KEY is a dotted path such as resource.allocation-mode, VALUE a TOML value or plain text.
    """
    from agentd.config.document import with_setting, write_file
    from agentd.config.loading import find_config

    path = find_config(config_file, os.environ)
    if path is None:
        raise click.ClickException(
            "there is no file to change; write one with `agentd config init`"
        )
    try:
        text = read_regular(path).text if path.exists() else ""
        write_file(path, with_setting(text, key, value, path))
    except (OSError, UnusableFile) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise click.ClickException(f"{path}: {why}") from None
    except ConfigRefused as error:
        _refused(error)
