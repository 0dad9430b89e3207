"""A reload takes everything or nothing, and says of each key whether it was taken."""

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentd.config.loading import load
from agentd.daemon import reload as module
from agentd.daemon.host_names import HostNames
from agentd.daemon.reload import Reload
from agentd.errors import ConfigRefused, Problem, StartRefused
from agentd.http.callers import Token
from agentd.http.credentials import build_endpoint, credential_weaknesses
from agentd.tomlfile import regular_files
from support.certificates import certificate

WORD = "0123456789abcdef"


class FakeServer:
    """Takes tokens and certificates, and counts them."""

    def __init__(self, *, has_tls: bool = False) -> None:
        self.has_tls = has_tls
        self.ungrouped: list[Any] = []
        self.tokens: list[Any] = []
        self.current_tokens: Sequence[Token] = ()
        self.contexts: list[object] = []

    def replace_tokens(self, tokens: Any) -> None:
        self.current_tokens = tokens
        self.tokens.append([token.secret for token in tokens])

    def assign_groups(self, find_group: object) -> None:
        """All sockets have their groups."""

    def replace_tls(self, context: object) -> None:
        self.contexts += [context] if context is not None else []


class Node:
    """A configuration in a folder, and its reload."""

    def __init__(self, folder: Path, *, has_tls: bool = False) -> None:
        self.folder = folder
        self.token = folder / "token"
        self.token.write_text(WORD)
        self.token.chmod(0o600)
        self.server = FakeServer(has_tls=has_tls)
        self.write()
        runtimes: Any = {}
        server: Any = self.server
        loaded = load(self.file, {})
        self.reload = Reload(loaded, server, runtimes, HostNames(loaded.settings))

    @property
    def file(self) -> Path:
        return self.folder / "agent.toml"

    @property
    def listening(self) -> str:
        return f'listen = "127.0.0.1:7001"\ntoken-file = "{self.token}"\n'

    def write(self, rpc: str | None = None, rest: str = "") -> None:
        text = self.listening if rpc is None else rpc
        self.file.write_text(f'[node]\nid = "n"\n{rest}[rpc]\n{text}')

    async def reloaded(self) -> tuple[list[str], list[str]]:
        """Return what waits for a restart, and why nothing was taken."""
        try:
            return await self.reload.apply_and_log(), []
        except ConfigRefused as refused:
            return [], refused.lines()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('tls-cert = "/tmp/\\u0000x"\ntls-key = "/k"\n', "expected printable characters"),
        ('tls-cert = "{fifo}"\ntls-key = "{fifo}"\n', "is a FIFO, expected a regular file"),
        (
            '[[rpc.tokens]]\nname = "t"\nrole = "read"\nfile = "{fifo}"\n',
            "is a FIFO, expected a regular file",
        ),
        (
            '[[rpc.tokens]]\nname = "t"\nrole = "read"\nfile = "/x/\\u0000"\n',
            "expected printable characters",
        ),
        ("[nonsense", "invalid TOML"),
    ],
)
async def test_a_reload_that_fails_takes_nothing_and_is_not_the_last(
    tmp_path: Path, line: str, why: str
) -> None:
    node = Node(tmp_path, has_tls=True)
    os.mkfifo(tmp_path / "fifo")
    node.token.write_text("another-token-that-is-long")
    node.write(node.listening + line.replace("{fifo}", str(tmp_path / "fifo")))
    waiting, reasons = await node.reloaded()
    assert (waiting, node.server.tokens) == ([], [])
    assert why in "; ".join(reasons)
    node.write()
    assert await node.reloaded() == ([], [])
    assert node.server.tokens == [["another-token-that-is-long"]]


async def test_emptied_file_changes_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.file.write_text("")
    assert await node.reloaded() == (
        [],
        [f"{node.file}: has no keys; a failed write may have emptied it"],
    )
    assert node.server.tokens == []


async def test_file_behind_a_mount_that_was_replaced_is_refused(tmp_path: Path) -> None:
    """A mount of a file, and not of its folder, keeps the file that an editor replaced."""
    node = Node(tmp_path)
    with node.file.open() as mounted:
        path = Path(f"/proc/self/fd/{mounted.fileno()}")
        node.reload = Reload(load(path, {}), node.reload._server, {}, node.reload._names)
        assert await node.reload.apply_and_log() == []
        node.file.unlink()
        with pytest.raises(ConfigRefused, match="was replaced on the host, but the mount keeps"):
            await node.reload.apply_and_log()


async def test_an_unforeseen_error_is_a_reason_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)

    def fails(*_: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(module, "load", fails)
    assert await node.reloaded() == ([], ["RuntimeError: no more"])
    monkeypatch.undo()
    assert await node.reloaded() == ([], [])


async def test_token_whose_file_is_silent_stays_and_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, answered, team = Node(tmp_path), threading.Event(), tmp_path / "team"
    team.write_text("a-token-of-a-team-that-is-long")
    team.chmod(0o600)
    node.write(f'{node.listening}[[rpc.tokens]]\nname = "t"\nfile = "{team}"\nrole = "read"\n')
    assert await node.reloaded() == ([], [])
    read = regular_files.read_regular

    def hang(path: Path, *arguments: Any) -> Any:
        if path == team:
            answered.wait(20)
        return read(path, *arguments)

    monkeypatch.setattr(regular_files, "read_regular", hang)
    monkeypatch.setattr("agentd.concurrency.ANSWER_TIMEOUT_S", 0.1)
    node.token.write_text("another-token-that-is-long")
    for _ in range(3):
        assert await node.reloaded() == ([], [])
        (condition,) = node.reload.conditions()
        expected = f"rpc.tokens.0.file: {team} cannot be read: no answer within 0.1 s"
        assert condition.reason == expected
    secrets = ["another-token-that-is-long", "a-token-of-a-team-that-is-long"]
    assert node.server.tokens[1:] == [secrets] * 3
    assert [thread.name for thread in threading.enumerate()].count(str(team)) == 1
    node.write()
    assert await node.reloaded() == ([], [])
    assert node.server.tokens[-1] == secrets[:1]
    answered.set()


PASSING = (
    *("ESTALE", "ENOTCONN", "EHOSTDOWN", "EHOSTUNREACH", "ETIMEDOUT", "ENOKEY", "EIO", "EMFILE"),
    *("ENETDOWN", "ENETUNREACH", "ECONNABORTED"),
)
"""Of a dead mount, of one whose server or key is not there, and of a host that lacks something."""


@pytest.mark.parametrize("name", PASSING)
async def test_file_that_cannot_be_read_for_now_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A start goes on, too; without its configuration it ends so that it is tried again."""
    node, genuine, number = Node(tmp_path, has_tls=True), os.open, getattr(errno, name)
    cert, key = certificate(tmp_path)
    node.write(f'{node.listening}tls-cert = "{cert}"\ntls-key = "{key}"\n')
    assert await node.reloaded() == ([], [])
    failing = {node.token, cert}

    def fail(path: Any, *arguments: Any, **options: Any) -> int:
        if path in failing:
            raise OSError(number, os.strerror(number), str(path))
        return genuine(path, *arguments, **options)

    monkeypatch.setattr(os, "open", fail)
    assert await node.reloaded() == ([], [])
    reason = f"cannot be read: {os.strerror(number)}"
    token, chain = (f"rpc.token-file: {node.token} {reason}", f"rpc.tls-cert: {cert} {reason}")
    assert [condition.reason for condition in node.reload.conditions()] == [token, chain]
    assert node.server.tokens[-1] == [WORD]
    missing: list[Problem] = []
    rpc = load(node.file, {}).settings.rpc
    assert build_endpoint(rpc, missing=missing).tokens == ()
    assert [str(problem) for problem in missing] == [chain, token]
    failing.add(node.file)
    with pytest.raises(StartRefused, match=reason):
        load(node.file, {})
    failing.clear()
    await node.reload.look_for_missing()
    assert list(node.reload.conditions()) == []


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EAGAIN, errno.ESTALE])
async def test_key_that_is_silent_while_openssl_reads_it_may_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    node = Node(tmp_path, has_tls=True)
    cert, key = certificate(tmp_path)
    node.write(f'{node.listening}tls-cert = "{cert}"\ntls-key = "{key}"\n')

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("agentd.http.certificates.call_in_time", fail)
        assert await node.reloaded() == ([], [])
        (condition,) = node.reload.conditions()
        assert condition.reason.endswith(os.strerror(number))
    await node.reload.look_for_missing()
    assert (list(node.reload.conditions()), len(node.server.contexts)) == ([], 1)


@pytest.mark.parametrize("missing", ["token", "cert", "key"])
async def test_reload_goes_on_without_files_that_may_come(tmp_path: Path, missing: str) -> None:
    """A token that was revoked is dead, although another file is missing."""
    node = Node(tmp_path, has_tls=True)
    cert, key = certificate(tmp_path)
    team = tmp_path / "team"
    team.write_text("a-token-of-a-team-that-is-long")
    team.chmod(0o600)
    path = {"token": node.token, "cert": cert, "key": key}[missing]
    path.rename(tmp_path / "later")
    entry = f'[[rpc.tokens]]\nname = "team"\nfile = "{team}"\nrole = "read"\n'
    node.write(f'{node.listening}tls-cert = "{cert}"\ntls-key = "{key}"\n{entry}')
    assert await node.reloaded() == ([], [])
    (condition,) = node.reload.conditions()
    assert (condition.about, condition.agents) == ("host", ())
    assert f"{path} cannot be read: No such file" in condition.reason
    here = [word for word in (WORD, "a-token-of-a-team-that-is-long") if missing != "token"]
    assert node.server.tokens == [here or ["a-token-of-a-team-that-is-long"]]
    assert len(node.server.contexts) == (missing == "token")
    (tmp_path / "later").rename(path)
    await node.reload.look_for_missing()
    assert list(node.reload.conditions()) == []
    assert node.server.tokens[-1] == [WORD, "a-token-of-a-team-that-is-long"]
    assert len(node.server.contexts) == 1 + (missing == "token")


async def test_retry_looks_up_what_is_missing_and_rarely_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name service that is down for a while makes no known name an unknown one."""
    known, wanted = {"early"}, list[str]()

    def find(name: str) -> int | None:
        wanted.append(name)
        return 1000 if name in known else None

    monkeypatch.setattr("agentd.daemon.host_names.find_group_id", find)
    node = Node(tmp_path)
    groups = 'allowed-groups = ["early", "late"]\n'
    node.write(rest=f"[runtime.docker]\n{groups}")
    assert await node.reloaded() == (["runtime.docker.allowed-groups"], [])
    assert [c.about for c in node.reload.conditions()] == ["agent/main"]
    known.clear()
    await node.reload.look_for_missing()
    assert (sorted(wanted), len(list(node.reload.conditions()))) == (["early", "late", "late"], 1)
    for _ in range(9):
        await node.reload.look_for_missing()
    assert (wanted.count("early"), wanted.count("late")) == (2, 11)
    assert len(list(node.reload.conditions())) == 1
    known.add("late")
    await node.reload.look_for_missing()
    assert list(node.reload.conditions()) == []
    known.clear()
    await node.reloaded()
    assert len(list(node.reload.conditions())) == 2


async def test_missing_token_that_comes_with_a_bad_mode_says_so(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.token.unlink()
    assert await node.reloaded() == ([], [])
    node.token.write_text(WORD)
    node.token.chmod(0o644)
    await node.reload.look_for_missing()
    (condition,) = node.reload.conditions()
    assert "has mode 0644" in condition.reason
    assert node.server.tokens == [[]]
    node.token.chmod(0o600)
    await node.reload.look_for_missing()
    assert list(node.reload.conditions()) == []
    assert node.server.tokens[-1] == [WORD]


@pytest.mark.parametrize("unusable", ["token", "certificate"])
async def test_problem_of_what_has_come_hides_no_other(tmp_path: Path, unusable: str) -> None:
    """Such as a pair that is renewed one file after the other."""
    node = Node(tmp_path, has_tls=True)
    cert, key = certificate(tmp_path)
    team = tmp_path / "team"
    entry = f'[[rpc.tokens]]\nname = "team"\nfile = "{team}"\nrole = "read"\n'
    node.write(f'{node.listening}tls-cert = "{cert}"\ntls-key = "{key}"\n{entry}')
    cert.rename(tmp_path / "later")
    assert await node.reloaded() == ([], [])
    assert len(list(node.reload.conditions())) == 2
    (tmp_path / "other").mkdir()
    other, _ = certificate(tmp_path / "other")
    (other if unusable == "certificate" else tmp_path / "later").rename(cert)
    team.write_text("a-token-of-a-team-that-is-long")
    team.chmod(0o600 if unusable == "certificate" else 0o644)
    await node.reload.look_for_missing()
    (condition,) = node.reload.conditions()
    came = (len(node.server.current_tokens) == 2, len(node.server.contexts) == 1)
    if unusable == "certificate":
        assert condition.reason.startswith("rpc.tls-cert: ")
        assert came == (True, False)
    else:
        assert condition.reason.startswith("rpc.tokens.0.file: ")
        assert came == (False, True)


async def test_tls_on_a_plain_listener_waits_for_a_restart(tmp_path: Path) -> None:
    node = Node(tmp_path)
    cert, key = certificate(tmp_path)
    node.write(f'{node.listening}tls-cert = "{cert}"\ntls-key = "{key}"\n')
    assert await node.reloaded() == (["rpc.tls-cert", "rpc.tls-key"], [])
    assert node.server.contexts == []


async def test_reload_uses_the_certificate_it_checked(tmp_path: Path) -> None:
    node = Node(tmp_path, has_tls=True)
    cert, key = certificate(tmp_path)
    node.write(f'{node.listening}tls-cert = "{cert}"\ntls-key = "{key}"\n')
    settings, _, steps = node.reload.prepare()
    assert settings.rpc.tls_cert == cert
    cert.write_text("exchanged")
    key.unlink()
    for step in steps:
        step.apply()
    assert len(node.server.contexts) == 1
    assert {"rpc.tls-cert", "rpc.tls-key"} <= {key for step in steps for key in step.keys}


async def test_tokens_go_with_the_listener(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.file.write_text("[node]\n")
    waiting, reasons = await node.reloaded()
    assert reasons == []
    assert {"rpc.listen", "rpc.token-file", "node.id"} <= set(waiting)
    assert node.server.tokens == [[WORD]]


async def test_reload_names_pending_keys_until_they_are_reverted(tmp_path: Path) -> None:
    node = Node(tmp_path)
    agents = '[[agents]]\nid = "a"\n'
    node.write(rest=agents + "[plugins.cuda]\nplugin = 'sim'\n")
    for _ in range(2):
        assert await node.reloaded() == (["agents", "plugins.cuda"], [])
    node.write(rest='log-level = "info"\n')
    assert await node.reloaded() == ([], [])


async def test_every_key_of_a_runtime_is_taken_or_named(tmp_path: Path) -> None:
    from agentd.runtimes.docker.runtime import DockerRuntime

    node = Node(tmp_path)
    docker = DockerRuntime("n", module.load(node.file, {}).settings.runtime.docker)
    node.reload._runtimes = {"docker": docker}
    node.write(
        rest='[runtime.docker]\nsocket = "/another"\npids-limit = 7\nstop-timeout = 3\n'
        'registry-auth = "/auth"\npublish-address = "127.0.0.9"\n'
    )
    assert await node.reloaded() == (
        ["runtime.docker.socket", "runtime.docker.publish-address"],
        [],
    )
    assert (docker._settings.pids_limit, docker._settings.registry_auth) == (7, Path("/auth"))


async def test_means_of_agents_are_taken_and_the_rest_named(tmp_path: Path) -> None:
    from agentd.runtimes.docker.runtime import DockerRuntime

    node = Node(tmp_path)
    agents = '[[agents]]\nid = "a"\n{}[[agents]]\nid = "b"\n{}'
    node.write(rest=agents.format('network = "old"\n', ""))
    docker = DockerRuntime("n", module.load(node.file, {}).settings.runtime.docker)
    runtimes: Any = {"docker": docker}
    server: Any = node.server
    loaded = load(node.file, {})
    node.reload = Reload(loaded, server, runtimes, HostNames(loaded.settings))

    def networks() -> dict[str, str]:
        return {name: settings.network for name, settings in docker._own_settings.items()}

    node.write(rest=agents.format("", 'network = "new"\n'))
    assert await node.reloaded() == ([], [])
    assert networks() == {"b": "new"}
    node.write(rest=agents.format('network = "newer"\n', 'user = "daemon"\n'))
    assert await node.reloaded() == (["agents"], [])
    assert networks() == {"a": "newer"}
    node.write(rest='[[agents]]\nid = "b"\nnetwork = "last"\n')
    assert await node.reloaded() == (["agents"], [])
    assert networks() == {"a": "newer", "b": "last"}
    node.write(rest=agents.format('allowed-mounts = ["x"]\n', ""))
    reasons = (await node.reloaded())[1]
    assert "agents.0.allowed-mounts.0: invalid path 'x'" in reasons[0]
    assert networks() == {"a": "newer", "b": "last"}


async def test_weak_credentials_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    day_s = 24 * 3600.0
    now = [time.time() + 21 * day_s]
    monkeypatch.setattr("agentd.http.credentials.time", SimpleNamespace(time=lambda: now[0]))
    node = Node(tmp_path, has_tls=True)
    cert, key = certificate(tmp_path, "-days", "20")
    key.chmod(0o644)
    node.token.write_text("x")
    node.write(f'{node.listening}tls-cert = "{cert}"\ntls-key = "{key}"\n')
    assert await node.reloaded() == ([], [])
    token, mode, expired = credential_weaknesses(node.reload.settings.rpc)
    assert token.startswith(f"{node.token} holds a token of 1 characters, expected 16 or more")
    assert mode == f"{key} has mode 0644: accessible by others; expected 0600 or 0640"
    assert expired.startswith(f"{cert} expired at ")
    key.chmod(0o600)
    node.token.write_text(WORD)
    now[0] -= 18 * day_s
    assert await node.reloaded() == ([], [])
    assert credential_weaknesses(node.reload.settings.rpc) == []
    now[0] += 4 * day_s
    (warning,) = credential_weaknesses(node.reload.settings.rpc)
    assert warning.startswith(f"{cert} expires at ")
    now[0] += 14 * day_s
    assert credential_weaknesses(node.reload.settings.rpc) == [expired]
    now[0] -= 24 * day_s
    await node.reloaded()
    assert credential_weaknesses(node.reload.settings.rpc)[0].startswith(
        f"{cert} is not valid before "
    )
