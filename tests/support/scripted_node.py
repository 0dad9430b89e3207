"""A node that answers `agentctl run` and `create` as a test decides, and the program itself."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from support import fork_server

BIN = Path(sys.executable).parent
PATIENCE = "agentd.cli.agentctl.run.RECONNECT_TIMEOUT_S"


class Done(NamedTuple):
    """The end of a program."""

    status: int
    stdout: str
    stderr: str


class Agentctl:
    """`agentctl` in a process of its own, with output in files unless a test names others.

    One with words of a shell before it (`prefix`) is a cold start, others are forks.
    """

    def __init__(
        self,
        folder: Path,
        *words: str,
        patience_s: float | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        prefix: str = "",
    ) -> None:
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        arguments = ["--socket", str(folder / "agentd.sock"), *words]
        deadlines = {} if patience_s is None else {PATIENCE: patience_s}
        self._process: subprocess.Popen[bytes] | fork_server.Forked
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            output = out.fileno() if stdout is None else stdout
            if prefix:
                command = ["sh", "-c", f'{prefix} exec "$@"', "sh", str(BIN / "agentctl")]
                self._process = subprocess.Popen(
                    [*command, *arguments], stdin=stdin, stdout=output, stderr=err
                )
            else:
                self._process = fork_server.spawn(
                    "agentctl", arguments, {}, stdin=stdin, stdout=output, stderr=err.fileno(),
                    deadlines=deadlines,
                )  # fmt: skip

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    async def done(self) -> Done:
        try:
            status = await asyncio.to_thread(self._process.wait, 40)
        finally:
            self._process.kill()
        return Done(status, self.stdout, self.stderr)


class ScriptedNode:
    """A node that answers as a test decides, and lists the calls that change something."""

    def __init__(self) -> None:
        self.created = asyncio.Event()
        """A create was received; it is answered once `may_answer` is set."""
        self.may_answer = asyncio.Event()
        self.answer: tuple[int, dict[str, Any]] | None = None
        """Status and content of the answer to a create; None closes the connection."""
        self.kernel: dict[str, Any] | None = None
        self.labels: dict[str, str] = {}
        self.body: dict[str, Any] = {}
        self.lookups = asyncio.Semaphore(0)
        self.calls: list[str] = []
        self.called = asyncio.Condition()
        self.log: Sequence[bytes] = ()
        """Standard output of the kernel; the log ends when the kernel does."""
        self.refused: dict[str, str] = {}
        """Error codes of the answers to the logs of streams."""
        self.ends_of = {"TERM", "stop"}
        """Signals and calls that end the kernel."""
        self.ended = asyncio.Event()
        self.hangs = False
        """Whether signals and stops are never answered."""

    def set_kernel(self, state: str, **members: Any) -> None:
        """Set the kernel that the create made."""
        self.kernel = {"kernel_id": "k1", "labels": self.labels, "state": state, "exit_code": None}
        self.kernel |= members

    def end(self, exit_code: int) -> None:
        self.set_kernel("terminated", exit_code=exit_code)
        self.ended.set()

    async def note(self, call: str) -> None:
        async with self.called:
            self.calls.append(call)
            self.called.notify_all()

    async def until_called(self, *calls: str) -> None:
        """Wait until these calls were received first, in this order."""
        async with asyncio.timeout(20), self.called:
            await self.called.wait_for(lambda: self.calls[: len(calls)] == list(calls))

    def accept(self) -> None:
        """Answer creates with a kernel, which has ended if `ended` is set."""
        self.answer = 201, {}
        self.may_answer.set()

    async def create(self, request: web.Request) -> web.Response:
        self.body = await request.json()
        self.labels = self.body.get("labels", {})
        self.created.set()
        await self.note("create")
        await self.may_answer.wait()
        if self.answer is None:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        status, content = self.answer
        if status == 201 and not content:
            self.end(0) if self.ended.is_set() else self.set_kernel("running")
            content = self.kernel or {}
        return web.json_response(content, status=status)

    async def list(self, request: web.Request) -> web.Response:
        self.lookups.release()
        labels = [tuple(label.split("=")) for label in request.query.getall("label")]
        fits = self.kernel is not None and set(labels) <= {*self.kernel["labels"].items()}
        return web.json_response([self.kernel] if fits else [])

    async def show(self, _: web.Request) -> web.Response:
        if self.kernel is None:
            return web.json_response({"code": "UnknownKernel", "detail": "no"}, status=404)
        if self.kernel["state"] == "terminated":
            await self.note("read")
        return web.json_response(self.kernel)

    async def logs(self, request: web.Request) -> web.StreamResponse:
        code = self.refused.get(request.query["stream"])
        if code is not None:
            return web.json_response({"code": code, "detail": "no"}, status=400)
        response = web.StreamResponse(headers={"Log-Position": "0"})
        await response.prepare(request)
        if request.query.get("follow") == "true":
            for chunk in self.log if request.query["stream"] != "stderr" else ():
                await response.write(chunk)
            await self.ended.wait()
        return response

    async def stop(self, request: web.Request) -> web.Response:
        timeout = (await request.json()).get("timeout")
        await self.note("stop" if timeout is None else f"stop {timeout:g}")
        if not self.hangs and ("stop" in self.ends_of or timeout == 0):
            self.end(143)
        await self.ended.wait()
        return web.json_response(self.kernel)

    async def signal(self, request: web.Request) -> web.Response:
        name = (await request.json())["signal"]
        await self.note(name)
        if name in self.ends_of:
            self.end(0)
        if self.hangs:
            await self.ended.wait()
        return web.Response(status=204)

    async def delete(self, _: web.Request) -> web.Response:
        await self.note("delete")
        self.kernel = None
        return web.Response(status=204)

    @asynccontextmanager
    async def serving(self, folder: Path) -> AsyncIterator[None]:
        """Serve on the socket of a folder."""
        app = web.Application()
        app.router.add_post("/v1/agents/agent-1/kernels", self.create)
        app.router.add_get("/v1/kernels", self.list)
        app.router.add_get("/v1/kernels/k1", self.show)
        app.router.add_post("/v1/kernels/k1/stop", self.stop)
        app.router.add_post("/v1/kernels/k1/signal", self.signal)
        app.router.add_delete("/v1/kernels/k1", self.delete)
        app.router.add_get("/v1/kernels/k1/logs", self.logs)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        await web.UnixSite(runner, os.fspath(folder / "agentd.sock")).start()
        yield
        self.may_answer.set()
        self.ended.set()
        await runner.cleanup()
