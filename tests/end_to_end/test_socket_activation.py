"""A socket that outlives the daemon, as systemd holds one: who asks meanwhile waits."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from support.daemon import AGENTS, Daemon, gpus

RESTARTS = 10 if "AGENTD_SOAK" in os.environ else 3


class Held(Daemon):
    """A daemon that is passed the socket of its configuration."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "process")
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(folder / "agentd.sock"))
        self.listening.listen(128)

    def spawn(self, *arguments: str, **environ: str) -> subprocess.Popen[bytes]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("AGENTD")}
        env |= self._only_sim() | {"AGENTD_RUN_DIR": str(self.run_folder)}
        env |= {"NOTIFY_SOCKET": str(self.folder / "notify"), **environ}
        fd = self.listening.fileno()
        command = [sys.executable, "-m", "agentd", "run", "--config", str(self.config_file)]
        passing = f'LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" "$@" 3<&{fd}'
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                ["bash", "-c", passing, *command, *arguments],
                stdout=log, stderr=log, env=env, pass_fds=[fd],
            )  # fmt: skip


@pytest.fixture
async def held(folder: Path):
    made = Held(folder)
    yield made
    await made.close()
    made.listening.close()


async def test_no_request_is_refused_across_restarts(held: Held) -> None:
    await held.start(AGENTS + gpus(1))
    outcomes: Counter[str] = Counter()
    is_over = False

    async def ask() -> None:
        while not is_over:
            reader, writer = await asyncio.open_unix_connection(held.folder / "agentd.sock")
            writer.write(b"GET /v1/kernels HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 60)
            outcomes[answer.split(b"\r\n")[0].decode()] += 1
            assert json.loads(answer.partition(b"\r\n\r\n")[2]) == []
            writer.close()

    asking = [asyncio.create_task(ask()) for _ in range(3)]
    for _ in range(RESTARTS):
        await held.restart()
        enough = outcomes.total() + 100
        async with asyncio.timeout(30):
            while outcomes.total() < enough:
                for task in asking:
                    assert not task.done(), task.exception()
                await asyncio.sleep(0.01)
    is_over = True
    await asyncio.gather(*asking)
    assert outcomes.keys() == {"HTTP/1.1 200 OK"}, outcomes
    assert outcomes.total() >= 100 * RESTARTS
