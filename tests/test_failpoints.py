import asyncio
import errno
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentd import failpoints
from agentd.failpoints import hit, hit_async
from crash.points import PASSED_BY, POINTS, RUNTIMES, SAME_AS

SOURCE = Path(failpoints.__file__).parent
KINDS = ("intent", "record", "claim", "engines", "devices", "node")


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def test_every_failpoint_in_the_source_is_listed() -> None:
    named = named_in(SOURCE)
    assert {"{step}.before_replace", "{step}.after_replace"} <= named
    named = {name for name in named if "{" not in name}
    named |= {f"{kind}.{when}_replace" for kind in KINDS for when in ("before", "after")}
    assert named == failpoints.POINTS
    assert {*SAME_AS, *(name for names in PASSED_BY.values() for name in names)} <= named


def named_in(folder: Path) -> set[str]:
    paths = [path for path in folder.rglob("*.py") if path.name != "failpoints.py"]
    text = "".join(path.read_text() for path in paths)
    return set(re.findall(r'(?:hit|hit_async|hit_async,)[( ]f?"([a-z_{}.]+)"', text))


@pytest.mark.parametrize("runtime", sorted(RUNTIMES))
def test_failpoint_of_a_runtime_is_in_its_package(runtime: str) -> None:
    elsewhere = {name for name, point in POINTS.items() if point.on == RUNTIMES}
    expected = {name for name, point in POINTS.items() if runtime in point.on} - elsewhere
    assert named_in(SOURCE / "runtimes" / runtime) == expected


@pytest.mark.parametrize("runtime", sorted(RUNTIMES))
def test_failpoint_shares_its_state_with_one_of_a_runtime(runtime: str) -> None:
    for name, point in POINTS.items():
        others = [other for other in point.same_as if runtime in POINTS[other].on]
        assert len(others) <= 1, name
        seen = {name}
        while others:
            assert others[0] not in seen, f"{name} is the same as itself"
            seen.add(others[0])
            others = [other for other in POINTS[others[0]].same_as if runtime in POINTS[other].on]


def test_every_failpoint_is_documented() -> None:
    page = SOURCE.parents[1] / "docs/explanation/crash-safety.md"
    rows = dict(re.findall(r"^\| `(\w+)` \| (`.*`) \|$", page.read_text(), re.MULTILINE))
    listed = {f"{step}.{p}" for step, names in rows.items() for p in re.findall(r"\w+", names)}
    assert listed >= set(POINTS)


def test_failpoint_that_is_not_set_does_nothing() -> None:
    hit("create.after_commit")
    assert failpoints.armed_points() == []
    assert failpoints.inherited_environment() == {}


def test_failpoint_term_counts_for_its_visits() -> None:
    failpoints.arm("create.after_commit=1*off->2*error(ENOSPC)->off; stop.after_term=error(EIO)")
    assert failpoints.armed_points() == ["create.after_commit", "stop.after_term"]
    hit("create.after_commit")
    for _ in range(2):
        with pytest.raises(OSError, match=r"failpoint create\.after_commit") as failure:
            hit("create.after_commit")
        assert failure.value.errno == errno.ENOSPC
    hit("create.after_commit")
    hit("create.after_plan")
    for _ in range(3):
        with pytest.raises(OSError, match=r"failpoint stop\.after_term"):
            hit("stop.after_term")


async def test_failpoint_delay_of_a_coroutine_blocks_no_other() -> None:
    failpoints.arm("create.after_plan=1*delay(200)")
    waiting = asyncio.create_task(hit_async("create.after_plan"))
    await asyncio.sleep(0)
    await hit_async("create.after_plan")
    assert not waiting.done()
    await waiting


def test_failpoint_delay_of_a_function_blocks_it() -> None:
    failpoints.arm("record.before_drop=delay(20)")
    start = time.monotonic()
    hit("record.before_drop")
    assert time.monotonic() - start >= 0.02


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("create.nowhere=kill", "expected POINT=TERM; points: adopt.after_action"),
        ("create.after_plan", "invalid failpoint 'create.after_plan'"),
        ("create.after_plan=explode", "invalid term 'explode': expected off, kill"),
        ("create.after_plan=delay(soon)", "invalid term 'delay(soon)'"),
        ("create.after_plan=error(ENOSUCH)", "invalid term 'error(ENOSUCH)'"),
        ("create.after_plan=x*kill", "invalid term 'x*kill'"),
        ("create.after_plan=kill(everybody)", "invalid term 'kill(everybody)'"),
        ("create.after_plan=", "invalid term ''"),
    ],
)
def test_invalid_failpoint_is_refused_and_changes_nothing(text: str, why: str) -> None:
    failpoints.arm("create.after_plan=off")
    with pytest.raises(ValueError, match=re.escape(why)):
        failpoints.arm(text)
    assert failpoints.armed_points() == ["create.after_plan"]
