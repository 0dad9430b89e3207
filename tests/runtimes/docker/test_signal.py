"""Signals to containers, as engines refuse them."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentd.core.kernel.observation import ObservedKernel
from agentd.core.kernel.states import KernelRef, ObservedState
from agentd.errors import RuntimeFailure
from agentd.runtimes.docker.runtime import DockerRuntime
from contracts.test_runtime import docker_settings
from runtimes.docker.fake_engine import FakeEngine, says

RUNS = ObservedKernel("k1", "a", "docker", "c1", ObservedState.RUNNING, "", "")
LATE = b'{"message": "Cannot kill container: c1: unknown error: process already finished"}'


@pytest.mark.parametrize(
    ("status", "found", "is_sent"),
    [
        (204, None, True),
        (404, None, False),
        (409, None, False),
        (500, None, False),
        (500, replace(RUNS, state=ObservedState.EXITED), False),
        (500, RUNS, None),
    ],
    ids=["sent", "removed", "ended", "just-removed", "just-ended", "refused"],
)
async def test_signal_tells_an_end_from_a_refusal(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    found: ObservedKernel | None,
    is_sent: bool | None,
) -> None:
    async def find(_: Any) -> ObservedKernel | None:
        return found

    engine = FakeEngine(folder / "engine.sock")
    engine.answer = says(status, b"" if status == 204 else LATE)
    await engine.start()
    runtime = DockerRuntime("n", docker_settings(engine.path))
    monkeypatch.setattr(runtime, "find", find)
    try:
        if is_sent is None:
            with pytest.raises(RuntimeFailure, match="already finished"):
                await runtime.signal(KernelRef("k1", "c1"), 2)
        else:
            assert await runtime.signal(KernelRef("k1", "c1"), 2) == is_sent
    finally:
        await runtime.close()
        await engine.stop()
    assert engine.asked[-1].endswith("/containers/c1/kill")
