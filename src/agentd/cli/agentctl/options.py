"""Parts that the commands of `agentctl` share: errors, options, and rows of kernels."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from agentd.cli.option_types import UNIX
from agentd.cli.output import (
    DATA_FORMATS,
    CommandError,
    choose_format,
    encode,
    is_data,
    os_error_text,
    print_data,
    print_text,
)
from agentd.client import Client
from agentd.client.calls import authorization
from agentd.client.defaults import DEFAULT_SOCKET, TIMEOUT_S
from agentd.core.names import did_you_mean
from agentd.errors import (
    AgentdError,
    CommandNotFound,
    InvalidRequest,
    Unavailable,
    UnknownAgent,
    Unreachable,
    UnsupportedResource,
)
from agentd.host.systemd.availability import is_booted
from agentd.program.command_line import Program
from agentd.program.exit_status import ExitStatus
from agentd.program.standard_streams import OutputFailed
from agentd.tomlfile.regular_files import UnusableFile, read_regular

_F = TypeVar("_F", bound=Callable[..., Any])
DEFAULT_CONFIG = "/etc/agentd/agent.toml"
GATEWAY = "unix:/run/agentd-fleet/gateway.sock"
_ADDRESSES = {
    "url": "--url", "socket_path": "--socket", "config": "--config", "fleet_address": "--fleet",
}  # fmt: skip
"""The options that name a daemon; in the environment, an earlier one takes precedence."""
IF_UNREACHABLE = (
    "see whether the daemon runs: systemctl status agentd.socket agentd.service",
    "start both: systemctl start agentd.socket agentd.service",
)

RUNS_NOTHING = "agentd.runs_nothing"
"""In the context of a command that runs no other command now, though it can."""
_NOT_EXECUTABLE = re.compile(
    r": (permission denied|exec format error|is a directory)(: unknown|: OCI .*)?$", re.IGNORECASE
)
"""The end of the reason why a command that exists did not start, of Linux and of engines."""


class RpcProblem(CommandError):
    """An error answer: its code and detail, with remedies; JSON or YAML where that is asked for."""

    def __init__(self, content: Mapping[str, Any], remedies: Iterable[str] = ()) -> None:
        self.content = content
        fact = f"{content.get('code', 'error')}: {content.get('detail', content)}"
        super().__init__(fact, remedies)

    @classmethod
    def of(cls, error: AgentdError, remedies: Iterable[str] = ()) -> RpcProblem:
        """Return the problem to print for an error that the client raised."""
        content = {"code": error.code, "detail": str(error), **error.content}
        return cls(content, [*remedies, *_remedies(error)])

    def show(self, file: Any = None) -> None:
        if self._form in DATA_FORMATS:
            click.echo(encode(self.content, self._form, indent=None), err=True)
        else:
            super().show(file)


def print_outage(error: AgentdError) -> None:
    """Print that a follower waits for an answer; once for each outage."""
    fact = " ".join(f"{error.code}: {error}".split())
    print_text(f"agentctl: {fact}; trying again until it answers", err=True)


def _remedies(error: AgentdError) -> Iterator[str]:
    """Yield one line for each thing that may help."""
    if isinstance(error, Unreachable) and is_booted():
        yield from IF_UNREACHABLE
    if isinstance(error, Unavailable) and (kernel_id := error.content.get("kernel_id")):
        yield f"see whether it exists: agentctl inspect {kernel_id}"
    if isinstance(error, UnsupportedResource):
        for slot in getattr(error, "slots", ()):
            yield from suggestion(str(slot), map(str, getattr(error, "known", ())))


def suggestion(word: str, known: Iterable[str]) -> list[str]:
    """Return a line that names the nearest known word; none if none is near."""
    hint = did_you_mean(word, known).strip()
    return [hint] if hint else []


@contextlib.contextmanager
def suggesting_agents(client: Client, agent: str | None) -> Iterator[None]:
    """Add the nearest name to the error for an unknown agent."""
    try:
        yield
    except UnknownAgent as error:
        known: list[str] = []
        with contextlib.suppress(AgentdError):
            known = [row["agent_id"] for row in client.agents()]
        raise RpcProblem.of(error, suggestion(agent or "", known)) from None


@contextlib.contextmanager
def _printable_errors() -> Iterator[None]:
    """Raise what the daemon or the host refuses as an error to print."""
    try:
        yield
    except AgentdError as error:
        raise RpcProblem.of(error) from None
    except OutputFailed:
        raise
    except OSError as error:
        raise CommandError(os_error_text(error)) from None


class RpcGroup(Program):
    """A group of commands whose errors are a daemon's."""

    ending_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _printable_errors():
                return super().invoke(ctx)
        except CommandError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            stands_in = isinstance(command, CommandLine) and command.stands_in
            if not stands_in or ctx.meta.get(RUNS_NOTHING):
                raise
            error.show()
            sys.exit(stand_in_status(error))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and args[0].isprintable():
            for hint in suggestion(args[0], self.list_commands(ctx)):
                raise click.UsageError(f"unknown command {args[0]}; {hint}", ctx)
        return super().resolve_command(ctx, args)


class CommandLine(click.Command):
    """A command of `agentctl` that ends with another command, which has all further words.

    Options are read before and after each argument that comes first, such as AGENT, and end at the
    first word that is not one. With `stands_in` its exit status is that of the other command, and
    its own failures have statuses that few commands use.
    """

    def __init__(self, *args: Any, stands_in: bool = False, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.stands_in = stands_in

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words, with the options between the first arguments moved to the front."""
        ctx.allow_interspersed_args = False
        options = [each for each in self.params if isinstance(each, click.Option)]
        parser = click.Command(self.name, params=[*options]).make_parser(ctx)
        front, arguments, words = list[str](), list[str](), args
        for _ in range(len(self.params) - len(options)):
            rest = parser.parse_args([*words])[1]
            front += words[: len(words) - len(rest)]
            if front[-1:] == ["--"]:
                return super().parse_args(ctx, [*front, *arguments, *rest])
            arguments, words = [*arguments, *rest[:1]], rest[1:]
        return super().parse_args(ctx, [*front, *arguments, *words])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete options, but none of the other command."""
        return [] if ctx.params.get("command") else super().shell_complete(ctx, incomplete)


def stand_in_status(error: CommandError) -> ExitStatus:
    """Return the exit status of an error of `run` and `exec`, which is not the command's."""
    if not isinstance(error, RpcProblem) or error.content.get("code") != CommandNotFound.code:
        return ExitStatus.CLIENT_FAILED
    is_found = _NOT_EXECUTABLE.search(str(error.content.get("detail")))
    return ExitStatus.NOT_EXECUTABLE if is_found else ExitStatus.NOT_FOUND


def alias_of(command: click.Command, name: str) -> click.Command:
    """Return a command under a further name."""
    alias = copy(command)
    alias.name, alias.short_help = name, f"Alias of {command.name}."
    return alias


def quiet_option(command: _F) -> _F:
    """Add `-q`, which prints bare names."""

    def note(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            choose_format(context, "name")

    return click.option(
        "-q",
        "--quiet",
        is_flag=True,
        callback=note,
        expose_value=False,
        help="The same as -o name.",
    )(command)


def pairs(values: Sequence[str]) -> dict[str, str]:
    """Read NAME=VALUE, each name once."""
    pairs = {}
    for value in values:
        name, found, rest = value.partition("=")
        if not name or not found:
            raise click.UsageError(f"invalid value {value!r}: expected NAME=VALUE")
        if name in pairs:
            raise click.UsageError(f"duplicate name {name}")
        pairs[name] = rest
    return pairs


def listed(given: Sequence[str]) -> dict[str, list[str]]:
    """Read NAME=ID options; a name may occur several times."""
    found: dict[str, list[str]] = {}
    for item in given:
        for name, device_id in pairs([item]).items():
            found.setdefault(name, []).append(device_id)
    return found


class MemberOption(click.Option):
    """An option with the name of a member of a create, and with the member's description as help.

    `read` returns the member's value for what was typed.
    """

    def __init__(
        self, *args: Any, read: Callable[[Any], Any] = lambda value: value, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.read = read
        del self.help  # hides the property below

    def _describe(self) -> str:
        from agentd.rpc.requests import CreateKernelRequest

        text = CreateKernelRequest.model_fields[str(self.name)].description or ""
        return text.replace("`", "")

    help: Any = cached_property(_describe)
    """The description of the member, read when it is shown: models are slow to import."""


member_option = partial(click.option, cls=MemberOption)
slot_option = member_option(
    "--slot", "-s", "slots", multiple=True, metavar="NAME=AMOUNT", read=pairs
)
device_option = member_option("--device", "devices", multiple=True, metavar="NAME=ID", read=listed)


def given_members(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a body for the options that were given to the running command."""
    context = click.get_current_context()
    return {
        name: option.read(options[name])
        for option in context.command.params
        if isinstance(option, MemberOption)
        and context.get_parameter_source(name := str(option.name)) is not ParameterSource.DEFAULT
    }


_MOUNT = re.compile(r"([^:]+):([^:]+)(?::(ro|rw))?")
_PORT = re.compile(r"(?:([0-9]{1,5}):)?([0-9]{1,5})(?:/([A-Za-z]+))?")
_TMPFS = re.compile(r"([^:]+)(?::([^:]+))?")
_ULIMIT = re.compile(r"(-?[0-9]{1,19})(?::(-?[0-9]{1,19}))?")


def _match(form: re.Pattern[str], value: str, expected: str, whole: str = "") -> Sequence[str]:
    """Return the parts of a value; those that it does not have are empty.

    Raises:
        UsageError: the value has another form; a part before or after a colon may not be empty.
    """
    match = form.fullmatch(value)
    if match is None:
        raise click.UsageError(f"invalid value {(whole or value)!r}: expected {expected}")
    return match.groups("")


def mounts(values: Sequence[str]) -> list[dict[str, Any]]:
    """Read SOURCE:TARGET[:ro|:rw]."""
    parts = [_match(_MOUNT, value, "SOURCE:TARGET[:ro|:rw]") for value in values]
    return [{"source": s, "target": t, "read_only": mode != "rw"} for s, t, mode in parts]


def ports(values: Sequence[str]) -> list[dict[str, Any]]:
    """Read [HOST:]CONTAINER[/udp]."""
    parts = [_match(_PORT, value, "[HOST:]CONTAINER[/udp]") for value in values]
    return [
        {
            "container": int(container),
            "protocol": protocol or "tcp",
            **({"host": int(host)} if host else {}),
        }
        for host, container, protocol in parts
    ]


def tmpfs(values: Sequence[str]) -> list[dict[str, Any]]:
    """Read TARGET[:SIZE]."""
    parts = [_match(_TMPFS, value, "TARGET[:SIZE]") for value in values]
    return [{"target": target, **({"size": size} if size else {})} for target, size in parts]


def ulimits(values: Sequence[str]) -> dict[str, Any]:
    """Read NAME=SOFT[:HARD]."""
    limits: dict[str, Any] = {}
    for name, value in pairs(values).items():
        soft, hard = _match(_ULIMIT, value, "NAME=SOFT[:HARD]", f"{name}={value}")
        limits[name] = {"soft": int(soft), "hard": int(hard or soft)}
    return limits


WIDE_KERNEL_COLUMNS = [
    *("image", "command", "labels", "created_by"),
    *("created_at", "started_at", "finished_at"),
]
KERNEL_COLUMNS = ["kernel", "agent", "state", "slots", "devices", "exit_code", "age", "reason"]


def device_cell(allocation: Mapping[str, Any]) -> list[str]:
    """Return the devices of an allocation by device name, without memory."""
    from agentd.cli.tables import compact_ids

    ids_by_name = {
        name: dict.fromkeys(itertools.chain.from_iterable(by_slot.values()))
        for name, by_slot in allocation.items()
        if name != "mem"
    }
    return [f"{name} {compact_ids(list(ids))}" for name, ids in ids_by_name.items()]


def kernel_row(kernel: Mapping[str, Any]) -> dict[str, Any]:
    """Return a kernel with its columns for people."""
    from agentd.cli.tables import format_age

    return {
        **kernel,
        "kernel": kernel["kernel_id"],
        "agent": kernel["agent_id"],
        "devices": device_cell(kernel["allocation"]),
        "age": format_age(kernel.get("created_at")),
        "reason": "; ".join(filter(None, [kernel["reason"], *kernel["degraded"]])) or None,
    }


def device_row(device: Mapping[str, Any]) -> dict[str, Any]:
    """Return a device of a node or of a fleet with its columns for people."""
    from agentd.cli.tables import holder_amounts, human_amount

    slot = device["slot"]
    sizes = {
        key: human_amount(slot, device[key])
        for key in ("capacity", "allocated", "free")
        if key in device
    }
    return {
        **device,
        **sizes,
        "device": f"{device['device_name']}/{device['id']}",
        "node": device.get("node_id"),
        "slots": [
            f"{name} {human_amount(name, use['free'])} of"
            f" {human_amount(name, use['capacity'])} free"
            for name, use in device["slots"].items()
        ],
        "holders": [
            f"{holder_name(holder)}={holder_amounts(slot, holder)}" for holder in device["holders"]
        ],
    }


def holder_name(holder: Mapping[str, Any]) -> str:
    """Return the id of a kernel, or of a claim after the word claim."""
    return f"claim {holder['claim_id']}" if "claim_id" in holder else str(holder["kernel_id"])


def for_each(kernels: Sequence[str], act: Callable[[str], object]) -> bool:
    """Act on each kernel, print each failure, and return whether there was one.

    Raises:
        Unreachable: the daemon does not answer; the remaining kernels are skipped.
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
    """Remove kernels, print the removed ones, and exit with 1 if one was not removed."""
    removed: list[str] = []

    def act(kernel: str) -> None:
        remove(kernel)
        removed.append(kernel)
        if not is_data():
            print_text(kernel)

    failed = for_each(kernels, act)
    if is_data():
        print_data({"removed": removed}, ())
    sys.exit(failed)


def event_line(kind: str, content: Mapping[str, Any]) -> str:
    """Return an event in one line: subject, agent, state, exit code, caller, outcome, reason."""
    agent, pull, code = (content.get(name) for name in ("agent_id", "pull", "exit_code"))
    caller = content.get("caller")
    words = (
        kind,
        event_subject(content),
        f"of {agent}" if agent else "",
        content.get("action") or content.get("state"),
        f"exit code {code}" if code is not None else "",
        f"by {caller}" if caller else "",
        content.get("outcome") or content.get("code"),
        content.get("reason") or content.get("detail"),
        f"{pull['current']} of {pull['total']} bytes" if pull else "",
    )
    return " ".join(word for word in words if word)


def event_subject(content: Mapping[str, Any]) -> str:
    """Return the name of the kernel, claim, device or other thing that an event is about."""
    names = (content.get(name) for name in ("kernel_id", "claim_id", "name", "id", "about"))
    return str(next(filter(None, names), ""))


def chosen_address(root: click.Context) -> str | None:
    """Return the parameter of `agentctl` that names the daemon; None for the default one.

    One on the command line takes precedence over the environment.

    Raises:
        UsageError: there are several on the command line.
    """
    given = [name for name in _ADDRESSES if root.params.get(name)]
    named = [name for name in given if _is_on_command_line(root, name)]
    if len(named) > 1 and not root.resilient_parsing:
        both = " and ".join(_ADDRESSES[name] for name in named[:2])
        raise click.UsageError(f"{both} exclude each other: name one daemon", root)
    return next(iter(named or given), None)


def _is_on_command_line(root: click.Context, name: str) -> bool:
    return root.get_parameter_source(name) is ParameterSource.COMMANDLINE


def client_of(root: click.Context, *, is_of_fleet: bool, timeout_s: float = TIMEOUT_S) -> Client:
    """Return a client of the daemon that options or the environment name.

    Raises:
        UsageError: an option would have no effect.
    """
    chosen, options = chosen_address(root), root.params
    if is_of_fleet:
        if chosen not in (None, "fleet_address") and _is_on_command_line(root, str(chosen)):
            option = _ADDRESSES[str(chosen)]
            raise click.UsageError(f"{option} names a node: name the gateway with --fleet", root)
        address = options["fleet_address"] or GATEWAY
    elif chosen in ("url", "fleet_address"):
        address = options[chosen]
    else:
        path = options["socket_path"] if chosen == "socket_path" else socket_of(options["config"])
        address = f"{UNIX}{path}"
    if not address.startswith(UNIX):
        token = token_of(options["token_file"])
        return Client(url=address, token=token, timeout_s=timeout_s, retry_s=0)
    if _is_on_command_line(root, "token_file"):
        reason = "a unix socket needs no token"
        raise click.UsageError(f"--token-file is for --url, or --fleet over TCP: {reason}", root)
    return Client(address.removeprefix(UNIX), timeout_s=timeout_s, retry_s=0)


def token_of(file: str | None) -> str | None:
    """Return the token in a file; None without a file."""
    try:
        token = read_regular(Path(file)).text.strip() if file else None
        authorization(token)
    except (UnusableFile, InvalidRequest) as error:
        raise CommandError(f"{file} {error}") from None
    return token


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
