"""Tokens over TCP: each its own caller, dead when taken away, refused when others can read it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from agentd.cli.agentctl.main import agentctl
from agentd.cli.agentctl.options import token_of
from agentd.config.loading import load
from agentd.errors import ConfigRefused
from agentd.http.credentials import read_tokens as tokens_of
from end_to_end.test_access import TEAMS
from support.daemon import BASE, Answer, Daemon, gpus
from support.waiting import until

TCP = BASE.replace("[host]", 'listen = "127.0.0.1:{port}"\n{tokens}[host]')


class Tokens:
    """A node that listens on TCP, and its tokens by name."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.secrets: dict[str, str] = {}

    def add(self, name: str, mode: int = 0o600, **members: object) -> None:
        file = self.daemon.folder / f"token-{name}"
        self.secrets[name] = f"secret-of-{name}"
        file.write_text(f"{self.secrets[name]}\n")
        file.chmod(mode)

    def entry(self, name: str, role: str, *agents: str) -> str:
        listed = f"agents = {list(agents)}\n".replace("'", '"') if agents else ""
        file = self.daemon.folder / f"token-{name}"
        return f'[[rpc.tokens]]\nname = "{name}"\nfile = "{file}"\nrole = "{role}"\n{listed}'

    def configure(self, *entries: str) -> None:
        base = TCP.replace("{port}", str(self.port)).replace("{tokens}", "".join(entries))
        self.daemon.configure(TEAMS + gpus(), base)

    async def get(
        self, name: str | None, path: str = "/v1/whoami", headers: Mapping[str, str] | None = None
    ) -> Answer:
        async with self.stream(name, path, headers) as response:
            return Answer(response.status, response.headers.copy(), await response.read())

    @contextlib.asynccontextmanager
    async def stream(
        self, name: str | None, path: str, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask for something that is read bit by bit."""
        mine = {"Authorization": f"Bearer {self.secrets[name]}"} if name else {}
        async with (
            aiohttp.ClientSession(headers={**mine, **(headers or {})}) as session,
            session.get(f"http://127.0.0.1:{self.port}{path}") as response,
        ):
            yield response


@pytest.fixture
def tokens(plain: Daemon) -> Tokens:
    made = Tokens(plain)
    for name in ("team", "watcher", "boss"):
        made.add(name)
    return made


async def test_token_is_one_caller_and_ends_when_revoked(tokens: Tokens) -> None:
    team = tokens.entry("team", "agent", "team-a")
    tokens.configure(team, tokens.entry("watcher", "read"), tokens.entry("boss", "admin"))
    await tokens.daemon.start()
    shown = {name: (await tokens.get(name)).json["role"] for name in tokens.secrets}
    assert shown == {"team": "agent", "watcher": "read", "boss": "admin"}
    assert (await tokens.get(None)).status == 401
    async with tokens.stream("watcher", "/v1/events") as stream:
        assert stream.status == 200
        tokens.configure(team)
        tokens.daemon.reload()
        async with asyncio.timeout(10):
            with contextlib.suppress(aiohttp.ClientError):
                while await stream.content.readany():
                    pass
    assert (await tokens.get("watcher")).status == 401
    assert (await tokens.get("team")).status == 200


async def test_a_token_that_goes_before_its_body_has_come_does_nothing(tokens: Tokens) -> None:
    team = tokens.entry("team", "agent", "team-a")
    tokens.configure(team, tokens.entry("boss", "admin"))
    await tokens.daemon.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", tokens.port)
    body = b'{"command": ["true"], "kernel_id": "late", "slots": {"cpu": 0}}'
    head = (
        "POST /v1/agents/team-a/kernels HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {tokens.secrets['team']}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body[:5])
    assert (await tokens.get("team")).status == 200
    tokens.configure(tokens.entry("boss", "admin"))
    tokens.daemon.reload()
    await until(lambda: tokens.get("team"), lambda value: value.status == 401, within_s=10)
    writer.write(body[5:])
    assert b" 401 " in await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    assert await tokens.daemon.get("/v1/kernels") == []


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (("team", "agent"), 'role "agent" requires agents'),
        (("team", "admin", "team-a"), 'role "admin" covers all agents'),
        (("team", "agent", "nobody"), "unknown agent nobody"),
        (("team", "boss"), "Input should be"),
        (("absent", "read"), "cannot be read: No such file"),
        (("open", "read"), "has mode 0644: accessible by others; expected 0600 or 0640"),
        (("empty", "read"), "is empty, expected one line"),
        (("words", "read"), "is not a single word"),
    ],
)
def test_tokens_that_cannot_be_used_are_refused(
    folder: Path, entry: tuple[str, ...], why: str
) -> None:
    made = Tokens(Daemon(folder, "process"))
    made.add("team")
    made.add("open", 0o644)
    for name, text in (("empty", "\n"), ("words", "two words\n")):
        file = folder / f"token-{name}"
        file.write_text(text)
        file.chmod(0o600)
    made.configure(made.entry(*entry))
    with pytest.raises(ConfigRefused) as refused:
        tokens_of(load(made.daemon.config_file, {}).settings.rpc)
    assert why in str(refused.value)
    made.daemon.notes.close()


def test_byte_order_mark_is_not_part_of_a_token(folder: Path) -> None:
    made = Tokens(Daemon(folder, "process"))
    made.add("team")
    file = folder / "token-team"
    file.write_text(f"{made.secrets['team']}\n", encoding="utf-8-sig")
    made.configure(made.entry("team", "read"))
    (token,) = tokens_of(load(made.daemon.config_file, {}).settings.rpc)
    assert token.secret == token_of(str(file)) == made.secrets["team"]
    made.daemon.notes.close()


def test_main_token_that_others_can_read_is_refused(folder: Path) -> None:
    made = Tokens(Daemon(folder, "process"))
    made.add("main", 0o604)
    made.configure(f'token-file = "{folder}/token-main"\n')
    with pytest.raises(
        ConfigRefused, match=r"rpc.token-file: .* has mode 0604: accessible by others"
    ):
        tokens_of(load(made.daemon.config_file, {}).settings.rpc)
    made.daemon.notes.close()


def test_a_new_token_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "tokens/team"
    options = ["token", "create", "team", "--agent", "a", "--file", str(file)]
    made = CliRunner().invoke(agentctl, options)
    assert made.exit_code == 0, made.output
    assert made.output == (
        f'[[rpc.tokens]]\nname = "team"\nfile = "{file}"\nrole = "agent"\nagents = ["a"]\n'
    )
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(file.read_text().strip()) >= 40
    again = CliRunner().invoke(agentctl, options)
    assert (again.exit_code, "exists" in again.output) == (1, True)


def test_gateway_token_must_be_admin(tmp_path: Path) -> None:
    file = tmp_path / "gate"
    options = ["token", "create", "gate", "--gateway", "--file", str(file)]
    made = CliRunner().invoke(agentctl, options)
    assert made.output == (
        f'[[rpc.tokens]]\nname = "gate"\nfile = "{file}"\nrole = "admin"\ngateway = true\n'
    )
    refused = CliRunner().invoke(agentctl, [*options, "--role", "read"])
    assert (refused.exit_code, "leave --role out" in refused.output) == (2, True)


async def agentctl_says(*arguments: str) -> tuple[int, str]:
    done = await asyncio.to_thread(CliRunner().invoke, agentctl, arguments)
    return done.exit_code, done.output


async def test_a_revoked_token_is_dead_and_its_file_gone(tokens: Tokens) -> None:
    team, watcher = tokens.entry("team", "agent", "team-a"), tokens.entry("watcher", "read")
    tokens.configure(team, f"# who watches\n{watcher}")
    config = tokens.daemon.config_file
    await tokens.daemon.start()
    assert (await tokens.get("team")).status == 200
    revoke = ("token", "revoke", "team", "--config", str(config))
    code, said = await agentctl_says(*revoke)
    file = tokens.daemon.folder / "token-team"
    assert (code, said) == (
        0,
        f"removed team from {config}\nreloaded agentd\ndeleted {file}\n",
    )
    assert not file.exists()
    assert "# who watches" in config.read_text()
    assert (await tokens.get("team")).status == 401
    assert (await tokens.get("watcher")).status == 200
    code, said = await agentctl_says(*revoke)
    assert (code, "no token team (the file has: watcher)" in said) == (1, True)


async def test_a_token_that_cannot_be_revoked_keeps_its_file(tokens: Tokens) -> None:
    tokens.configure(tokens.entry("team", "agent", "team-a"))
    config, file = tokens.daemon.config_file, tokens.daemon.folder / "token-team"
    before = config.read_text()
    code, said = await agentctl_says("token", "revoke", "team", "--config", str(config))
    assert (code, "listen requires token-file or [[rpc.tokens]]" in said) == (1, True)
    assert (config.read_text(), file.exists()) == (before, True)
    tokens.configure(tokens.entry("team", "agent", "team-a"), tokens.entry("boss", "admin"))
    await tokens.daemon.start()
    (tokens.daemon.folder / "token-boss").chmod(0o604)
    code, said = await agentctl_says("token", "revoke", "team", "--config", str(config))
    assert (code, "team is still valid: not reloaded" in said) == (1, True)
    assert file.exists()
    assert (await tokens.get("team")).status == 200
    (tokens.daemon.folder / "token-boss").chmod(0o600)


async def test_a_token_is_revoked_without_a_daemon(tokens: Tokens) -> None:
    tokens.configure(tokens.entry("team", "agent", "team-a"), tokens.entry("boss", "admin"))
    config = str(tokens.daemon.config_file)
    code, said = await agentctl_says("token", "revoke", "team", "--config", config)
    assert (code, "not reloaded: no daemon runs" in said) == (0, True)
    assert not (tokens.daemon.folder / "token-team").exists()
