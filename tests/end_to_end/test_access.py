"""Who may do what on a node that teams share: every role on every route, over real sockets."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from agentd.cli.agentctl import agentctl
from daemon import BASE, Answer, Daemon, gpus
from end_to_end.test_events import listening, until

OWN, FOREIGN = "own-kernel", "secret-kernel"
TEAMS = '[[agents]]\nid = "team-a"\n[[agents]]\nid = "secret-team"\n'
SOCKETS = """
[[rpc.sockets]]
path = "{folder}/a.sock"
role = "agent"
agents = ["team-a"]
[[rpc.sockets]]
path = "{folder}/reader.sock"
role = "read"
[[rpc.sockets]]
path = "{folder}/reader-a.sock"
role = "read"
agents = ["team-a"]
"""
ROLES = ("agentd", "a", "reader", "reader-a")
SCOPED = ("a", "reader-a")
RIGHTS = {
    "get_node": "look", "list_runtimes": "look", "forget_runtime": "node", "list_plugins": "look",
    "retry_plugin": "node", "list_slot_types": "look", "list_devices": "look",
    "drain_device": "node", "undrain_device": "node", "forget_device": "node",
    "list_agents": "look", "get_agent_of_agent": "look", "get_agent": "look",
    "create_kernel_of_agent": "kernels", "list_kernels_of_agent": "look", "list_kernels": "look",
    "get_kernel": "look", "stop_kernel": "kernels", "delete_kernel": "kernels",
    "get_logs": "output", "get_events": "look", "whoami": "look", "get_openapi": "look",
    "get_metrics": "look", "livez": "look", "readyz": "look",
}  # fmt: skip
"""What each operation is; one that is missing here fails."""
MAY = {
    "agentd": {"look", "output", "kernels", "node"},
    "a": {"look", "output", "kernels"},
    "reader": {"look"},
    "reader-a": {"look"},
}


async def call(
    daemon: Daemon, role: str, method: str, path: str, body: Any = None, **headers: str
) -> Answer:
    connector = aiohttp.UnixConnector(str(daemon.folder / f"{role}.sock"))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.request(method, f"http://agentd{path}", json=body, headers=headers) as response,
    ):
        if response.content_type == "text/event-stream":
            return Answer(response.status, response.headers.copy(), b"")
        return Answer(response.status, response.headers.copy(), await response.read())


@pytest.fixture
async def node(plain: Daemon) -> Daemon:
    """Two teams, each with two GPUs of its own, and a kernel of each on one of them."""
    sockets = SOCKETS.format(folder=plain.folder)
    await plain.start(f'[resource]\nallocation-mode = "auto-split"\n{TEAMS}{gpus(4)}{sockets}')
    for agent, kernel_id in (("team-a", OWN), ("secret-team", FOREIGN)):
        await plain.running(agent, kernel_id=kernel_id, slots={"cuda.device": 1})
    return plain


def filled(path: str, *, own: bool) -> str:
    places = {
        "{agent}": "team-a" if own else "secret-team",
        "{kernel}": OWN if own else FOREIGN,
        "{device_name}": "cuda",
        "{id}": "cuda0" if own else "cuda3",
        "{plugin}": "cuda",
        "{runtime}": "process",
    }
    for place, name in places.items():
        path = path.replace(place, name)
    return path


def expected(role: str, right: str, path: str, *, own: bool) -> set[int] | None:
    """The statuses that refuse; None if the call is to be carried out."""
    is_placed = any(place in path for place in ("{agent}", "{kernel}", "{id}"))
    if role in SCOPED and is_placed and not own:
        return {404}
    return None if right in MAY[role] else {403}


@pytest.mark.parametrize("role", ROLES)
async def test_no_caller_sees_or_does_more_than_the_table_says(node: Daemon, role: str) -> None:
    """Every route of the document, on what is the caller's own and on what is another team's."""
    document = await node.get("/v1/openapi.json")
    operations = [
        (method.upper(), path, operation["operationId"])
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    operations.sort(key=lambda item: item[0] == "DELETE")
    for method, path, name in operations:
        for own in (False, True):
            wanted = expected(role, RIGHTS[name], path, own=own)
            body = {"command": ["true"], "slots": {"cpu": 0}} if "create" in name else None
            answer = await call(node, role, method, filled(path, own=own), body)
            where = (role, method, filled(path, own=own), answer.status, answer.content)
            if wanted is None:
                assert answer.status not in (401, 403, 404), where
            else:
                assert answer.status in wanted, where
                assert answer.json["code"] != "Internal", where
            if role in SCOPED:
                shown = answer.content.decode().replace(filled(path, own=own), "")
                if answer.status == 404:
                    shown = shown.replace(filled("{agent} {kernel}", own=own).split()[0], "")
                    shown = shown.replace(FOREIGN, "") if "{kernel}" in path else shown
                assert "secret" not in shown, where


async def test_what_is_foreign_looks_exactly_like_what_does_not_exist(node: Daemon) -> None:
    pairs = [
        ("GET", "/v1/agents/{}", "secret-team", "nothing-team"),
        ("POST", "/v1/agents/{}/kernels", "secret-team", "nothing-team"),
        ("GET", "/v1/kernels/{}", FOREIGN, "nothing-kernel"),
        ("DELETE", "/v1/kernels/{}", FOREIGN, "nothing-kernel"),
        ("GET", "/v1/kernels/{}/logs", FOREIGN, "nothing-kernel"),
        ("POST", "/v1/devices/cuda/{}/drain", "cuda3", "cuda7"),
    ]
    for method, path, foreign, nothing in pairs:
        body = {"command": ["true"]} if method == "POST" and "agents" in path else None
        one = await call(node, "a", method, path.format(foreign), body)
        other = await call(node, "a", method, path.format(nothing), body)
        assert one.status == other.status == 404, (path, one.content)
        assert one.content.decode().replace(foreign, "X") == other.content.decode().replace(
            nothing, "X"
        )


async def test_an_id_that_another_team_has_is_only_taken(node: Daemon) -> None:
    body = {"command": ["true"], "kernel_id": FOREIGN}
    answer = await call(node, "a", "POST", "/v1/agents/team-a/kernels", body)
    assert (answer.status, answer.json["code"]) == (409, "KernelConflict")
    assert answer.json["detail"] == f"kernel id {FOREIGN} is taken"


async def test_a_shared_device_is_seen_and_its_other_holders_are_nobody(plain: Daemon) -> None:
    await plain.start(TEAMS + gpus(1, "shares") + SOCKETS.format(folder=plain.folder))
    await plain.running("secret-team", kernel_id=FOREIGN, slots={"cuda.shares": "0.75"})
    await plain.running("team-a", kernel_id=OWN, slots={"cuda.shares": "0.25"})
    devices = (await call(plain, "a", "GET", "/v1/devices")).json
    (gpu,) = [device for device in devices if device["device_name"] == "cuda"]
    assert gpu["agents"] == ["team-a"]
    assert sorted(holder["kernel_id"] for holder in gpu["holders"]) == ["other", OWN]
    body = {"command": ["true"], "slots": {"cuda.shares": "0.5"}}
    for query in ("", "?dry_run=true"):
        answer = await call(plain, "a", "POST", f"/v1/agents/team-a/kernels{query}", body)
        assert answer.status == 409
        assert "secret" not in answer.content.decode()


async def test_a_team_hears_of_its_own_kernels_alone(node: Daemon) -> None:
    async with listening(node, sock="a.sock") as frames:
        await node.running("secret-team", kernel_id="secret-2", slots={"cuda.device": 1})
        await node.call("POST", "/v1/devices/cuda/cuda3/drain")
        await node.running("team-a", kernel_id="mine", slots={"cuda.device": 1})
        heard = await until(frames, kernel_id="mine", state="running")
    assert "secret" not in json.dumps(heard)
    assert "cuda3" not in json.dumps(heard)


async def test_who_made_a_kernel_stands_on_it_and_in_the_log(node: Daemon) -> None:
    body = {
        "command": ["sleep", "1000"],
        "kernel_id": "mine",
        "labels": {"job": "7"},
        "slots": {"cpu": 0},
    }
    made = await call(node, "a", "POST", "/v1/agents/team-a/kernels", body)
    assert made.json["created_by"] == "a"
    await node.restart()
    kernel = await node.get("/v1/kernels/mine")
    assert (kernel["created_by"], kernel["command"], kernel["labels"], kernel["image"]) == (
        "a",
        ["sleep", "1000"],
        {"job": "7"},
        None,
    )
    await call(node, "reader", "DELETE", "/v1/kernels/mine")
    calls = [line for line in node.log.splitlines() if "rpc.call" in line]
    assert any('"create_kernel"' in line and '"caller": "a"' in line for line in calls)
    assert any('"Forbidden"' in line and '"caller": "reader"' in line for line in calls)


async def test_whoami(node: Daemon) -> None:
    shown = {role: (await call(node, role, "GET", "/v1/whoami")).json for role in ROLES}
    uid = os.getuid()
    assert shown["agentd"] == {"name": "agentd", "role": "admin", "agents": None, "uid": uid}
    assert shown["a"] == {"name": "a", "role": "agent", "agents": ["team-a"], "uid": uid}
    assert shown["reader"]["agents"] is None


# Tokens

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

    async def get(self, name: str | None, path: str = "/v1/whoami") -> Answer:
        headers = {"Authorization": f"Bearer {self.secrets[name]}"} if name else {}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"http://127.0.0.1:{self.port}{path}") as response,
        ):
            return Answer(response.status, response.headers.copy(), await response.read())


@pytest.fixture
def tokens(plain: Daemon) -> Tokens:
    made = Tokens(plain)
    for name in ("team", "watcher", "boss"):
        made.add(name)
    return made


async def test_each_token_is_its_own_caller_and_a_removed_one_is_dead_at_once(
    tokens: Tokens,
) -> None:
    team = tokens.entry("team", "agent", "team-a")
    tokens.configure(team, tokens.entry("watcher", "read"), tokens.entry("boss", "admin"))
    await tokens.daemon.start()
    shown = {name: (await tokens.get(name)).json["role"] for name in tokens.secrets}
    assert shown == {"team": "agent", "watcher": "read", "boss": "admin"}
    assert (await tokens.get(None)).status == 401
    headers = {"Authorization": f"Bearer {tokens.secrets['watcher']}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"http://127.0.0.1:{tokens.port}/v1/events") as stream,
    ):
        assert stream.status == 200
        tokens.configure(team)
        assert tokens.daemon.process is not None
        tokens.daemon.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(10):
            with contextlib.suppress(aiohttp.ClientError):
                while await stream.content.readany():
                    pass
    assert (await tokens.get("watcher")).status == 401
    assert (await tokens.get("team")).status == 200


async def test_a_reload_that_cannot_be_read_changes_nothing(tokens: Tokens) -> None:
    tokens.configure(tokens.entry("team", "agent", "team-a"))
    await tokens.daemon.start()
    tokens.daemon.config_file.write_text("[rpc")
    assert tokens.daemon.process is not None
    tokens.daemon.process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(10):
        while "daemon.not_reloaded" not in tokens.daemon.log:
            await asyncio.sleep(0.02)
    assert (await tokens.get("team")).status == 200
    tokens.configure(tokens.entry("team", "agent", "team-a"))


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (("team", "agent"), 'role "agent" needs agents'),
        (("team", "admin", "team-a"), 'role "admin" is for all agents'),
        (("team", "agent", "nobody"), "no agent nobody"),
        (("team", "boss"), "Input should be"),
        (("absent", "read"), "cannot be read: No such file"),
        (("open", "read"), "has mode 0644: others can read or write it; allowed: 0600 or 0640"),
        (("empty", "read"), "is empty; it needs one line"),
        (("words", "read"), "is not one word"),
    ],
)
async def test_tokens_that_cannot_be_used_are_refused(
    tokens: Tokens, entry: tuple[str, ...], why: str
) -> None:
    tokens.add("open", 0o644)
    for name, text in (("empty", "\n"), ("words", "two words\n")):
        file = tokens.daemon.folder / f"token-{name}"
        file.write_text(text)
        file.chmod(0o600)
    tokens.configure(tokens.entry(*entry))
    process = tokens.daemon.spawn()
    assert await asyncio.to_thread(process.wait, 30) == 78
    assert why in tokens.daemon.log
    tokens.configure()


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
