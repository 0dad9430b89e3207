"""Paths of the operator on dead mounts, and names that no name service answers for.

A preload library (`native/silent.c`) makes them wait. Each is a named case of one table: all are in
one configuration, and none of them holds up anything else.
"""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from pwd import getpwnam
from typing import Any

import aiohttp
import pytest

from agentd.concurrency import MAX_SILENT, POOL_THREADS
from agentd.host.lookups import MAX_AT_ONCE
from native.libraries import built
from support import fork_server
from support.certificates import certificate
from support.daemon import BASE, READY_TIMEOUT_S, UNITS, Daemon
from support.host_faults import hung_mount
from support.waiting import until

SILENT = {
    "folder for mounts": ("{dead}/data", "{dead}/data does not answer"),
    "second folder on the same server": ("{dead}/more", "{dead}/more does not answer"),
    "credentials of registries": ("{dead}/auth.json", "{dead}/auth.json does not answer"),
    "token": ("rpc.tokens.0.file", "{dead}/token cannot be read: no answer within"),
    "certificate": ("rpc.tls-cert", "{dead}/cert cannot be read: no answer within"),
    "group of a socket": (
        "group 'daemon' cannot be looked up",
        "agentd.sock is not given to group",
    ),
    "user of an agent": ("user 'daemon' cannot be looked up", "user 'daemon' does not answer"),
}
"""The text of `check-config`, and the reason of a condition."""
CONFIGURATION = BASE.replace(
    "[host]",
    """socket-group = "daemon"
listen = "127.0.0.1:{{port}}"
tls-cert = "{folder}/dead/cert"
tls-key = "{folder}/dead/key"
token-file = "{folder}/token"
[[rpc.tokens]]
name = "team"
file = "{folder}/dead/token"
role = "read"
[host]""",
).replace(
    'network = "none"',
    """allowed-mounts = ["{folder}/dead/data", "{folder}/ok", "{folder}/dead/more"]
registry-auth = "{folder}/dead/auth.json"
""",
)
SLOWNESS = READY_TIMEOUT_S / 30
"""1, and more on the virtual machine, whose processor is emulated."""
QUICK = f"""
import runpy
from agentd import concurrency
from agentd.daemon import reload
from agentd.host import lookups
from agentd.services import conditions
concurrency.ANSWER_TIMEOUT_S = lookups.ANSWER_TIMEOUT_S = {0.5 * SLOWNESS}
reload.RETRY_S = conditions.SILENT_PAUSE_S = {0.5 * SLOWNESS}
runpy.run_module("agentd", run_name="__main__", alter_sys=True)
"""
WITHOUT_THREADS = """
import pathlib, runpy, threading
start = threading.Thread.start
def start_unless_full(thread):
    if pathlib.Path({full!r}).exists():
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = start_unless_full
runpy.run_module("agentd", run_name="__main__", alter_sys=True)
"""
AGENTS = '[[agents]]\nid = "agent-1"\n[[agents]]\nid = "agent-2"\nuser = "daemon"\n'
MOST_S = 20 * SLOWNESS
RUNTIMES = ("process", *UNITS, "docker")
SECRETS = {"token": "the-token-of-the-operator", "dead/token": "the-token-of-the-team"}


class SilentNode:
    """A node whose configuration names everything that is silent."""

    def __init__(self, daemon: Daemon, library: Path) -> None:
        self.daemon, self.folder = daemon, daemon.folder
        self.environ = {"LD_PRELOAD": str(library), "HANGING": str(self.folder)}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        dead = self.folder / "dead"
        for name in ("data", "more"):
            (dead / name).mkdir(parents=True)
        certificate(dead)
        (dead / "auth.json").write_text("{}")
        for name, secret in SECRETS.items():
            (self.folder / name).write_text(secret)
            (self.folder / name).chmod(0o600)
        daemon.program = ("-c", QUICK)
        self.cases, agents = dict(SILENT), AGENTS
        (self.folder / "ok").mkdir()
        self.healthy: tuple[str, dict[str, Any]] = ("agent-1", {})
        """An agent, and members of a request that needs nothing silent."""
        self.silent_members: dict[str, Any] = {}
        """Members of a request that needs what is silent, and the code of its refusal."""
        self.silent_code = "NotReady"
        if daemon.runtime == "docker":  # a container's users are its image's
            del self.cases["user of an agent"]
            agents = AGENTS.replace('user = "daemon"\n', "")
            self.silent_members = {"mounts": [{"source": f"{dead}/data", "target": "/data"}]}
            mount = {"source": f"{self.folder}/ok", "target": "/data"}
            self.healthy = ("agent-2", {"mounts": [mount]})
            self.silent_code = "RuntimeUnavailable"
        daemon.configure(agents, CONFIGURATION.replace("{{port}}", str(self.port)))

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Silence everything in the table."""
        files = [self.folder / name for name in ("paths", "daemon")]
        for file in files:
            file.touch()
        try:
            yield
        finally:
            for file in files:
                file.unlink()

    async def reasons(self) -> list[str]:
        return [item["reason"] for item in (await self.daemon.get("/v1/node"))["conditions"]]

    async def status_of(self, secret: str) -> int:
        """Return the status of a request over TCP, 0 if TLS fails."""
        url = f"https://127.0.0.1:{self.port}/v1/whoami"
        headers = {"Authorization": f"Bearer {secret}"}
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        async with aiohttp.ClientSession(headers=headers) as session:
            try:
                async with session.get(url, ssl=context) as response:
                    return response.status
            except aiohttp.ClientError:
                return 0

    def lacks(self, reasons: list[str]) -> list[str]:
        """Return the cases without a reason."""
        dead = f"{self.folder}/dead"
        text = "\n".join(reasons)
        return [
            case for case, (_, reason) in self.cases.items() if reason.format(dead=dead) not in text
        ]


@pytest.fixture
async def node(
    request: pytest.FixtureRequest, folder: Path, tmp_path: Path
) -> AsyncIterator[SilentNode]:
    runtime = getattr(request, "param", "process")
    engine = request.getfixturevalue("engine") if runtime == "docker" else None
    made = Daemon(folder, runtime, engine)
    yield SilentNode(made, built("silent.c", tmp_path / "silent.so"))
    await made.close()


async def serves_everything(daemon: Daemon, kernel_id: str) -> None:
    """Walk through what a node does."""
    async with asyncio.timeout(MOST_S):
        await daemon.running(kernel_id=kernel_id)
        await serves_a_kernel(daemon, kernel_id)


async def serves_a_kernel(daemon: Daemon, kernel_id: str) -> None:
    """Walk through everything but a create."""
    async with asyncio.timeout(MOST_S):
        words = ["--socket", str(daemon.folder / "agentd.sock"), "exec", kernel_id, "echo", "in"]
        done = await asyncio.to_thread(fork_server.run, "agentctl", *words)
        assert (done.returncode, done.stdout) == (0, "in\n")
        for path in ("/readyz", "/metrics", "/v1/stats", "/v1/node?check=true"):
            assert (await daemon.call("GET", path)).status == 200, path
        stopped = await daemon.call("POST", f"/v1/kernels/{kernel_id}/stop", {"timeout": 0})
        assert stopped.status == 200
        assert (await daemon.call("DELETE", f"/v1/kernels/{kernel_id}")).status == 204


@pytest.mark.needs("root", "gcc", "openssl")
@pytest.mark.parametrize("node", RUNTIMES, indirect=True)
async def test_silent_paths_and_names_hold_up_nothing(node: SilentNode) -> None:
    daemon = node.daemon
    with node.silent():
        await daemon.start(**node.environ)
        await until(node.reasons, lambda reasons: not node.lacks(reasons), within_s=MOST_S)
        await serves_everything(daemon, "k1")
        for _ in range(2 * MAX_AT_ONCE):
            refused = await daemon.create("agent-2", **node.silent_members, query="?dry_run=true")
            assert refused.status == 503
        agent, members = node.healthy
        await daemon.running(agent, **members)
        refused = await daemon.create("agent-2", **node.silent_members)
        assert (refused.status, refused.json["code"]) == (503, node.silent_code)
        assert [await node.status_of(secret) for secret in SECRETS.values()] == [0, 0]
        for _ in range(12):
            reloaded = await daemon.call("POST", "/v1/reload")
            assert (reloaded.status, reloaded.json) == (200, {"needs_restart": []})
        assert node.lacks(await node.reasons()) == []
        await serves_everything(daemon, "k2")
    await until(node.reasons, lambda reasons: node.lacks(reasons) == [*node.cases], within_s=MOST_S)
    assert [await node.status_of(secret) for secret in SECRETS.values()] == [200, 200]
    assert (node.folder / "agentd.sock").group() == "daemon"
    await daemon.running("agent-2", kernel_id="k3")
    with node.silent():
        reloaded = await daemon.call("POST", "/v1/reload")
        assert reloaded.status == 200
        assert [await node.status_of(secret) for secret in SECRETS.values()] == [200, 200]
        await serves_everything(daemon, "k4")


@pytest.mark.needs("root", "gcc", "openssl")
async def test_token_is_revoked_whatever_else_is_silent(node: SilentNode) -> None:
    daemon, names = node.daemon, [f"team-{number}" for number in range(MAX_SILENT)]
    agents = "".join(f'[[agents]]\nid = "{name}"\nuser = "{name}"\n' for name in names)
    text = CONFIGURATION.replace("{{port}}", str(node.port))
    daemon.configure(agents, text)
    for name in names:
        (node.folder / name).touch()
    await daemon.start(**node.environ)
    assert [await node.status_of(secret) for secret in SECRETS.values()] == [200, 200]
    team = text[text.index("[[rpc.tokens]]") : text.index("[host]")]
    daemon.configure(agents, text.replace(team, ""))
    reloaded = await daemon.call("POST", "/v1/reload")
    assert (reloaded.status, reloaded.json) == (200, {"needs_restart": []})
    assert [await node.status_of(secret) for secret in SECRETS.values()] == [200, 401]


@pytest.mark.needs("gcc")
@pytest.mark.parametrize("node", RUNTIMES, indirect=True)
async def test_groups_of_one_agent_hold_up_no_other(node: SilentNode) -> None:
    """A name that only a directory could answer is not known to be refused."""
    daemon = node.daemon
    table = "" if daemon.runtime == "docker" else f"[runtime.{daemon.runtime}]\n"
    daemon.configure(
        AGENTS.replace('user = "daemon"\n', ""),
        f"""{BASE}{table}
allowed-groups = ["audio", "no such group"]
""",
    )
    await daemon.start(**node.environ)
    (node.folder / "video").touch()
    dry = {"query": "?dry_run=true"}
    answers = [daemon.create(groups=["video"], **dry) for _ in range(2 * MAX_AT_ONCE)]
    assert {answer.status for answer in await asyncio.gather(*answers)} == {503}
    refused = await daemon.create(groups=["audio"], **dry)
    assert (refused.status, refused.json["code"]) == (503, "RuntimeUnavailable")
    assert "lookups do not answer: the group database" in refused.json["detail"]
    assert (await daemon.create("agent-2", groups=["audio"], **dry)).status == 200


@pytest.mark.needs("root", "gcc", "openssl")
async def test_check_config_names_what_is_silent(node: SilentNode) -> None:
    daemon, dead = node.daemon, node.folder / "dead"
    command = [sys.executable, "-c", QUICK, "check-config", "--config", daemon.config_file]
    environ = {**node.environ, "AGENTD_RUN_DIR": str(daemon.run_folder), "PATH": "/usr/bin:/bin"}
    with node.silent():
        done = await asyncio.to_thread(
            subprocess.run, command, env=environ, capture_output=True, timeout=MOST_S, check=False
        )
    text = done.stderr.decode()
    names = {case: name.format(dead=dead) for case, (name, _) in SILENT.items()}
    assert [case for case, name in names.items() if name not in text] == [], text
    assert done.returncode in (1, 78)


@pytest.mark.needs("gcc")
@pytest.mark.parametrize("silent", ["agent.toml", "state"])
async def test_start_that_cannot_go_on_says_what_is_silent(node: SilentNode, silent: str) -> None:
    """systemd tries again after exit status 1, never after 78."""
    daemon, path = node.daemon, node.folder / "dead" / silent
    daemon.configure("", BASE.replace("{folder}/state", str(path)) if silent == "state" else BASE)
    if silent == "agent.toml":
        daemon.config_file.rename(path)
        daemon.config_file.symlink_to(path)
    else:
        path.mkdir()
    arguments = ("--config", str(path)) if silent == "agent.toml" else ()
    with node.silent():
        process = daemon.spawn(*arguments, **node.environ)
        assert await asyncio.to_thread(process.wait, MOST_S) == 1
    assert f"{path} cannot be" in daemon.log
    assert "no answer within 0.5 s" in daemon.log


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("node", RUNTIMES[:-1], indirect=True)
async def test_working_directory_on_a_dead_mount_delays_no_other_agent(node: SilentNode) -> None:
    """More creates hang than the pool has threads."""
    daemon = node.daemon
    elsewhere = {"systemd": Path("/run")}  # units have a /tmp of their own
    dead = Path(tempfile.mkdtemp(dir=elsewhere.get(daemon.runtime, node.folder)))
    daemon._program = None
    daemon.configure(AGENTS)
    starts = "agentd.runtimes.process.spawn"
    daemon.deadlines = {f"{starts}.SPAWN_TIMEOUT_S": 3, f"{starts}.MAX_SPAWN_TIMEOUT_S": 20}
    await daemon.start()
    with hung_mount(dead, user=getpwnam("daemon").pw_uid):
        creates = [
            asyncio.create_task(daemon.create("agent-2", working_dir=f"{dead}/x", slots={"cpu": 0}))
            for _ in range(POOL_THREADS + 1)
        ]
        await until(lambda: daemon.get("/v1/kernels"), lambda kernels: len(kernels) == len(creates))
        await serves_everything(daemon, "k1")
        is_limited = daemon.runtime == "systemd"  # by systemd, which may have ended them meanwhile
        assert is_limited or not any(create.done() for create in creates)
        answers = await asyncio.gather(*creates)
    assert {(a.status, a.json["code"]) for a in answers} == {(503, "RuntimeUnavailable")}
    expected = {
        "process": "its command or working directory: Connection timed out",
        "systemd": "systemd did not start the kernel; start failed: timeout",
    }
    assert expected[daemon.runtime] in answers[0].json["detail"]
    assert await daemon.get("/v1/kernels") == []
    dead.rmdir()


async def test_host_without_process_ids_refuses_creates_for_the_moment(node: SilentNode) -> None:
    daemon, full = node.daemon, node.folder / "full"
    daemon.program = ("-c", WITHOUT_THREADS.format(full=str(full)))
    daemon.configure('[[agents]]\nid = "agent-1"\n')
    await daemon.start()
    await daemon.running(kernel_id="k1")
    full.touch()
    for _ in range(2 * MAX_AT_ONCE):
        refused = await daemon.create()
        assert (refused.status, refused.json["code"]) == (503, "RuntimeUnavailable")
        assert "can't start new thread" in refused.json["detail"]
    await serves_a_kernel(daemon, "k1")
    full.unlink()
    await serves_everything(daemon, "k2")
