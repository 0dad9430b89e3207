"""The end of a background task is an error that an operator sees."""

import asyncio
from collections.abc import Coroutine

import pytest
from structlog.testing import capture_logs

from agentd.program import background as module
from agentd.program.background import NOT_VITAL, Background


async def returns() -> None: ...


async def raises() -> None:
    raise RuntimeError("no more")


async def is_cancelled() -> None:
    raise asyncio.CancelledError


ENDS = [
    (returns, "returned"),
    (raises, "RuntimeError: no more"),
    (is_cancelled, "was cancelled"),
]


@pytest.mark.parametrize(("work", "why"), ENDS, ids=lambda end: getattr(end, "__name__", ""))
@pytest.mark.parametrize("name", ["reconciler", *sorted(NOT_VITAL)])
async def test_a_task_that_ends_is_noticed(name: str, work, why: str) -> None:
    failures: list[str] = []
    background = Background(failures.append)
    with capture_logs() as logs:
        background.run(name, work())
        await _turns()
    assert [(line["event"], line["log_level"], line["task"], line["reason"]) for line in logs] == [
        ("task.ended", "error", name, why)
    ]
    reason = f"background task {name} ended: {why}"
    is_vital = name not in NOT_VITAL
    assert failures == ([reason] if is_vital else [])
    texts = [*map(str, background.conditions)]
    assert texts == ([] if is_vital else [f"{reason} (restart agentd)"])


async def test_end_of_a_vital_task_counts_before_it_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Log:
        def error(self, *_: object, **__: object) -> None:
            steps.append("logged")

    steps: list[str] = []
    monkeypatch.setattr(module, "log", Log())
    background = Background(lambda _: steps.append("failed"))
    background.run("reconciler", raises())
    await _turns()
    assert steps == ["failed", "logged"]


async def test_a_task_that_the_daemon_stops_is_no_error() -> None:
    failures: list[str] = []
    background = Background(failures.append)

    def forever() -> Coroutine[object, object, None]:
        return asyncio.sleep(1000)

    with capture_logs() as logs:
        for name in ("reconciler", *NOT_VITAL):
            background.run(name, forever())
        await _turns()
        await background.close()
    assert (failures, background.conditions, logs) == ([], [], [])


async def _turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)
