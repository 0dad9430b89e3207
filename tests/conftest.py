import asyncio
import os
import random
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from support import engine as engines
from support.daemon import UNITS
from support.daemon_pool import DaemonPool, Serving
from support.needs import ENGINE_26, require, summary
from support.registry import Registry

settings.register_profile(
    "agentd",
    deadline=None,
    max_examples=1000 if "AGENTD_SOAK" in os.environ else 50,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="AGENTD_SOAK" not in os.environ,
)
settings.load_profile("agentd")
structlog.configure(logger_factory=structlog.ReturnLoggerFactory())

MOST_UNSTEADY = 5
TIMEOUT_REPEAT_S = 30.0
"""Seconds between raises of one test's timeout."""
OF_OTHER_TARGETS = {"tests/node": "test-node", "tests/engines": "test-engines"}
"""The tests of these folders are skipped by all targets but one."""

# A shell without job control ignores both in `make test &`, and programs of the tests would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
os.environ.setdefault("AGENTD_SEED", str(random.SystemRandom().randrange(10**6)))
# Agentds of one host share locks; those that tests start do not share this machine's.
_run_folder = tempfile.TemporaryDirectory(prefix="agentd-run-")
os.environ["AGENTD_RUN_DIR"] = _run_folder.name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was skipped and how to run it, and what the choices by chance started from."""
    skipped = terminalreporter.stats.get("skipped", [])
    for line in summary(report.longrepr[2].removeprefix("Skipped: ") for report in skipped):
        terminalreporter.write_line(line)
    config = terminalreporter.config
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        for tests, target in OF_OTHER_TARGETS.items():
            terminalreporter.write_line(f"not run: {tests}; run it with: make {target}")
    for test, failure in unsteady(terminalreporter).items():
        terminalreporter.write_line(f"run again: {test}: {failure}")
    terminalreporter.write_line(f"AGENTD_SEED={os.environ['AGENTD_SEED']}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which many tests had to be run again: that is a fault, not bad luck."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal and len(unsteady(terminal)) > MOST_UNSTEADY:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def unsteady(terminal: pytest.TerminalReporter) -> dict[str, str]:
    """Tests that failed and were run again (`--reruns`), with where they failed."""
    return {report.nodeid: _failure(report) for report in terminal.stats.get("rerun", [])}


def _failure(report: pytest.TestReport) -> str:
    """Return the step that failed, the last line of a test's own on the way, and the error."""
    lines = report.longreprtext.rstrip().splitlines()
    own = [line.rstrip(": ") for line in lines if re.match(r"tests/\S+:\d+: ?$", line)]
    return ": ".join([report.when or "", *own[-1:], *lines[-1:]])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Look for what a test needs before its fixtures are made."""
    for mark in item.iter_markers("needs"):
        require(*mark.args)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, object, object]:
    """Raise a test's timeout until the test ends: an asyncio task that spins swallows one."""
    is_set = yield
    if settings.method == "signal":
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, TIMEOUT_REPEAT_S)
    return is_set


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only a soak runs, and start long tests first.

    Workers take tests in this order, and finish with short ones.
    """
    of_soak = [item for item in items if item.get_closest_marker("soak")]
    if of_soak and "AGENTD_SOAK" not in os.environ:
        config.hook.pytest_deselected(items=of_soak)
        items[:] = [item for item in items if item not in of_soak]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session")
def engine() -> Iterator[engines.Engine]:
    """The installed Docker Engine; skipped where there is none, if that is allowed."""
    yield from running_engine()


@pytest.fixture(scope="session")
def engine26() -> Iterator[engines.Engine]:
    """An Engine 26 that takes names of the Container Device Interface."""
    yield from running_engine("engine-26", programs=ENGINE_26, cdi=True)


def running_engine(*needs: str, **options: Any) -> Iterator[engines.Engine]:
    """Start an engine, and stop it."""
    require(*engines.NEEDS, *needs)
    with engines.started_engine(**options) as running:
        yield running


@pytest.fixture(scope="session")
def daemon_pool() -> Iterator[DaemonPool]:
    """Running daemons that tests of this worker take turns at."""
    pool = DaemonPool()
    yield pool
    asyncio.run(pool.close())


@pytest.fixture(params=["process", *UNITS, pytest.param("docker", marks=pytest.mark.docker)])
async def serving(
    request: pytest.FixtureRequest, daemon_pool: DaemonPool
) -> AsyncIterator[Serving]:
    """Give a running daemon on each runtime, by its configuration; see `DaemonPool`."""
    engine = request.getfixturevalue("engine") if request.param == "docker" else None
    async with daemon_pool.serving(request.param, engine) as give:
        yield give


@pytest.fixture
async def serving_docker(daemon_pool: DaemonPool, engine: engines.Engine) -> AsyncIterator[Serving]:
    """Give a running daemon on the docker runtime, by its configuration."""
    async with daemon_pool.serving("docker", engine) as give:
        yield give


@pytest.fixture
async def serving_process(daemon_pool: DaemonPool) -> AsyncIterator[Serving]:
    """Give a running daemon on the process runtime, by its configuration."""
    async with daemon_pool.serving("process") as give:
        yield give


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    """A registry of images on loopback."""
    made = Registry()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets, which other users may enter."""
    path = Path(tempfile.mkdtemp(prefix="agentd-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)
