"""Generate the reference pages that follow from the code: `python docs/generate.py`.

A test compares each page with the generated text. Meanings of log events, and causes and remedies
of errors, stand beside this file in `log-events.toml` and `errors.toml`.
"""

import ast
import importlib
import inspect
import json
import re
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from agentd import errors, events, plugin_api
from agentd.cli.agentctl.main import agentctl
from agentd.cli.agentd.main import agentd
from agentd.config.schema import PACKAGED, schema_text
from agentd.config.settings import Settings
from agentd.core import labels, slots
from agentd.core.claim.claim import MAX_CLAIMS, MAX_TTL_S
from agentd.core.kernel.options import MAX_GROUP_ID
from agentd.core.kernel.states import (
    LIVE,
    MOVES,
    OBSERVATIONS,
    STARTING,
    KernelState,
)
from agentd.error_codes import ERROR_CODES, Scope
from agentd.http import bodies, gate, queries
from agentd.http.bodies import Body
from agentd.http.connections import connection, request_turns
from agentd.http.streaming import streaming_responses, websocket
from agentd.pluginhost import validation
from agentd.program.exit_status import MEANINGS
from agentd.rpc.requests import MAX_CONDITIONS, MAX_GROUPS, MAX_SENTENCE, ExecRequest
from agentd.rpc.routes import ROUTES
from agentd.services import refusals
from agentd.services.kernels import kernel_service, retention
from agentd.tomlfile import regular_files, section
from agentd_fleet.cli import agentd_fleet
from agentd_fleet.placement.requests import Placement
from agentd_slurm.cli import agentctl_slurm, agentd_slurm

DOCS = Path(__file__).parent
STATES = DOCS / "reference" / "states.md"
PLUGIN_API = DOCS / "plugins" / "plugin-api.md"
LOG_EVENTS = DOCS / "reference" / "log-events.md"
ERRORS = DOCS / "reference" / "errors.md"
EXIT_CODES = DOCS / "reference" / "exit-codes.md"
COMMANDS = DOCS / "reference" / "commands.md"
COMMANDS_HEAD = DOCS / "commands-head.md"
RPC = DOCS / "reference" / "rpc.md"
FLEET = DOCS / "reference" / "fleet.md"
LIMITS_PAGE = DOCS / "reference" / "limits.md"
ASYNC_CLIENT = DOCS.parent / "src" / "agentd" / "client" / "asynchronous.py"
BLOCKING_CLIENT = ASYNC_CLIENT.with_name("blocking.py")
BLOCKING_BASE = "agentd.client.transport_blocking import BlockingTransport"
BLOCKING_HEAD = '''"""The blocking client of one daemon, for command lines and scripts.

Generated from `asynchronous.py` by `docs/generate.py`.
"""

{imports}


class Client(BlockingTransport):
    """A client of one daemon, over its socket (default: the system's) or TCP with a token.

    Refusals are raised as the classes of `agentd.errors`; a daemon that does not answer is
    `Unreachable`. Answers of 503 are retried after their Retry-After, for at most `retry_s`.
    """
'''
WIDTH = 100
EVENT_TEXTS, ERROR_TEXTS = DOCS / "log-events.toml", DOCS / "errors.toml"
SOURCES = (DOCS.parent / "src" / "agentd", DOCS.parent / "fleet" / "src" / "agentd_fleet")
LEVELS = {"debug": 0, "info": 1, "warning": 2, "error": 3, "exception": 3, "critical": 4}
LEVEL_NAMES = ("debug", "info", "warning", "error", "critical")
EVENT = re.compile(r"[a-z][a-z_]*\.[a-z_]+")
MODULES_WITH_ERRORS = (
    "agentd_fleet.store.etcd_transport",
    "agentd_fleet.store.route",
    "agentd_fleet.join.publisher",
)
CLIENT_WARNING = "warn_of_client"
"""The name of the rate-limited logger: always a warning, with the field `further`."""


def states_page() -> str:
    """Return the page of kernel states: a diagram and two tables, from the tables of the code."""
    sights = OBSERVATIONS[KernelState.RUNNING]  # a `created` kernel never ran, and is removed
    lines = [
        "# Kernel states",
        "",
        "Generated from `agentd.core.kernel.states` by `docs/generate.py`. A kernel changes its state in",
        "one of two ways: agentd acts (`MOVES`), or agentd observes the runtime (`OBSERVATIONS`; the arrow",
        "names the observation).",
        "",
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> preparing",
        *(f"    {a} --> {b}" for a in KernelState for b in sorted(MOVES[a])),
        *(
            f"    {state} --> {after}: {sight}"
            for state in KernelState
            for sight, after in OBSERVATIONS[state].items()
            if after is not state
        ),
        *(f"    {state} --> [*]" for state in ("terminated", "failed", "lost")),
        "```",
        "",
        "A kernel holds its devices in every state except `terminated`, `failed` and `lost`.",
        "",
        "## Moves",
        "",
        "| from | to |",
        "|---|---|",
        *(
            f"| `{state}` | {', '.join(f'`{item}`' for item in sorted(moves))} |"
            for state, moves in MOVES.items()
            if moves
        ),
        "",
        "A stop that fails leaves the state unchanged. A kernel can be deleted in any state in which no",
        "process lives.",
        "",
        "## Observations",
        "",
        f"| state | {' | '.join(f'`{sight}`' for sight in sights)} |",
        f"|---{'|---' * len(sights)}|",
    ]
    for state, found in OBSERVATIONS.items():
        if found:
            cells = (f"`{found[sight]}`" for sight in sights)
            lines.append(f"| `{state}` | {' | '.join(cells)} |")
    starting = ", ".join(f"`{state}`" for state in KernelState if state in STARTING)
    live = ", ".join(f"`{state}`" for state in KernelState if state in LIVE)
    lines += [
        "",
        f"- Starting: {starting}.",
        "- Before `creating` there is no observation: no runtime was asked yet.",
        f"- Live: {live}.",
        "- The observation `unreadable` is a live kernel whose record cannot be read. It can be stopped",
        "  and deleted.",
        "- The observation `absent` is a kernel that its runtime does not have any more. A kernel that",
        "  had ended is `lost` then, too; its exit code stays.",
    ]
    return "\n".join(lines) + "\n"


ENDS_OF_RUN = (
    ("the kernel ends", "with `--rm` deleted", "the kernel's"),
    ("INT, HUP, QUIT, USR1 or USR2", "its first process gets the signal", "the kernel's"),
    ("TERM", "stopped, as by `agentctl stop`", "the kernel's"),
    ("a second INT, HUP, QUIT or TERM", "killed", "the kernel's"),
    ("a third one", "runs on, and is named", "128 plus the signal"),
    ("KILL", "runs on; with `--rm` deleted with `keep-ended`", "137"),
    ("the terminal is closed", "its first process gets HUP", "the kernel's"),
    ("the reader of the output leaves", "stopped; with `--rm` deleted", "141"),
    ("output cannot be written: a full disk", "runs on, and is named; not deleted", "74"),
    ("the daemon is away, or the connection breaks", "runs on; its output is resumed", "none"),
    ("output was dropped before it was printed", "runs on; the bytes are named", "none"),
    ("the kernel is removed, the token is revoked", "", "125"),
)
"""What ends `agentctl run`, what it does to the kernel, and the status."""


def exit_codes_page() -> str:
    """Return the page of exit statuses, from their table in the code."""
    lines = [
        "# Exit codes",
        "",
        "Generated from `agentd.program.exit_status` by `docs/generate.py`.",
        "",
        "| program | status | meaning |",
        "|---|---|---|",
    ]
    for commands, status, text in MEANINGS:
        programs = ", ".join(f"`{command}`" for command in commands) or "all"
        lines.append(f"| {programs} | {'any' if status is None else status.value} | {text} |")
    lines += [
        "",
        "`agentd check-config` exits with the status that `agentd run` would have. It is stricter about",
        "[missing names and files](configuration.md#missing-names-and-files), such as a user that this",
        "host does not know yet: it refuses them (78 or 1), and `agentd run` starts.",
        "",
        "A signal that ends `agentctl` is 128 plus its number: 130 for Ctrl-C, 143 for TERM, 129 for",
        "HUP, and nothing is printed. A signal that was ignored at the start, as by `nohup`, stays",
        "ignored. A third signal ends it at once, whatever it is doing.",
        "",
        "Output that cannot be written is 74 with one line that says why, also where standard output is",
        "closed. If its reader has left, as `head` and `grep -q` do, it is 141 without a word; `logs`,",
        "`wait`, `events` and `top` notice that at once. What cannot be written to standard error is",
        "lost, and the status is that of the command.",
        "",
        "`logs --follow`, `wait`, `events` and `top` end with 1 if the daemon was never there. Once it has",
        "answered, they wait for it without end, and print one line for each outage. `wait --timeout`",
        "ends with 3, also in an outage. `logs` ends with 1 if output is lost, and names the bytes.",
        "",
        "`agentctl` prints an error to standard error: one line with its [code](errors.md) and detail,",
        "and an indented line for each remedy. With `-o json` or `-o yaml` it has that format, except for",
        "an unusable file of `--config` or `--token-file`. A failure that passes (503) has the status of",
        "other errors: the code tells them apart.",
        "",
        "```text",
        "agentctl: UnknownDevice: unknown device cuda-1",
        "  did you mean cuda1?",
        "```",
        "",
        "## Ends of agentctl run",
        "",
        "| event | kernel | status |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in ENDS_OF_RUN),
        "",
        "A signal that is ignored at the start, as by `nohup`, stays ignored. One that arrives during",
        "the create cancels it (USR1 and USR2 wait for the kernel). The first process of a container",
        "ignores INT, HUP and QUIT unless it handles them or has `--init`.",
        "",
        "`agentctl create` ends at the first INT, TERM or HUP: it names the kernel, whose create goes on.",
    ]
    return "\n".join(lines) + "\n"


def plugin_api_page() -> str:
    """Return the page of the plugin API: every name of `agentd.plugin_api`, from its docstrings."""
    lines = [
        "# Plugin API",
        "",
        "Generated from `agentd.plugin_api` by `docs/generate.py`. A plugin may import this module of",
        "agentd, and no other. For a guide see [write a plugin](write-a-plugin.md).",
    ]
    values = {name: getattr(plugin_api, name) for name in plugin_api.__all__}
    for name, value in sorted(values.items(), key=lambda item: (callable(item[1]), item[0])):
        lines += ["", f"## `{name}`", ""]
        if inspect.isfunction(value):
            lines += _function(name, value)
        elif not inspect.isclass(value):
            lines.append(f"`{value!r}`")
        else:
            lines.append(_docstring(value))
            lines += _fields(value) if is_dataclass(value) else _methods(value)
    return "\n".join(lines) + "\n"


def _docstring(value: object) -> str:
    """Return a docstring with its lists and examples unchanged."""
    return textwrap.dedent(inspect.getdoc(value) or "").replace("\nRaises:\n", "\nRaises:\n\n")


def _function(name: str, function: object) -> list[str]:
    return [f"```python\n{name}{inspect.signature(function)}\n```", "", _docstring(function)]  # type: ignore[arg-type]


def _fields(value: type) -> Iterator[str]:
    yield from ("", "| member | type | default |", "|---|---|---|")
    for field in fields(value):
        kind = str(field.type).replace("|", "\\|")
        yield f"| `{field.name}` | `{kind}` | {_default(field)} |"


def _default(field: Field[object]) -> str:
    if field.default_factory is not MISSING:
        return f"`{field.default_factory()!r}`"
    return "required" if field.default is MISSING else f"`{field.default!r}`"


def _methods(value: type) -> Iterator[str]:
    for name, member in list(vars(value).items()):
        function = getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            yield from ("", f"### `{name}`", "", *_function(name, function))
        elif name in getattr(value, "__annotations__", ()):
            yield from ("", f"### `{name}`", "", f"`{value.__annotations__[name]} = {member!r}`")


class LogEvent:
    """The levels and fields of one log event, over all places that log it."""

    def __init__(self) -> None:
        self.levels: set[int] = set()
        self.fields: dict[str, None] = {}

    def level(self) -> str:
        """Return the names of the levels, the lowest first."""
        return ", ".join(LEVEL_NAMES[level] for level in sorted(self.levels))


def log_events() -> dict[str, LogEvent]:
    """Return every log event of the sources, by name."""
    found: dict[str, LogEvent] = defaultdict(LogEvent)
    for file in (file for root in SOURCES for file in sorted(root.rglob("*.py"))):
        for name, level, fields_of in _logged(ast.parse(file.read_text())):
            found[name].levels.add(level)
            found[name].fields |= dict.fromkeys(fields_of)
    return dict(sorted(found.items()))


def _logged(module: ast.Module) -> Iterator[tuple[str, int, list[str]]]:
    """Yield the name, level and fields of each log call of a module.

    A call with a variable event logs every event that is assigned to a variable `event` there.
    """
    nodes = list(ast.walk(module))
    named = [
        node.value.value
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "event"
        and isinstance(node.value, ast.Constant)
    ]
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        if (level := _level(node.func)) is not None and node.args:
            fields_of = [item.arg for item in node.keywords if item.arg and item.arg != "exc_info"]
            if isinstance(node.func, ast.Name):
                fields_of.append("further")
            first = node.args[0]
            events = [first.value] if isinstance(first, ast.Constant) else named
            yield from ((event, level, fields_of) for event in events if EVENT.fullmatch(event))
        for item in node.keywords:  # threading.Thread(target=log.error, args=(event,))
            level = _level(item.value)
            if item.arg == "target" and level is not None:
                events = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                yield from ((event, level, []) for event in events if EVENT.fullmatch(str(event)))


def _level(function: ast.expr) -> int | None:
    if isinstance(function, ast.Name) and function.id == CLIENT_WARNING:
        return LEVELS["warning"]
    is_log = isinstance(function, ast.Attribute) and ast.unparse(function.value) == "log"
    return LEVELS.get(function.attr) if is_log and isinstance(function, ast.Attribute) else None


def event_texts() -> tuple[dict[str, str], dict[str, str]]:
    """Return the meaning of each event, and the renamed events (old to new)."""
    texts = tomllib.loads(EVENT_TEXTS.read_text())
    renamed: dict[str, str] = texts["renamed"]
    meanings: dict[str, str] = texts["meaning"]
    return {renamed.get(name, name): text for name, text in meanings.items()}, renamed


def log_events_page() -> str:
    """Return the page of log events, from the sources and `log-events.toml`."""
    meanings, renamed = event_texts()
    lines = [
        "# Log events",
        "",
        "Generated from the sources and `docs/log-events.toml` by `docs/generate.py`.",
        "",
        "Under systemd each line is one JSON object; on a terminal it is plain text. The member `event`",
        "is one of the names below. `timestamp` and `level` are always present; an exception adds",
        "`exception`, a traceback. Scripts may rely on the names and the fields.",
        "",
        "Events with the field `further` are rate-limited: it counts the lines that were left out.",
        "",
        "| event | level | meaning | fields |",
        "|---|---|---|---|",
    ]
    for name, event in log_events().items():
        fields_of = ", ".join(f"`{item}`" for item in event.fields)
        lines.append(f"| `{name}` | {event.level()} | {meanings[name]} | {fields_of} |")
    lines += ["", "## Renamed events", ""]
    if renamed:
        lines += ["| until 0.2 | now |", "|---|---|"]
        lines += [f"| `{old}` | `{new}` |" for old, new in sorted(renamed.items())]
    else:
        lines.append("None so far.")
    return "\n".join(lines) + "\n"


def errors_by_code() -> dict[str, type[errors.AgentdError]]:
    """Return the classes with a code of their own, by code; the most general one counts."""
    for name in MODULES_WITH_ERRORS:
        importlib.import_module(name)
    found: dict[str, type[errors.AgentdError]] = {}
    pending: list[type[errors.AgentdError]] = [errors.AgentdError]
    while pending:
        kind = pending.pop(0)
        if "code" in vars(kind):
            found.setdefault(kind.code, kind)
        pending += kind.__subclasses__()
    return found


def error_texts() -> dict[str, dict[str, str]]:
    """Return the cause and the remedy of each code of `errors.toml`."""
    texts: dict[str, dict[str, str]] = tomllib.loads(ERROR_TEXTS.read_text())
    classes = errors_by_code()
    for code, text in texts.items():
        if "cause" not in text:
            text["cause"] = inspect.cleandoc(classes[code].__doc__ or "").split("\n\n")[0]
            text["cause"] = " ".join(text["cause"].split())
    return texts


SCOPE_TEXTS = {
    Scope.REQUEST: ("fails at every node", "raises the error", "returns the node's answer"),
    Scope.NODE: ("fails here", "raises the error", "tries another node"),
    Scope.MOMENT: ("may succeed later", "repeats the call", "tries another node"),
    Scope.UNKNOWN: (
        "completes it, if it has a `kernel_id`",
        "repeats a 503",
        "returns the node's answer; only this node is asked again",
    ),
}
"""Consequences of a failure by its scope: on repetition, in clients, and in a fleet."""


def errors_page() -> str:
    """Return the page of error codes, from `agentd.errors` and `errors.toml`."""
    texts = error_texts()
    clients = [code for code in texts if code not in ERROR_CODES]
    return "\n".join(
        [
            "# Error codes",
            "",
            "Generated from `agentd.errors` and `docs/errors.toml` by `docs/generate.py`.",
            "",
            "Every error response is a problem (RFC 9457) with a `code`. Codes are stable; texts are not.",
            "`agentctl` prints the code before the detail, and `agentd.client` raises the class of the same",
            "name from `agentd.errors`. Members of each problem are listed in [RPC](rpc.md#errors).",
            "",
            "## Error responses",
            "",
            "| code | status | about | cause | remedy |",
            "|---|---|---|---|---|",
            *_error_rows((code for code in texts if code in ERROR_CODES), texts),
            "",
            "Each failure is about one of these (`agentd.error_codes`), and the rest follows from that:",
            "",
            "| about | the same request again | `agentd.client` | a fleet |",
            "|---|---|---|---|",
            *(f"| {scope} | {' | '.join(texts)} |" for scope, texts in SCOPE_TEXTS.items()),
            "",
            'A problem with `"scope": "node"` is about the node, whatever its code is about: an',
            "`InvalidRequest` for this node's settings, runtime or host, such as a missing mount source, a",
            "`CommandNotFound` of a kernel without an image, or a `NotReady` for a group of this host.",
            "A code that is not in the table, of a newer node, is about that node, or about the moment if",
            "its status is 503; with another 5xx the outcome is unknown.",
            "A fleet checks a body itself, so it asks other nodes about one node's `InvalidRequest`.",
            "",
            "A 503 has the header `Retry-After`: the seconds until the next try, which the client waits for.",
            "A node that answers a create with a 503 comes last in the choice of its fleet for 60 s; for",
            "an `ImageUnavailable` only if another node had the image.",
            "",
            "`agentctl` shows a refusal at once, except that of a create. `agentctl run` repeats a create",
            "for 15 s after a 503, and both `run` and `create` if its kernel may exist: after an",
            "`OutcomeUnknown` or an `AnswerLost`. A connection that held for more than 5 s before it was",
            "cut, as balancers do during a pull, starts the time again. The exit status is the same for all",
            "codes ([exit codes](exit-codes.md)), except for `CommandNotFound` of `agentctl run`.",
            "",
            "## Errors outside responses",
            "",
            "Programs print these, or a client raises them; no response has them.",
            "",
            "| code | cause | remedy |",
            "|---|---|---|",
            *(
                f"| `{code}` | {texts[code]['cause']} | {texts[code]['remedy']} |"
                for code in clients
            ),
            "",
            "If a client had sent the call, its `Unreachable` is of the class `AnswerLost`: the daemon may",
            "have carried it out. Repeat a create with its `kernel_id`, which returns the same kernel.",
            "",
        ]
    )


def _error_rows(codes: Iterable[str], texts: dict[str, dict[str, str]]) -> Iterator[str]:
    for code in codes:
        text = texts[code]
        row = ERROR_CODES[code]
        yield f"| `{code}` | {row.status} | {row.scope} | {text['cause']} | {text['remedy']} |"


def commands_page() -> str:
    """Return the page of commands: `commands-head.md`, then the help of each command."""
    lines = [COMMANDS_HEAD.read_text().rstrip()]
    added = {"agentd-slurm": agentd_slurm, "agentctl slurm": agentctl_slurm}
    programs = {str(program.name): program for program in (agentctl, agentd, agentd_fleet)}
    for name, program in (programs | added).items():
        lines += [] if " " in name else ["", f"## {name}"]
        for words, command in _commands(program, name):
            lines += _command(words, command)
    return "\n".join(lines) + "\n"


def _commands(command: click.Command, words: str) -> Iterator[tuple[str, click.Command]]:
    """Yield the visible commands below one, with the words that call them."""
    yield words, command
    if isinstance(command, click.Group):
        for name, below in sorted(command.commands.items()):
            if not below.hidden:
                yield from _commands(below, f"{words} {name}")


def _command(words: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=words)
    if " " in words:
        yield from ("", f"### {words}")
    usage = f"{words} {' '.join(command.collect_usage_pieces(context))}"
    yield from ("", "```text", *textwrap.wrap(usage, WIDTH, subsequent_indent="    "), "```")
    for part in (command.help or "").replace("\f", "").split("\n\n"):
        text = inspect.cleandoc(part)
        if text.startswith(("\b", "agentctl ", "agentd ")):
            yield from ("", "```text", text.removeprefix("\b").strip(), "```")
        elif text:
            text = re.sub(r'"(agent[^"]*)"', r"`\1`", text)
            yield from ("", *textwrap.wrap(text, WIDTH, break_on_hyphens=False))
    options = [
        record
        for item in command.params
        if isinstance(item, click.Option)
        and "--help" not in item.opts
        and (record := item.get_help_record(context))
    ]
    if options:
        yield from ("", "| option | |", "|---|---|")
        for option, text in options:
            shown, meaning = (item.replace("|", "\\|") for item in (option, text))
            yield f"| `{shown}` | {meaning} |"


BODIES: dict[str, type[Body]] = {
    body.__name__: body
    for body in (*(route.body for route in ROUTES), ExecRequest, Placement)
    if body is not None
}
"""The bodies of requests, by name."""
MEMBERS = re.compile(r"(<!-- members of (\w+), .*?-->\n).*?(?=<!-- end of members -->)", re.DOTALL)
VALUES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "`true` or `false`",
    "array": "list",
    "object": "object",
}
"""The words for the types of JSON Schema."""


def page_with_members(page: Path) -> str:
    """Return a page with the table of members at each of its marks."""
    return MEMBERS.sub(lambda mark: f"{mark[1]}{members_table(BODIES[mark[2]])}", page.read_text())


def members_table(body: type[Body]) -> str:
    """Return the table of a body's members, from its JSON Schema."""
    schema = body.model_json_schema()
    rows = ["| member | value | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*rows, *_member_rows(schema, schema.get("$defs", {}), "")]) + "\n"


def _member_rows(schema: dict[str, Any], defs: dict[str, Any], before: str) -> Iterator[str]:
    for name, member in schema["properties"].items():
        default = "required" if name in schema.get("required", ()) else ""
        if member.get("default") not in (None, [], {}):
            default = f"`{json.dumps(member['default'])}`"
        value = " or ".join(dict.fromkeys(_values(member, defs)))
        yield f"| `{before}{name}` | {value} | {default} | {member['description']} |"
        for place, below in _objects(member, f"{before}{name}"):
            if "properties" in defs[below]:
                yield from _member_rows(defs[below], defs, f"{place}.")


def _values(schema: dict[str, Any], defs: dict[str, Any]) -> Iterator[str]:
    """Yield the kinds of values that a schema takes; none is the default of what may be null."""
    if "$ref" in schema:
        schema = defs[_referred(schema)]
    if "enum" in schema:
        yield ", ".join(f"`{json.dumps(choice)}`" for choice in schema["enum"])
    elif "anyOf" in schema:
        for choice in schema["anyOf"]:
            yield from _values(choice, defs)
    elif schema["type"] != "null":
        yield VALUES[schema["type"]]


def _referred(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _objects(schema: dict[str, Any], place: str) -> Iterator[tuple[str, str]]:
    """Yield the objects with members of their own in a schema: their place and their name."""
    if "$ref" in schema:
        yield place, _referred(schema)
    if "items" in schema:
        yield from _objects(schema["items"], f"{place}[]")
    for value in schema.get("patternProperties", {}).values():
        yield from _objects(value, f"{place}.*")
    for choice in schema.get("anyOf", ()):
        yield from _objects(choice, place)


def binary_size(count: int) -> str:
    """Return bytes in the largest binary unit in which they are whole."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count:,}"


class Limit(NamedTuple):
    """A limit: what is counted, how many there may be, and the answer to one more.

    `shown` is the text of a maximum that depends on the node; `maximum` is then that of the test.
    """

    name: str
    counted: str
    maximum: int
    answer: str
    shown: str = ""


INVALID = "InvalidRequest"
REFUSING = {
    "Bodies of requests": (
        Limit("body", "bytes of a body", gate.MAX_BODY, "BodyTooLarge"),
        Limit(
            "parts", "objects, members and fractions of a body together", bodies.MAX_PARTS, INVALID
        ),
        Limit(
            "words",
            "words of a command, an entrypoint, or names in a list",
            bodies.MAX_WORDS,
            INVALID,
        ),
        Limit(
            "command", "bytes of a command with its entrypoint", bodies.MAX_COMMAND_BYTES, INVALID
        ),
        Limit("variables", "variables, or labels", bodies.MAX_VARIABLES, INVALID),
        Limit(
            "items",
            "slots, device names, mounts, ports, or tmpfs mounts",
            bodies.MAX_ITEMS,
            INVALID,
        ),
        Limit("groups", "groups", MAX_GROUPS, INVALID),
        Limit("group-id", "number of a group", MAX_GROUP_ID, INVALID),
        Limit("edits", "claims of `POST /v1/edits`", bodies.MAX_ITEMS, INVALID),
        Limit("text", "characters of a word, or of a variable's value", bodies.MAX_TEXT, INVALID),
        Limit(
            "path",
            "characters of a path, of an image, or of the first word of a command",
            bodies.MAX_PATH,
            INVALID,
        ),
        Limit(
            "name",
            "characters of a name: of a variable, a label, a slot, a user, a holder",
            bodies.MAX_NAME,
            INVALID,
        ),
        Limit("id", "characters of the id of a kernel or claim", bodies.MAX_ID, INVALID),
        Limit("amount", "characters of an amount", slots.MAX_TEXT, "InvalidSlotAmount"),
        Limit("ttl", "seconds of a `ttl`", MAX_TTL_S, INVALID),
        Limit("engine", "conditions of an engine", MAX_CONDITIONS, INVALID),
        Limit("sentence", "characters of a reason, or of a remedy", MAX_SENTENCE, INVALID),
        Limit("timeout", "seconds of the timeout of a stop", int(queries.MAX_TIMEOUT_S), INVALID),
        Limit("page", "entries that a list is asked for", queries.MAX_PAGE, INVALID),
    ),
    "Labels": (
        Limit(
            "labels", "bytes of the labels of a kernel or claim", labels.MAX_LABELS_BYTES, INVALID
        ),
        Limit(
            "labels-agent",
            "bytes of the labels of an agent's kernels and claims, for a claim",
            labels.MAX_AGENT_BYTES,
            "TooManyClaims",
            "4 MiB, and 16 MiB divided by the number of agents",
        ),
        Limit(
            "labels-agent-kernel",
            "bytes of the same, for a kernel",
            labels.MAX_AGENT_BYTES,
            "InsufficientResource",
            "4 MiB, and 16 MiB divided by the number of agents",
        ),
        Limit(
            "labels-node",
            "bytes of the labels of all kernels and claims of the node, for a claim",
            labels.MAX_NODE_BYTES,
            "TooManyClaims",
        ),
        Limit(
            "labels-node-kernel",
            "bytes of the same, for a kernel",
            labels.MAX_NODE_BYTES,
            "InsufficientResource",
        ),
    ),
    "Claims": (
        Limit("claims", "claims of the node", MAX_CLAIMS, "TooManyClaims"),
        Limit(
            "claims-agent",
            "claims of an agent",
            MAX_CLAIMS // 2,
            "TooManyClaims",
            f"{MAX_CLAIMS:,} divided by the number of agents",
        ),
        Limit(
            "pids",
            "claims of an agent that end with a process",
            1024 // 2 // 2,
            "TooManyClaims",
            "half of agentd's file descriptors, divided by the number of agents",
        ),
    ),
    "Streams": (
        Limit(
            "streams",
            "open streams of one caller: logs, events, execs",
            streaming_responses.MAX_STREAMS,
            "TooManyStreams",
        ),
    ),
    "Plugins": (
        Limit("devices", "devices of a plugin", validation.MAX_DEVICES, "InvalidAnswer"),
        Limit("slot-types", "slot types of a plugin", validation.MAX_SLOT_TYPES, "InvalidAnswer"),
        Limit(
            "secondary", "secondary slots of a device", validation.MAX_SECONDARY, "InvalidAnswer"
        ),
        Limit("conditions", "conditions of a plugin", validation.MAX_CONDITIONS, "InvalidAnswer"),
    ),
    "Configuration": (
        Limit("config", "bytes of `agent.toml`", regular_files.MAX_BYTES, "ConfigRefused"),
        Limit(
            "agent-id", "characters of the id of an agent", section.MAX_AGENT_ID, "ConfigRefused"
        ),
        Limit(
            "socket", "bytes of the path of a unix socket", section.MAX_SOCKET_PATH, "ConfigRefused"
        ),
    ),
}
"""The limits beyond which a request is refused; `tests/test_limits.py` reaches each."""
OTHER_LIMITS = (
    (
        "requests",
        "requests of one caller at the same time",
        f"{request_turns.MAX_AT_ONCE}",
        "the next ones wait",
    ),
    (
        "tcp",
        "connections over TCP",
        "`rpc.max-connections`, and a quarter of the file descriptors",
        "the next one is closed",
    ),
    (
        "sockets",
        "connections of a further socket",
        "an eighth of the file descriptors, divided by the number of these sockets",
        "the next one is closed",
    ),
    (
        "header",
        "time for a TLS handshake, and for a header",
        f"{connection.HEADER_TIMEOUT_S:g} s each",
        "the connection is closed",
    ),
    ("body", "time for a body", f"{queries.BODY_TIMEOUT_S:g} s", "408 `RequestTimeout`"),
    (
        "reading",
        "time without reading a response",
        f"{connection.READ_TIMEOUT_S:g} s",
        "the connection is closed",
    ),
    (
        "frame",
        "bytes of a frame of an exec",
        binary_size(websocket.MAX_FRAME),
        "the WebSocket is closed with 1009",
    ),
    (
        "control",
        "control frames of an exec in a second",
        f"{websocket.MAX_CONTROL}",
        "the WebSocket is closed with 1008",
    ),
    (
        "resume",
        "events that a client can resume from",
        f"the last {events.MAX_EVENTS:,}",
        "event `reset`",
    ),
    ("behind", "events that a client is behind", f"{events.MAX_EVENTS:,}", "the stream is closed"),
    ("entries", "entries of a page of a list", f"{queries.MAX_PAGE:,}", "the next page has them"),
    (
        "bytes",
        "bytes of a page of a list",
        binary_size(queries.MAX_PAGE_BYTES),
        "the next page has the next entries",
    ),
    (
        "refusals",
        "listed refusals",
        f"{refusals.MAX_KEPT:,} of the last hour",
        "the oldest is dropped",
    ),
    (
        "ended",
        "ended kernels that are kept",
        f"{Settings().node.keep_ended:,} (`node.keep-ended`)",
        "the oldest of an agent with more than an equal part is deleted",
    ),
    (
        "records",
        "bytes of the records of ended kernels",
        binary_size(retention.MAX_ENDED_BYTES),
        "the oldest of an agent with more than an equal part is deleted",
    ),
    (
        "command",
        "bytes of the command, mounts, or names of variables that a kernel shows",
        binary_size(kernel_service.MAX_SAVED_BYTES),
        "it shows none",
    ),
    (
        "problems",
        "entries of `errors` of a refusal",
        f"{errors.MAX_PROBLEMS}, each with {errors.MAX_WHERE} characters of `where` and {errors.MAX_WHY:,} of `why`",
        "the others are left out",
    ),
    (
        "processes",
        "processes of a kernel",
        f"{Settings().runtime.docker.pids_limit:,} (`pids-limit`)",
        "fork(2) fails",
    ),
    (
        "log",
        "log of a process or docker kernel",
        "`log-max-files` files of `log-max-size`",
        "the oldest file is deleted",
    ),
)
"""The limits beyond which nothing is refused; `tests/test_limits.py` names a test of each."""


def limits_page() -> str:
    """Return the page of limits, from the constants of the code."""
    lines = [
        "# Limits",
        "",
        "Generated from the constants of the code by `docs/generate.py`. How much a node can carry stands",
        "in [plan capacity](../operations/capacity.md).",
        "",
        "## Limits that refuse",
        "",
        "A request may reach each of these, and one more is refused. `tests/test_limits.py` does both for",
        "each row: bodies as they are read, claims and labels among stand-ins for the others of the node,",
        "and bodies, lists and streams of a daemon.",
        "",
        "Limits of bytes count UTF-8. The numbers of a member are in the",
        "[OpenAPI document](rpc.md#calls), too.",
    ]
    for heading, rows in REFUSING.items():
        lines += ["", f"### {heading}", "", "| limit | at most | one more |", "|---|---|---|"]
        for row in rows:
            answer = {"Plugins": "the plugin is `failed`"}.get(heading, f"`{row.answer}`")
            if row.answer in ERROR_CODES and heading != "Configuration":
                answer = f"{ERROR_CODES[row.answer].status} `{row.answer}`"
            most = row.shown or f"{row.maximum:,}"
            if row.counted.startswith("bytes") and not row.shown:
                most = binary_size(row.maximum)
            lines.append(f"| {row.counted} | {most} | {answer} |")
    lines += [
        "",
        "A claim that ends with a process takes one of agentd's file descriptors (`LimitNOFILE=` of its",
        "unit). If the number of agents changes, or the descriptors are fewer, claims above a limit stay,",
        "and new ones are refused. Labels of ended kernels do not count.",
        "",
        "## Limits that refuse nothing",
        "",
        "| limit | at most | beyond it |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for _, *row in OTHER_LIMITS),
        "",
        "A caller is a token, or a user on a unix socket, with all its connections. A request that waits",
        "for a runtime, a plugin or a stream does not count as one at the same time, and `/livez` and",
        "`/readyz` never wait.",
    ]
    return "\n".join(lines) + "\n"


def blocking_client() -> str:
    """Return the module of the blocking client: that of the asyncio client without `async`."""
    text = ASYNC_CLIENT.read_text()
    text = text[text.index("from __future__") :]
    for word in ("async ", "await ", "Async"):
        text = text.replace(word, "")
    text = text.replace("agentd.client.stream_calls import StreamCalls", BLOCKING_BASE)
    before, _, rest = text.partition("class Client")
    calls = rest.partition('"""')[2].partition('"""\n')[2]
    return BLOCKING_HEAD.format(imports=before.rstrip()) + calls


PAGES = {
    BLOCKING_CLIENT: blocking_client,
    COMMANDS: commands_page,
    STATES: states_page,
    PLUGIN_API: plugin_api_page,
    LOG_EVENTS: log_events_page,
    ERRORS: errors_page,
    EXIT_CODES: exit_codes_page,
    PACKAGED: lambda: schema_text({}),
    RPC: lambda: page_with_members(RPC),
    FLEET: lambda: page_with_members(FLEET),
    LIMITS_PAGE: limits_page,
}
"""The generated pages, and the functions that return their text."""


if __name__ == "__main__":
    for page, text in PAGES.items():
        page.write_text(text())
