"""What the commands of `agentctl` share: reading options, and printing answers."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from agentd.cli.output import say
from agentd.client.defaults import DEFAULT_SOCKET
from agentd.errors import AgentdError, Unreachable
from agentd.host.systemd.availability import is_booted
from agentd.tomlfile.regular_files import UnusableFile, read_regular

_F = TypeVar("_F", bound=Callable[..., Any])
DEFAULT_CONFIG = "/etc/agentd/agent.toml"


IF_NOBODY = (
    "is the daemon there? systemctl status agentd; it is begun by"
    " `systemctl start agentd.socket agentd.service`, and ended by stopping both"
)


class RpcProblem(click.ClickException):
    """An answer that is an error; shown as its detail, in one line, or as JSON."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        super().__init__(f"{content.get('code', 'error')}: {content.get('detail', content)}")

    @classmethod
    def of(cls, error: AgentdError) -> RpcProblem:
        """Return what is shown of an error that the client raised."""
        detail = str(error)
        if isinstance(error, Unreachable) and is_booted():
            detail += f"; {IF_NOBODY}"
        return cls({"code": error.code, "detail": detail, **error.content})

    def show(self, file: Any = None) -> None:
        del file
        if _is_json([*itertools.takewhile(lambda word: word != "--", sys.argv)]):
            click.echo(json.dumps(self.content), err=True)
        else:
            say(f"agentctl: {' '.join(self.format_message().split())}", err=True)


def _is_json(words: Sequence[str]) -> bool:
    """Tell whether a command line asks for JSON; its options may not have been read yet."""
    pairs = {*itertools.pairwise(words)}
    asked = {("-o", "json"), ("--output", "json")} & pairs
    return bool(asked) or not {"--json", "-ojson", "--output=json"}.isdisjoint(words)


class RpcGroup(click.Group):
    """Commands whose errors are a daemon's."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AgentdError as error:
            raise RpcProblem.of(error) from None


_OUTPUT = "agentd.output"
OUT_OF_TIME = 3
"""Exit status of a `wait` that ran out of time."""


def is_json() -> bool:
    """Return whether the command that runs is to print JSON."""
    return click.get_current_context().meta.get(_OUTPUT) == "json"


def json_option(command: _F) -> _F:
    """Add `-o json|wide|name`, and `--json`; `print_answer` follows them."""
    return _with_output(command, ["json", "wide", "name"], "JSON, more columns, or names alone.")


def json_only_option(command: _F) -> _F:
    """Add `-o json`, and `--json`, to what is no list."""
    return _with_output(command, ["json"], "Print JSON.")


def _with_output(command: _F, choices: Sequence[str], text: str) -> _F:
    def note(context: click.Context, _: click.Parameter, value: str | bool | None) -> None:
        if value and context.meta.get(_OUTPUT) != "json":
            context.meta[_OUTPUT] = "json" if value is True else value

    flag = click.option(
        "--json", is_flag=True, callback=note, expose_value=False, help="The same as -o json."
    )
    choice = click.option(
        "-o", "--output", type=click.Choice(choices), callback=note, expose_value=False, help=text
    )
    return flag(choice(command))


def pairs(values: Sequence[str], separator: str = "=") -> dict[str, str]:
    """Read NAME=VALUE, each name once."""
    pairs = {}
    for value in values:
        name, found, rest = value.partition(separator)
        if not found:
            raise click.UsageError(f"invalid value {value!r}: expected NAME{separator}VALUE")
        if name in pairs:
            raise click.UsageError(f"{name} is given twice")
        pairs[name] = rest
    return pairs


def listed(given: Sequence[str]) -> dict[str, list[str]]:
    """Read NAME=ID options, of which a name may have several."""
    found: dict[str, list[str]] = {}
    for item in given:
        for name, device_id in pairs([item]).items():
            found.setdefault(name, []).append(device_id)
    return found


def mounts(values: Sequence[str]) -> list[dict[str, Any]]:
    """Read SOURCE:TARGET[:ro|:rw]."""
    mounts = []
    for value in values:
        source, _, rest = value.partition(":")
        target, _, mode = rest.partition(":")
        if not target or mode not in ("", "ro", "rw"):
            raise click.UsageError(f"invalid mount {value!r}: expected SOURCE:TARGET[:ro|:rw]")
        mounts.append({"source": source, "target": target, "read_only": mode != "rw"})
    return mounts


def ports(values: Sequence[str]) -> list[dict[str, Any]]:
    """Read [HOST:]CONTAINER[/udp]."""
    ports = []
    for value in values:
        address, _, protocol = value.partition("/")
        host, _, container = address.rpartition(":")
        try:
            port: dict[str, Any] = {"container": int(container), "protocol": protocol or "tcp"}
            if host:
                port["host"] = int(host)
        except ValueError:
            raise click.UsageError(
                f"invalid port {value!r}: expected [HOST:]CONTAINER[/udp]"
            ) from None
        ports.append(port)
    return ports


def tmpfs(values: Sequence[str]) -> list[dict[str, Any]]:
    """Read TARGET[:SIZE]."""
    folders = []
    for value in values:
        target, _, size = value.partition(":")
        folders.append({"target": target, **({"size": size} if size else {})})
    return folders


def ulimits(values: Sequence[str]) -> dict[str, Any]:
    """Read NAME=SOFT[:HARD]."""
    limits: dict[str, Any] = {}
    for name, value in pairs(values).items():
        soft, _, hard = value.partition(":")
        try:
            limits[name] = {"soft": int(soft), "hard": int(hard or soft)}
        except ValueError:
            raise click.UsageError(
                f"invalid ulimit {name}={value}: expected NAME=SOFT[:HARD]"
            ) from None
    return limits


def print_answer(
    content: Any,
    columns: Sequence[str],
    row: Callable[[Any], Mapping[str, Any]] | None = None,
    *,
    wide: Sequence[str] = (),
) -> None:
    """Print an answer as JSON, as the names in its first column, or as a table.

    `row` makes the cells for people of an entry. `wide` are the columns that are shown only where
    they are asked for.
    """
    output = click.get_current_context().meta.get(_OUTPUT)
    if output == "json":
        click.echo(json.dumps(content, indent=1))
        return
    entries = content if isinstance(content, list) else [content]
    rows = [row(entry) for entry in entries] if row is not None else entries
    if output == "name":
        for cells in rows:
            say(cells[columns[0]])
        return
    from agentd.cli.tables import print_rows

    print_rows(rows, [*columns, *(wide if output == "wide" else ())])


WIDE_KERNEL_COLUMNS = [
    *("image", "command", "labels", "created_by"),
    *("created_at", "started_at", "finished_at"),
]
KERNEL_COLUMNS = [
    "kernel",
    "agent",
    "state",
    "slots",
    "devices",
    "exit_code",
    "age",
    "reason",
]


def kernel_row(kernel: Mapping[str, Any]) -> dict[str, Any]:
    """Return a kernel with its columns for people."""
    from agentd.cli.tables import age, compact

    devices = [
        f"{name} {compact(list(ids))}"
        for name, by_slot in kernel["allocation"].items()
        for ids in by_slot.values()
        if name != "mem"
    ]
    return {
        **kernel,
        "kernel": kernel["kernel_id"],
        "agent": kernel["agent_id"],
        "devices": devices,
        "age": age(kernel.get("created_at")),
        "reason": "; ".join(filter(None, [kernel["reason"], *kernel["degraded"]])) or None,
    }


def for_each(kernels: Sequence[str], act: Callable[[str], object]) -> bool:
    """Do something to each kernel; say why where it fails, and return whether it failed anywhere.

    Raises:
        Unreachable: the daemon does not answer; the rest is not tried.
    """
    failed = False
    for kernel in dict.fromkeys(kernels):
        try:
            act(kernel)
        except Unreachable:
            raise
        except (AgentdError, click.ClickException) as error:
            (RpcProblem.of(error) if isinstance(error, AgentdError) else error).show()
            failed = True
    return failed


def remove_each(kernels: Sequence[str], remove: Callable[[str], object]) -> NoReturn:
    """Remove kernels, print each that was, and exit: 1 if one was not."""
    removed: list[str] = []

    def act(kernel: str) -> None:
        remove(kernel)
        removed.append(kernel)
        if not is_json():
            say(kernel)

    failed = for_each(kernels, act)
    if is_json():
        click.echo(json.dumps({"removed": removed}))
    sys.exit(failed)


def event_line(kind: str, content: Mapping[str, Any]) -> str:
    """Return an event in one line: what it is about and whose, its state, who did it, and why."""
    names = (content.get(name) for name in ("kernel_id", "claim_id", "name", "id"))
    subject = next(filter(None, names), "")
    agent, pull, code = (content.get(name) for name in ("agent_id", "pull", "exit_code"))
    caller = content.get("caller")
    words = (
        kind,
        subject,
        f"of {agent}" if agent else "",
        content.get("action") or content.get("state"),
        f"exit code {code}" if code is not None else "",
        f"by {caller}" if caller else "",
        content.get("outcome") or content.get("code"),
        content.get("reason") or content.get("detail"),
        f"{pull['current']} of {pull['total']} bytes" if pull else "",
    )
    return " ".join(word for word in words if word)


def token_of(file: str | None) -> str | None:
    """Return the token that a file holds; None without a file."""
    try:
        return read_regular(Path(file)).text.strip() if file else None
    except UnusableFile as error:
        raise click.ClickException(f"{file} {error}") from None


def socket_of(config: str | None) -> str:
    """Return the socket that a configuration names, without reading the rest of it."""
    named = config or os.environ.get("AGENTD_CONFIG")
    if from_env := os.environ.get("AGENTD__RPC__SOCKET"):
        return from_env
    path = Path(named or DEFAULT_CONFIG)
    try:
        content = tomllib.loads(read_regular(path).text)
    except ValueError as error:  # UnusableFile is one
        if named:
            why = str(error) if isinstance(error, UnusableFile) else f"invalid TOML: {error}"
            raise RpcProblem({"code": "Config", "detail": f"{path}: {why}"}) from None
        return DEFAULT_SOCKET
    return str(content.get("rpc", {}).get("socket", DEFAULT_SOCKET))
