from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.daemon import AGENTS, Daemon, gpus
from support.engine import stub_engine
from support.engine_proxy import EngineProxy

ONE_GPU = AGENTS + gpus(1)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of an engine that keeps containers in memory."""
    socket = tmp_path_factory.mktemp("engine") / "stand_in.sock"
    with stub_engine(socket):
        yield socket


@pytest.fixture
async def field_engine(stand_in: Path, folder: Path) -> AsyncIterator[EngineProxy]:
    """A proxy before the stand-in, to which a test gives a dialect."""
    proxy = EngineProxy(folder / "proxy.sock", stand_in)
    await proxy.start()
    yield proxy
    await proxy.stop()


@pytest.fixture
async def field_node(field_engine: EngineProxy, folder: Path) -> AsyncIterator[Daemon]:
    """agentd before that engine, with one GPU; not started, so that the dialect comes first."""
    daemon = Daemon(folder, "docker")
    daemon.engine = field_engine.path
    daemon.configure(ONE_GPU)
    yield daemon
    field_engine.clear()
    await daemon.close()
