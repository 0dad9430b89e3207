"""A real agentd in a process of its own, and what tests need to talk to it."""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp

from agentd.host.processes import all_processes, read_env
from agentd.host.systemd.availability import systemd_problems
from support import fork_server
from support.engine import Engine
from support.waiting import until

Process = subprocess.Popen[bytes] | fork_server.Forked

READY_TIMEOUT_S = float(os.environ.get("AGENTD_TEST_READY_S", "30"))
"""The virtual machine of tests/node, whose processor is emulated, sets a longer one."""
STOP_TIMEOUT_S = 40
"""Longer than the product's deadline for a stop."""

BASE = """
[node]
id = "{node}"
state-dir = "{folder}/state"
runtime = "{runtime}"
[rpc]
socket = "{folder}/agentd.sock"
[host]
cpus = 8
mem = "8g"
[runtime.docker]
socket = "{engine}"
network = "none"
stop-timeout = 1
"""
UNITS = () if systemd_problems() else ("systemd",)
"""The runtime of systemd where that runs; elsewhere it is tested in a machine of tests/node."""
AGENTS = '[[agents]]\nid = "agent-1"\n[[agents]]\nid = "agent-2"\n'
TEAM_SOCKETS = """
[[rpc.sockets]]
path = "{folder}/a.sock"
role = "agent"
agents = ["agent-1"]
[[rpc.sockets]]
path = "{folder}/b.sock"
role = "agent"
agents = ["agent-2"]
"""
"""A socket for each of these agents; `folder` is the daemon's."""


def gpus(count: int = 2, mode: str = "device", table: str = "cuda") -> str:
    return f'[plugins.{table}]\nplugin = "sim"\ncount = {count}\nmode = "{mode}"\n'


class Answer:
    def __init__(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.status, self.headers, self.content = status, headers, content

    def __repr__(self) -> str:
        return f"<{self.status} {self.content.decode(errors='replace')[:2000]}>"

    @property
    def json(self) -> Any:
        return json.loads(self.content)


def signal_and_wait(pid: int, number: int) -> None:
    """Send a signal to a process that ends of it, and wait until it has."""
    watch = os.pidfd_open(pid)
    try:
        os.kill(pid, number)
        select.select([watch], [], [], 10)
    finally:
        os.close(watch)


def processes_with_marker(marker: str) -> list[int]:
    """Return the processes that have a marker in their environment."""
    return [p.pid for p in all_processes() if read_env(p.pid).get("MARKER") == marker]


async def until_no_process(marker: str) -> None:
    """Wait until there are none of them."""
    await until(
        lambda: processes_with_marker(marker), [], text=f"no process marked {marker}", within_s=15
    )


@contextlib.contextmanager
def _end_noted(process: Process, notes: asyncio.Queue[str]) -> Iterator[None]:
    """Add an empty note when a process ends: one that dies sends none itself."""
    loop = asyncio.get_running_loop()
    try:
        watch = os.pidfd_open(process.pid)
    except ProcessLookupError:
        notes.put_nowait("")
        yield
        return

    def ended() -> None:
        loop.remove_reader(watch)
        notes.put_nowait("")

    loop.add_reader(watch, ended)
    try:
        yield
    finally:
        loop.remove_reader(watch)
        os.close(watch)


class Daemon:
    """agentd on a folder; starts and restarts with the configuration it is given."""

    def __init__(self, folder: Path, runtime: str, engine: Engine | None = None) -> None:
        self.folder = folder
        self.runtime = runtime
        self.node = f"test-{folder.name}"
        self.engine = engine.socket if engine else folder / "no-engine.sock"
        self.test_engine = engine
        self.run_folder = folder / "run"
        """Where it finds other agentds of the host: none, unless a test shares the folder."""
        self.process: Process | None = None
        self.boot_id = ""
        self.log_from = 0
        self.deadlines: dict[str, float] = {}
        """Shorter deadlines than the product's, for tests that wait for one; unused in a soak."""
        self._program: tuple[str, ...] | None = None
        self.notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notes.bind(str(folder / "notify"))
        self.notes.setblocking(False)

    @property
    def program(self) -> tuple[str, ...]:
        """The command line of the daemon; setting it forces a cold start instead of a fork."""
        return self._program or ("-m", "agentd")

    @program.setter
    def program(self, arguments: tuple[str, ...]) -> None:
        self._program = arguments

    @property
    def config_file(self) -> Path:
        return self.folder / "agent.toml"

    @property
    def log(self) -> str:
        """The output since the daemon was given to the test; nothing if it goes elsewhere."""
        file = self.folder / "log"
        return file.read_text()[self.log_from :] if file.is_file() else ""

    def configure(self, text: str = AGENTS + gpus(), base: str = BASE) -> None:
        filled = base.format(
            node=self.node, folder=self.folder, runtime=self.runtime, engine=self.engine
        )
        self.config_file.write_text(filled + text)

    def spawn(self, *arguments: str, **environ: str) -> Process:
        env = {k: v for k, v in os.environ.items() if not k.startswith("AGENTD")}
        env |= self._only_sim() | {"AGENTD_RUN_DIR": str(self.run_folder)}
        env |= {"NOTIFY_SOCKET": str(self.folder / "notify"), **environ}
        words = ["run", "--config", str(self.config_file), *arguments]
        with (self.folder / "log").open("ab") as log:
            if self._is_forked(environ):
                number = log.fileno()
                shorter = {} if "AGENTD_SOAK" in os.environ else self.deadlines
                return fork_server.spawn(
                    *("agentd", words, env), stdout=number, stderr=number,
                    deadlines=shorter, boot_id=self.boot_id,
                )  # fmt: skip
            assert not self.deadlines, "a cold start has the product's own"
            assert not self.boot_id, "only a fork has another"
            command = [sys.executable, *self.program, *words]
            return subprocess.Popen(command, stdout=log, stderr=log, env=env)

    def _is_forked(self, environ: Mapping[str, str]) -> bool:
        """Return whether a fork behaves as a cold start would."""
        read_at_exec = any(name.startswith(("LD_", "PYTHON")) for name in environ)
        return self._program is None and not read_at_exec

    def _only_sim(self) -> dict[str, str]:
        """Leave the plugins out that would only look for hardware, unless a test names some."""
        text = self.config_file.read_text()
        is_other = text.count("[plugins.") != text.count('plugin = "sim"')
        if is_other or "allow = " in text or "block = " in text:
            return {}
        return {"AGENTD__PLUGINS__ALLOW": '["sim"]'}

    async def start(self, text: str | None = None, **environ: str) -> None:
        """Start, and wait until it says that it is ready."""
        if text is not None or not self.config_file.exists():
            self.configure(*([] if text is None else [text]))
        with contextlib.suppress(BlockingIOError):  # a reload before this start was READY=1 as well
            while self.notes.recv(4096):
                pass
        notes: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        loop.add_reader(self.notes, lambda: notes.put_nowait(self.notes.recv(4096).decode()))
        try:
            self.process = self.spawn(**environ)
            async with asyncio.timeout(READY_TIMEOUT_S):
                with _end_noted(self.process, notes):
                    while "READY=1" not in (note := await notes.get()):
                        if not note:
                            status = await asyncio.to_thread(self.process.wait, READY_TIMEOUT_S)
                            raise AssertionError(
                                f"expected agentd to start; it exited with {status}:\n{self.log}"
                            )
        except TimeoutError:
            await self.stop(signal.SIGKILL)
            raise AssertionError(
                f"expected READY=1 from agentd within {READY_TIMEOUT_S:g} s:\n{self.log}"
            ) from None
        finally:
            loop.remove_reader(self.notes)

    def reload(self) -> None:
        """Ask for a reload as systemd does."""
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

    async def until_logged(self, text: str, times: int = 1) -> None:
        """Wait until the log has a text so many times."""
        wanted = f"{text!r} in the log {times} times"
        await until(lambda: self.log.count(text), lambda count: count >= times, text=wanted)

    async def ended(self) -> int:
        """Wait for a daemon that ends by itself, and return its exit status."""
        process, self.process = self.process, None
        assert process is not None
        return await asyncio.to_thread(process.wait, 40)

    async def stop(self, number: int = signal.SIGTERM) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            return await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            sent = signal.Signals(number).name
            raise AssertionError(
                f"expected agentd to end within {STOP_TIMEOUT_S} s of {sent}:\n{self.log[-6000:]}"
            ) from None

    async def restart(self, text: str | None = None, number: int = signal.SIGTERM) -> None:
        await self.stop(number)
        await self.start(text)

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        data: bytes | BytesIO | None = None,
        *,
        socket: str = "agentd",
    ) -> Answer:
        """Call on one of the daemon's unix sockets."""
        connector = aiohttp.UnixConnector(str(self.folder / f"{socket}.sock"))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.request(
                method, f"http://agentd{path}", json=body, data=data, headers=headers
            ) as response,
        ):
            return Answer(response.status, response.headers.copy(), await response.read())

    async def get(self, path: str) -> Any:
        answer = await self.call("GET", path)
        assert answer.status == 200, f"GET {path}: expected 200, got {answer}"
        return answer.json

    async def create(self, agent: str = "agent-1", **body: Any) -> Answer:
        body.setdefault("command", ["sleep", "1000"])
        if self.runtime == "docker":
            body.setdefault("image", "agentd-test:1")
        headers = body.pop("headers", None)
        query = body.pop("query", "")
        return await self.call("POST", f"/v1/agents/{agent}/kernels{query}", body, headers)

    async def running(self, agent: str = "agent-1", **body: Any) -> dict[str, Any]:
        answer = await self.create(agent, **body)
        assert answer.status == 201, f"create: expected 201, got {answer}"
        kernel = answer.json
        assert kernel["state"] == "running", f"create: expected state running, got {kernel}"
        return kernel

    async def trapping(self, trap: str, **body: Any) -> dict[str, Any]:
        """Run a shell until its trap is set: the first process of a container has no default."""
        script = f"{trap}; echo ready; while :; do sleep 0.05; done"
        kernel = await self.running(command=["sh", "-c", script], **body)
        path = f"/v1/kernels/{kernel['kernel_id']}/logs"
        await until(lambda: self.call("GET", path), lambda answer: answer.content == b"ready\n")
        return kernel

    async def kernel_ids(self) -> set[str]:
        return {kernel["kernel_id"] for kernel in await self.get("/v1/kernels")}

    async def warnings(self) -> list[str]:
        return (await self.get("/v1/node"))["warnings"]

    async def failed_checks(self) -> list[dict[str, Any]]:
        checks = (await self.get("/v1/node?check=true"))["checks"]
        return [check for check in checks if not check["passed"]]

    async def device(self, device_id: str) -> dict[str, Any]:
        return next(d for d in await self.get("/v1/devices") if d["id"] == device_id)

    async def free(self, slot: str, agent: str = "agent-1") -> str:
        return (await self.get(f"/v1/agents/{agent}"))["slots"][slot]["free"]

    async def until(self, kernel_id: str, state: str) -> dict[str, Any]:
        """Wait for a kernel to be in a state."""
        return await until(
            lambda: self.get(f"/v1/kernels/{kernel_id}"),
            lambda kernel: kernel["state"] == state,
            text=f"kernel {kernel_id} is {state}",
        )

    async def runtime_is(self, state: str, within_s: float = 20) -> None:
        """Wait for the runtime to be in a state."""
        await until(
            lambda: self.get("/v1/node"),
            lambda node: node["runtime"]["state"] == state,
            text=f"runtime {self.runtime} is {state}",
            within_s=within_s,
        )

    def main_pid(self, kernel: Mapping[str, Any], engine: Any = None) -> int:
        """The pid of a kernel's command, as the machine sees it."""
        if self.runtime == "process":
            return int(kernel["pid"])
        if self.runtime == "systemd":
            units = ["systemctl", "show", f"agentd-*-{kernel['kernel_id']}.service"]
            return int(subprocess.check_output([*units, "--property=MainPID", "--value"]))
        return int(engine.call("GET", f"/containers/{kernel['container_id']}/json")["State"]["Pid"])

    async def close(self) -> None:
        """Remove every kernel, and stop."""
        try:
            if self.process is None and self.config_file.exists():
                self.configure(AGENTS)
                await self.start()
            if self.process is not None:
                try:
                    await self.remove_kernels()
                except aiohttp.ClientConnectorError:  # it died, and its kernels are left
                    await self.stop(signal.SIGKILL)
                    self.configure(AGENTS)
                    await self.start()
                    await self.remove_kernels()
        finally:
            await self.stop()
            self.notes.close()

    async def remove_kernels(self) -> None:
        """Delete every kernel, and release every claim."""
        for kernel in await self.get("/v1/kernels"):
            await self.call("DELETE", f"/v1/kernels/{kernel['kernel_id']}?timeout=0")
        for claim in await self.get("/v1/claims"):
            await self.call("DELETE", f"/v1/claims/{claim['claim_id']}")
