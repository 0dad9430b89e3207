"""Every parameter of every command has an effect, and refuses values that it cannot use.

Each command runs twice, without a parameter and with it. What it does outside of itself (calls of
a node, programs, daemons, output, exit status) must differ. Two options together must differ from
each of them alone.
"""

import builtins
import functools
import importlib
import io
import itertools
import json
import os
import pwd
import re
import secrets
import signal
import tempfile
import time
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints
from unittest.mock import patch

import click
import pytest
from click.testing import CliRunner
from typing_extensions import is_typeddict

from agentd import log, views
from agentd.cli.agentctl import exec as agentctl_exec
from agentd.cli.agentctl.main import agentctl
from agentd.cli.agentctl.options import MemberOption
from agentd.cli.agentctl.run import Run
from agentd.cli.agentd.main import agentd
from agentd.client import Client
from agentd.client.calls import Call
from agentd.client.errors import error_from_problem
from agentd.daemon import lifecycle
from agentd.pluginhost.conformance import Conformance
from agentd_fleet import daemon as fleet_daemon
from agentd_fleet.cli import agentd_fleet
from agentd_slurm.cli import agentctl_slurm, agentd_slurm
from agentd_slurm.commands import doctor, sync

USAGE = 2
MAX_EFFECTS = 60
"""Effects after which a command that goes on without an end is ended."""
URL = "http://127.0.0.1:6001"
TIME = "2026-01-01T00:00:00Z"
MEMBERS = {
    "at": TIME, "created_at": TIME, "started_at": TIME, "finished_at": TIME, "expires_at": TIME,
    "agent_id": "agent-1", "device_name": "cuda", "holder": {"ttl": 5}, "explain": {},
    "id": "cuda0", "numa_node": 0, "exit_code": 0, "agents": ["agent-1"], "files": [],
}  # fmt: skip
STATES = {
    views.KernelView: "terminated", views.KernelUseView: "running", views.RuntimeView: "available",
    views.PluginView: "ready",
}  # fmt: skip


class EnoughError(Exception):
    """A command goes on without an end."""


def sample(kind: Any) -> Any:
    """Return an answer of this type."""
    if is_typeddict(kind):
        members = {n: MEMBERS.get(n, sample(of)) for n, of in get_type_hints(kind).items()}
        return members | {"state": STATES[kind]} if kind in STATES else members
    arguments = [argument for argument in get_args(kind) if argument is not NoneType]
    match get_origin(kind):
        case builtins.list:
            return [sample(arguments[0])]
        case builtins.dict:
            return {sample(arguments[0]): sample(arguments[1])}
        case typing.Literal:
            return arguments[0]
        case typing.Union | types.UnionType:
            return sample(arguments[0])
    return {str: "1", int: 1, float: 1.0, bool: True}.get(kind, {})


KERNEL = sample(views.KernelView)
FLEET_NODE = {"id": "n1", "state": "ready", "agents": {}, "seen_at": TIME, "url": "", "reason": ""}
FLEET_NODE |= {"labels": {}, "generation": 1, "conflicting": []}
ANSWERS: Sequence[tuple[str, Any]] = (
    ("POST /v1/agents/[^/]+/kernels.*dry_run", sample(views.DecisionView)),
    ("POST /v1/kernels.*dry_run", {**sample(views.DecisionView), "node_id": "n1", "agent_id": "1"}),
    ("POST /v1/agents/[^/]+/claims", sample(views.ClaimView)),
    ("POST /v1/claims/[^/]+/renew", sample(views.ClaimView)),
    ("GET /v1/nodes/[^/]+/stats", [sample(views.KernelUseView)]),
    ("GET /v1/kernels/[^/]+/stats", sample(views.KernelUseView)),
    ("fleet GET /v1/stats", {"slots": {}}),
    ("GET /v1/stats", [sample(views.KernelUseView)]),
    ("GET /v1/kernels/removed$", error_from_problem({"code": "UnknownKernel", "detail": "no"})),
    ("GET /v1/kernels/[^/?]+$", KERNEL),
    ("GET /v1/kernels", [KERNEL | {"node_id": "n1"}]),
    ("POST /v1/.*kernels", KERNEL | {"node_id": "n1"}),
    ("GET /v1/claims", [sample(views.ClaimView)]),
    ("GET /v1/nodes", [FLEET_NODE]),
    ("POST /v1/nodes/[^/]+/(un)?cordon", FLEET_NODE),
    ("GET /v1/node$", sample(views.NodeView)),
    ("GET /v1/node", sample(views.NodeView)),
    ("GET /v1/agents/[^/]+/kernels", [KERNEL]),
    ("GET /v1/agents", [sample(views.AgentView)]),
    ("GET /v1/devices", [sample(views.DeviceView)]),
    ("POST /v1/devices", sample(views.DeviceView)),
    ("GET /v1/slot-types", [sample(views.SlotTypeView)]),
    ("GET /v1/plugins", [sample(views.PluginView)]),
    ("POST /v1/plugins", sample(views.PluginView)),
    ("GET /v1/runtimes", [sample(views.RuntimeView)]),
    ("GET /v1/whoami", sample(views.CallerView)),
    ("POST /v1/reload", sample(views.ReloadView)),
)
EVENT = b'id: 1\nevent: kernel\ndata: {"kernel_id": "k1", "state": "running"}\n\n'


class Response(io.BytesIO):
    """The part of `http.client.HTTPResponse` that commands use."""

    headers: Mapping[str, str] = MappingProxyType({"Log-Position": "0"})
    length = None


class Recorder:
    """Recorded effects of a command, and the answers to its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._labels: dict[str, str] = {}

    def add(self, *facts: Any) -> None:
        """Record an effect, with generated ids made equal."""
        self.calls.append(re.sub(r"[0-9a-f]{12,}", "#", repr(facts)))
        if len(self.calls) > MAX_EFFECTS:
            raise EnoughError

    def open(self, client: Client, call: Call[Any], timeout_s: float | None = None) -> Response:
        """Answer a call in place of `Client.open`."""
        where = (client._socket_path, client._url, client._token)
        timeout = None if timeout_s is None else round(timeout_s)
        self.add(*where, call.method, call.path, call.body, call.headers, timeout)
        fleet = "fleet " if "fleet" in client._socket_path and call.path == "/v1/stats" else ""
        line = f"{fleet}{call.method} {call.path}"
        if call.body and call.path.endswith("/kernels"):
            self._labels = call.body.get("labels", {})
        if "/logs" in line:
            return Response(b"a line\n")
        if "/events" in line:
            return Response(EVENT)
        answer = next((answer for path, answer in ANSWERS if re.match(path, line)), None)
        if isinstance(answer, Exception):
            raise answer
        if re.match("GET /v1/kernels/[^/]+$", line):
            answer = {**KERNEL, "labels": self._labels}
        return Response(b"" if answer is None else json.dumps(answer).encode())

    def function(self, name: str, result: Any = None) -> Callable[..., Any]:
        """Return a function that records its arguments."""

        def record(*arguments: Any, **named: Any) -> Any:
            plain = [text for text in map(repr, arguments) if " at 0x" not in text]
            self.add(name, plain, named, [os.environ.get(v) or None for v in SLURM_VARIABLES])
            return result

        return record

    def async_recorder(self, name: str, result: Any = None) -> Callable[..., Any]:
        """Return a coroutine function that records its arguments."""
        record = self.function(name, result)

        async def function(*arguments: Any, **named: Any) -> Any:
            return record(*arguments, **named)

        return function

    def join(self, program: str, arguments: Sequence[str]) -> None:
        """Record the request to a publisher, in place of `os.execv`."""
        self.add(program, os.pread(int(arguments[-1]), 1 << 16, 0))
        os.close(int(arguments[-1]))
        raise SystemExit(0)

    def daemon(self, name: str) -> Callable[..., Any]:
        """Return a daemon's class that records its settings."""
        recorder = self

        class RecordedDaemon:
            def __init__(self, settings: Any, *_: Any) -> None:
                recorder.add(name, getattr(settings, "source", None) or str(settings))

            async def run(self) -> None: ...

        return RecordedDaemon


SLURM_VARIABLES = ("AGENTD_SOCKET", "AGENTD_SLURM_MAP")
SIM = '[plugins]\nallow = ["sim"]\n[plugins.{}]\nplugin = "sim"\ncount = 1\n'
CREDENTIALS = '[[rpc.tokens]]\nname = "one"\nfile = "/{}"\nrole = "admin"\n'
FILES = {
    "a.toml": f'[rpc]\nsocket = "/a.sock"\n{CREDENTIALS}{SIM.format("cuda")}',
    "b.toml": f'[rpc]\nsocket = "/b.sock"\n{SIM.format("other")}',
    "fleet-a.toml": '[fleet]\nname = "a"\netcd = ["http://127.0.0.1:1"]\n',
    "fleet-b.toml": '[fleet]\nname = "b"\netcd = ["http://127.0.0.1:1"]\n',
    "text": "secret\n",
}


class Effects(NamedTuple):
    """The effects of a command: its calls, each once, and the rest of its outcome."""

    calls: list[str]
    output: str
    status: int
    files: Mapping[str, bytes]


def effects_of(
    words: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})
) -> Effects:
    """Run a command on files of its own, with stand-ins for what it would reach."""
    recorder = Recorder()
    claim_module = importlib.import_module("agentd.cli.agentctl.claim")
    stand_ins: list[tuple[Any, str, Any]] = [
        (
            Client,
            "open",
            lambda client, call, timeout_s=None: recorder.open(client, call, timeout_s),
        ),
        (agentctl_exec, "_run_exec", recorder.async_recorder("exec", 0)),
        (Run, "_print_output", lambda _: None),
        (
            importlib.import_module("agentd.cli.agentctl.ui"),
            "_serve",
            recorder.async_recorder("ui"),
        ),
        (claim_module, "_find_account", lambda _: pwd.getpwuid(0)),
        (claim_module, "_become", lambda account, env: {**env, "USER": account.pw_name}),
        (os, "execvpe", recorder.function("execvpe")),
        (os, "execv", recorder.join),
        (time, "sleep", recorder.function("sleep")),
        (time, "strftime", lambda *_: "12:00:00"),
        (signal, "signal", recorder.function("signal")),
        (secrets, "token_urlsafe", lambda _: "token"),
        (log, "configure", recorder.function("log.configure")),
        (lifecycle, "Daemon", recorder.daemon("agentd")),
        (fleet_daemon, "GatewayDaemon", recorder.daemon("gateway")),
        (Conformance, "run", recorder.async_recorder("conformance", [])),
        (sync, "run_sync", recorder.function("sync", 0)),
        (doctor, "checks", recorder.function("doctor", [])),
    ]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("AGENT", "SLURM"))}
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {**environ, **variables}, clear=True),
        pytest.MonkeyPatch.context() as patched,
    ):
        for owner, name, stand_in in stand_ins:
            patched.setattr(owner, name, stand_in)
        patched.chdir(folder)
        for name, text in FILES.items():
            Path(name).write_text(text)
        done = CliRunner().invoke(PROGRAMS[words[0]], words[1:])
        files = {file.name: file.read_bytes() for file in Path().iterdir()}
    if done.exception and not isinstance(done.exception, SystemExit | EnoughError):
        raise AssertionError(words) from done.exception
    output = re.sub(r"[0-9a-f]{12,}", "#", done.output.replace(folder, ""))
    return Effects(sorted(set(recorder.calls)), output, done.exit_code, files)


CONFIG = ("--config", "a.toml")
OPTIONS: dict[str, Sequence[str]] = {
    "agentctl --token-file": ("--url", URL),
    "agentctl wait --timeout": ("--for", "removed"),
    "agentctl token create": ("--agent", "agent-1", "--file", "t1"),
    "agentctl token create --role": ("--file", "t1"),
    "agentctl token create --gateway": ("--file", "t1"),
    "agentctl token revoke": CONFIG,
    "agentctl slurm gres --types": ("--json",),
    "agentctl slurm gres --type": ("--json",),
    "agentctl slurm gres --node": ("--files", "/dev/agentd"),
}
"""Options of both runs, by command, or by command and parameter."""
STATUSES = {
    "agentctl top": 1, "agentctl fleet top": 1, "agentctl wait --timeout": 1,  # they do not end
    "agentctl fleet nodes forget": 1,  # not confirmed
    "agentctl events": 1,  # it resumes
    "agentctl slurm gres": 1,  # the device has no file
    "agentctl slurm gres --types": 0, "agentctl slurm gres --type": 0,  # the map has none
    "agentctl slurm gres --node": 0,  # it has a stand-in
    "agentctl token create --role": 2, "agentctl token create --gateway": 2,  # no --agent
    "agentd config init": 1,  # the file exists
    "agentd": 2, "agentd-fleet": 2,  # no subcommand
}  # fmt: skip
"""Exit statuses without the parameter, where that is not 0."""
SUBCOMMANDS = {"agentctl": ("whoami",), "agentd-slurm": ("sync",)}
"""The subcommand on which the options of a group are tried."""
VALUES = {
    "devices": "cuda=cuda0", "mounts": "/a:/b", "ports": "80", "tmpfs": "/t",
    "ulimits": "nofile=5", "slots": "cuda.device=1", "env": "a=b", "label": "a=b",
    "labels": "a=b", "on": "a=b", "timeout": "0",
    "config": "b.toml", "config_file": "b.toml", "token_file": "text", "pids_limit": "7",
    "agentd check-config --config": "wrong.toml",
    "agentd-fleet check-config --config": "wrong.toml",
    "agentd-fleet gateway --config": "fleet-b.toml", "agentd-fleet join --config": "fleet-b.toml",
    "tail": "7", "interval": "7.5", "count": "1", "ttl": "7", "fleet_address": "unix:/f.sock",
    "since": TIME, "url": URL, "agentctl slurm gres --files": "/dev/agentd",
    "agentctl ui --port": "80", "agentctl fleet ui --port": "80",
}  # fmt: skip
"""Values of options that are not any text."""
ARGUMENTS = {
    "agentd plugin check name": ("cuda", "none"), "device": ("cuda0", "cuda1"),
    "file": ("a.toml", "new.toml"), "key": ("node.id", "node.runtime"),
    "signal": ("INT", "KILL"),
}  # fmt: skip
"""Two values of each argument that is not any text."""


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, f"{path} {name}")


PROGRAMS: dict[str, click.Group] = {
    "agentctl": agentctl, "agentd": agentd, "agentd-fleet": agentd_fleet,
    "agentd-slurm": agentd_slurm,
}  # fmt: skip
ADDED = {"agentctl slurm": agentctl_slurm}
"""Commands of other distributions."""
COMMANDS = {
    path: command
    for name, program in [*PROGRAMS.items(), *ADDED.items()]
    for path, command in commands(program, name)
}


EMPTY_PARAMETERS = {
    "entrypoint": "it removes the entrypoint of the image",
    "command": "a word of the caller's command",
    "value": "the value of a setting",
    "reason": "a node without a reason",
}
"""Parameters that may be empty, and what an empty one means."""
NOT_FINITE = ("nan", "inf", "-inf", "1e999")
FORMATS = ("--json", "--output", "--quiet")
PAIRS_WITHOUT_EFFECT = {
    ("--async", "--dry-run"): "a kernel that is not created is not waited for",
    ("--rm", "--dry-run"): "nor removed",
    ("--for", "--timeout"): "the kernel of the test has ended: nothing is waited for",
    ("--role", "--gateway"): "the role of a gateway is admin; any other is refused",
    ("--agent", "--json"): "the node of the test does not have the agent",
    ("--agent", "--files"): "the same",
    ("--agent", "--types"): "the same",
    ("--agent", "--type"): "the same",
    ("--agent", "--node"): "the same",
    ("--json", "--files"): "the map names no files",
    ("--types", "--files"): "the same",
    ("--type", "--files"): "the same",
    ("--json", "--node"): "the map is of one node",
    ("--types", "--node"): "the same",
    ("--type", "--node"): "the same",
    ("--types", "--json"): "the command of the test has it already",
    ("--type", "--json"): "the same",
    ("--id", "--scope"): "the command runs again in its scope, with all of its words",
    ("-s", "--scope"): "the same",
    ("--device", "--scope"): "the same",
    ("--label", "--scope"): "the same",
    ("--scope", "--user"): "the same",
    **{(one, other): "one of them is the format" for one in FORMATS for other in FORMATS},
}
"""Pairs of options where one has no effect beside the other, and why."""
SLOW = ("agentd plan", "agentd plugins", "agentd check-config", "agentd plugin check")
"""Commands that start plugins; their options are shared with others."""
VARIABLES: Sequence[tuple[str, str, tuple[str, ...]]] = (
    ("AGENTD_SOCKET", "/v.sock", ("agentctl", "whoami")),
    ("AGENTD_URL", URL, ("agentctl", "whoami")),
    ("AGENTD_CONFIG", "b.toml", ("agentctl", "whoami")),
    ("AGENTD_CONFIG", "b.toml", ("agentd", "config", "show")),
    ("AGENTD__RPC__SOCKET", "/v.sock", ("agentctl", "whoami")),
    ("AGENTD_TOKEN_FILE", "text", ("agentctl", "--url", URL, "whoami")),
    ("AGENTCTL_FLEET", "unix:/v.sock", ("agentctl", "whoami")),
    ("AGENTCTL_FLEET", "unix:/v.sock", ("agentctl", "fleet", "ls")),
    ("AGENTD_FLEET_CONFIG", "fleet-a.toml", ("agentd-fleet", "join-options")),
)
"""Variables that replace options, with a value, and words of a command that they change."""


def value_of(path: str, option: click.Option) -> list[str]:
    """Return the words that follow an option: none for a flag."""
    if option.is_flag:
        return []
    if isinstance(option.type, click.Choice):
        return [next(str(c) for c in option.type.choices if c != option.default)]
    value = VALUES.get(f"{path} {option.opts[-1]}") or VALUES.get(str(option.name))
    return [value or "other"]


def words_of(path: str, parameter: click.Parameter, *, changed: bool) -> tuple[str, ...]:
    """Return the words of a command without a parameter, or with it."""
    if not isinstance(parameter, click.Option):
        return with_words(path, parameter, argument=values_of(path, parameter)[changed])
    option = (parameter.opts[-1], *value_of(path, parameter)) if changed else ()
    return with_words(path, parameter, option)


def values_of(path: str, argument: click.Parameter) -> tuple[str, str]:
    """Return two values of an argument."""
    if isinstance(argument.type, click.Choice):
        first, second, *_ = argument.type.choices
        return str(first), str(second)
    return ARGUMENTS.get(f"{path} {argument.name}") or ARGUMENTS.get(
        str(argument.name), ("one", "other")
    )


def with_words(
    path: str, parameter: click.Parameter, option: Sequence[str] = (), argument: str | None = None
) -> tuple[str, ...]:
    """Return the words of a command with further ones, or with a value of the argument."""
    if path in SUBCOMMANDS:
        both = OPTIONS.get(f"{path} {parameter.opts[-1]}", ())
        return (path, *both, *option, *SUBCOMMANDS[path])
    parameters = COMMANDS[path].params
    config = CONFIG if path.startswith("agentd ") else ("--config", "fleet-a.toml")
    has_config = any(each.name == "config_file" for each in parameters)
    options = OPTIONS.get(path, config if has_config else ())
    options = OPTIONS.get(f"{path} {parameter.opts[-1]}", options)
    arguments = [
        values_of(path, each)[0] if argument is None or each is not parameter else argument
        for each in parameters
        if isinstance(each, click.Argument)
    ]
    return (*path.split(), *options, *option, *arguments)


@pytest.mark.parametrize("path", [path for path, command in COMMANDS.items() if command.params])
def test_each_parameter_has_an_effect(path: str) -> None:
    effects, unused = functools.cache(effects_of), []
    for parameter in COMMANDS[path].params:
        name = f"{path} {parameter.opts[-1]}"
        words = words_of(path, parameter, changed=False)
        changed = effects(words_of(path, parameter, changed=True))
        assert effects(words).status == STATUSES.get(name, STATUSES.get(path, 0)), effects(words)
        assert changed.status != USAGE, (name, changed)
        if changed == effects(words):
            unused.append(name)
    assert unused == []
    assert effects_of(words) == effects(words), "the effects differ from run to run"


def may_be_tried(path: str, parameter: click.Parameter) -> bool:
    is_flag = isinstance(parameter, click.Option) and parameter.is_flag
    return not is_flag and not isinstance(parameter.type, click.Choice)


def status_with(path: str, parameter: click.Parameter, value: str) -> int:
    """Return the status of a command with a value of a parameter."""
    if isinstance(parameter, click.Option):
        return effects_of(with_words(path, parameter, (parameter.opts[-1], value))).status
    return effects_of(with_words(path, parameter, argument=value)).status


@pytest.mark.parametrize("path", [path for path, command in COMMANDS.items() if command.params])
def test_unusable_value_is_wrong_usage(path: str) -> None:
    for parameter in filter(functools.partial(may_be_tried, path), COMMANDS[path].params):
        name = f"{path} {parameter.opts[-1]}"
        if parameter.name not in EMPTY_PARAMETERS:
            assert status_with(path, parameter, "") == USAGE, name
        if path not in SLOW and status_with(path, parameter, "x") == USAGE:
            for value in NOT_FINITE:
                assert status_with(path, parameter, value) == USAGE, (name, value)


@pytest.mark.parametrize("path", [path for path in COMMANDS if path not in SLOW])
def test_options_have_an_effect_together(path: str) -> None:
    effects = functools.cache(effects_of)
    options = [each for each in COMMANDS[path].params if isinstance(each, click.Option)]
    for one, other in itertools.combinations(options, 2):
        names = (one.opts[-1], other.opts[-1])
        is_body = isinstance(one, MemberOption) and isinstance(other, MemberOption)
        if is_body or "--version" in names or {names, names[::-1]} & PAIRS_WITHOUT_EFFECT.keys():
            continue
        first, second = ((o.opts[-1], *value_of(path, o)) for o in (one, other))
        both = effects(with_words(path, one, (*first, *second)))
        alone = [effects(with_words(path, one, words)) for words in (first, second)]
        assert both.status == USAGE or both not in alone, names


@pytest.mark.parametrize("path", COMMANDS)
def test_each_spelling_of_an_option_is_the_same(path: str) -> None:
    for option in COMMANDS[path].params:
        if isinstance(option, click.Option) and len(option.opts) > 1 and path not in SLOW:
            first, *others = (
                effects_of(with_words(path, option, (spelling, *value_of(path, option))))
                for spelling in option.opts
            )
            assert others == [first] * len(others), option.opts


@pytest.mark.parametrize(("variable", "value", "words"), VARIABLES)
def test_variable_has_an_effect_unless_empty(
    variable: str, value: str, words: tuple[str, ...]
) -> None:
    effects = effects_of(words)
    assert effects_of(words, {variable: value}) != effects
    assert effects_of(words, {variable: ""}) == effects


OF_FLEET = [path for path in COMMANDS if path.startswith("agentctl fleet ")]


@pytest.mark.parametrize("path", OF_FLEET)
def test_command_with_fleet_is_that_of_the_fleet(path: str) -> None:
    """`agentctl --fleet ADDRESS ls` is `agentctl --fleet ADDRESS fleet ls`."""
    for parameter in COMMANDS[path].params:
        words = words_of(path, parameter, changed=True)[2:]
        program = ("agentctl", "--fleet", "unix:/fleet.sock")
        assert effects_of((*program, *words)) == effects_of((*program, "fleet", *words))
