"""The commands of `agentd`: run the daemon, and examine a configuration without running it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from msgspec.structs import asdict

from agentd import __version__, failpoints, stderr
from agentd.cli.output import (
    CommandError,
    output_option,
    print_answer,
    print_data,
    print_text,
)
from agentd.errors import AgentdError, ConfigRefused, DaemonFailed, Problem, StartRefused
from agentd.program.command_line import Program
from agentd.program.exit_status import exit_refused, print_problems
from agentd.program.parameters import FilePath
from agentd.tomlfile.regular_files import UnusableFile, read_regular

_T = TypeVar("_T")

config_option = click.option(
    "--config",
    "config_file",
    metavar="FILE",
    help="Default: $AGENTD_CONFIG, else /etc/agentd/agent.toml, else the defaults.",
)


@click.group("agentd", cls=Program)
@click.version_option(__version__, prog_name="agentd")
def agentd() -> None:
    """Divide a node's devices among its agents.

    Exit status: 0 done, 1 cannot run on this host, 2 wrong usage, 78 unusable configuration.
    """
    os.umask(os.umask(0o777) | 0o022)  # no other user may write to the folders of a path


_exit_refused = partial(exit_refused, "agentd")


def _settings(config_file: str | None) -> Any:
    from agentd.config.loading import find_config, load

    try:
        return load(find_config(config_file, os.environ))
    except (ConfigRefused, StartRefused) as error:
        _exit_refused(error)


def _configure_log(level: str) -> None:
    from agentd import log

    log.configure(level)


def _run(work: Coroutine[Any, Any, _T], source: str) -> _T:
    import asyncio

    try:
        return asyncio.run(work)
    except (ConfigRefused, DaemonFailed, StartRefused) as error:
        _exit_refused(error, source)


@agentd.command()
@config_option
@click.option(
    "--log-level",
    help="Default: node.log-level.",
    type=click.Choice(["debug", "info", "warning", "error"]),
)
def run(config_file: str | None, log_level: str | None) -> None:
    """Run the daemon in the foreground."""
    stderr.guard()
    loaded = _settings(config_file)
    try:
        failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
    except ValueError as error:
        _exit_refused(ConfigRefused([Problem(failpoints.VARIABLE, str(error))]))
    _configure_log(log_level or loaded.settings.node.log_level)
    from agentd.daemon.lifecycle import Daemon

    async def daemon() -> None:
        await Daemon(loaded).run()

    _run(daemon(), loaded.source)


@agentd.command()
@config_option
def reload(config_file: str | None) -> None:
    """Reload the configuration of the daemon.

    Applies tokens, certificates, the limits of runtimes and the log level, and names the changed
    keys that need a restart. A refused configuration changes nothing.

    Exit status: 0 reloaded, 1 no answer from the daemon, 78 configuration refused.
    """
    loaded = _settings(config_file)
    from agentd.client import Client

    try:
        needs_restart = Client(str(loaded.settings.rpc.socket)).reload()["needs_restart"]
    except AgentdError as error:
        _exit_refused(error)
    print_text("reloaded")
    for key in needs_restart:
        print_text(f"{key} changed: restart agentd to apply it")


@agentd.command("check-config")
@config_option
@output_option
def check_config(config_file: str | None) -> None:
    """Check the configuration without running.

    Prints every problem of the file and the environment. If there are none, starts the plugins and
    prints every problem of plugins, partition and host. Writes nothing and does not disturb a
    running daemon.

    Exit status: 0 usable; otherwise that of "agentd run": 78 the configuration is unusable, 1 the
    daemon cannot run on this host or a plugin did not validate its table. Users, groups, files and
    addresses that "agentd run" would wait for are refused, too.
    """
    import asyncio

    from agentd.config.loading import find_config
    from agentd.daemon.config_check import check_configuration

    _configure_log("error")
    try:
        result = asyncio.run(check_configuration(find_config(config_file, os.environ)))
    except (ConfigRefused, StartRefused) as error:
        _exit_refused(error)
    if result.problems:
        print_problems("agentd", ConfigRefused(result.problems, result.source).lines())
        sys.exit(result.status)
    if print_data({"ok": True, "warnings": result.warnings}, ["ok"]):
        return
    for warning in result.warnings:
        print_text(f"warning: {warning}", err=True)
    print_text("configuration OK")


def _plan_split(config_file: str | None) -> Any:
    """Return the partition that the daemon would make, and further warnings; change nothing."""
    loaded = _settings(config_file)
    _configure_log("error")
    from agentd.daemon import discovery
    from agentd.daemon.host_names import HostNames
    from agentd.daemon.problems import Problems
    from agentd.events import EventLog
    from agentd.host.probe import probe
    from agentd.state.folder import StateFolder

    async def discover_devices() -> Any:
        settings, problems = loaded.settings, Problems()
        folder = StateFolder(settings.node.state_dir)
        async with discovery.open_plugins(settings, folder) as plugins:
            devices = await discovery.check_and_discover(
                settings, probe(), plugins, folder, EventLog(), problems, HostNames(settings)
            )
            problems.raise_if_any()
            discovery.refuse_failed_required(plugins)
            lock_warnings = discovery.withhold_if_served(settings, devices)
            return devices.split, [*devices.warnings, *lock_warnings]

    return _run(discover_devices(), loaded.source)


@agentd.command()
@config_option
@output_option
@click.option("--live", is_flag=True, help="Add devices that running kernels would keep held.")
def plan(config_file: str | None, live: bool) -> None:
    """Print the partition; start nothing.

    The plan shows how "agentd run" would divide the devices with this configuration.
    """
    from agentd.rpc.plan import plan_view

    split, warnings = _plan_split(config_file)
    held: dict[str, Any] = {}
    if live:
        from agentd.cli.agentd.plan_output import holdings_under

        try:
            held["held"] = holdings_under(split, _settings(config_file).settings.rpc.socket)
        except AgentdError as error:
            warnings.append(f"what kernels hold is not known: {error}")
    content = plan_view(split, warnings) | held
    if print_data(content, split.partitions):
        return
    from agentd.cli.agentd.plan_output import print_plan

    print_plan(content)


@agentd.command()
@config_option
@output_option
def plugins(config_file: str | None) -> None:
    """Open the plugins as the daemon does."""
    loaded = _settings(config_file)
    _configure_log("error")
    from agentd.daemon import discovery
    from agentd.state.folder import StateFolder

    async def list_plugins() -> list[dict[str, Any]]:
        folder = StateFolder(loaded.settings.node.state_dir)
        async with discovery.open_plugins(loaded.settings, folder) as plugins:
            return [asdict(status) for status in plugins.statuses(everything=True)]

    rows = _run(list_plugins(), loaded.source)
    print_answer(rows, ["name", "plugin", "state", "slots", "reason"])


@agentd.group()
def plugin() -> None:
    """Test a plugin."""


@plugin.command()
@config_option
@output_option
@click.argument("name")
def check(config_file: str | None, name: str) -> None:
    """Run the conformance suite on a plugin.

    NAME is a table of the configuration, or an entry point.

    Exit status: 0 all checks passed, 1 a check failed.
    """
    loaded = _settings(config_file)
    _configure_log("error")
    from agentd.daemon import discovery
    from agentd.pluginhost.conformance import Conformance
    from agentd.state.folder import StateFolder

    folder = StateFolder(loaded.settings.node.state_dir)
    host = discovery.create_plugin_host(loaded.settings, folder)
    try:
        spec = host.plugin_spec(name)
    except LookupError as error:
        raise CommandError(str(error)) from None
    findings = _run(
        Conformance(spec, discovery.plugin_timeouts(loaded.settings)).run(), loaded.source
    )
    rows = [asdict(finding) for finding in findings]
    print_answer(rows, ["check", "passed", "detail"], _finding_cells)
    sys.exit(0 if all(row["passed"] for row in rows) else 1)


def _finding_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    words = {True: "yes", False: "NO"}
    return {**row, "passed": words[row["passed"]] if row["tried"] else "-"}


@agentd.group()
def config() -> None:
    """Show, write and change the configuration."""


@config.command()
@config_option
@output_option
def show(config_file: str | None) -> None:
    """Print the settings and their origins."""
    loaded = _settings(config_file)
    content = {
        ".".join(keys): {"value": value, "origin": loaded.origin(keys)}
        for keys, value in loaded.effective()
    }
    if print_data(content, content):
        return
    from agentd.cli.tables import print_rows

    rows = [
        {**row, "key": key, "value": json.dumps(row["value"], default=str)}
        for key, row in content.items()
    ]
    print_rows(rows, ["key", "value", "origin"])


@config.command()
@click.argument("file", type=FilePath(), required=False)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init(file: str | None, force: bool) -> None:
    """Write a commented default configuration.

    Writes to FILE, or to standard output. The first line names the JSON Schema for editors. On a
    node with systemd and without a Docker Engine, the file proposes the runtime systemd.
    """
    from agentd.config.default_file import default_text
    from agentd.config.document import write_file
    from agentd.config.runtimes import DockerSettings
    from agentd.config.schema import PACKAGED
    from agentd.host.systemd.availability import systemd_problems

    has_only_systemd = not DockerSettings().socket.exists() and not systemd_problems()
    text = f"#:schema {PACKAGED}\n{default_text('systemd' if has_only_systemd else 'docker')}"
    if file is None:
        print_text(text, nl=False)
        return
    path = Path(file)
    if path.exists() and not force:
        raise CommandError(f"{file} exists", ["replace it with --force"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}") from None


@config.command()
@click.option("--path", "is_path", is_flag=True, help="Print the path of the packaged schema.")
def schema(is_path: bool) -> None:
    """Print the JSON Schema of agent.toml.

    The schema describes the tables of the installed plugins; tables of other plugins accept any
    key. In the packaged schema, whose path "--path" prints, the tables of all plugins accept any
    key.
    """
    from agentd.config.schema import PACKAGED, schema_text
    from agentd.pluginhost.entry_points import installed_entry_points, settings_schemas

    print_text(
        str(PACKAGED)
        if is_path
        else schema_text(settings_schemas(installed_entry_points())).rstrip()
    )


@config.command("set")
@config_option
@click.argument("key")
@click.argument("value", type=click.UNPROCESSED)
def set_(config_file: str | None, key: str, value: str) -> None:
    """Change one setting in the file.

    Keeps comments and order. KEY is a dotted path such as resource.allocation-mode, VALUE is a TOML
    value or plain text.
    """
    from agentd.config.document import with_setting, write_file
    from agentd.config.loading import find_config

    path = find_config(config_file, os.environ)
    if path is None:
        raise CommandError("no configuration file found", ["write one: agentd config init"])
    try:
        text = read_regular(path).text if path.exists() else ""
        write_file(path, with_setting(text, key, value, path))
    except (OSError, UnusableFile) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"{path}: {reason}") from None
    except ConfigRefused as error:
        _exit_refused(error)
