"""Write down what this version of agentd writes about its kernels, for all later ones to read.

    python tests/recorded/record.py NAME

Run it once for every release, with the environment of the tests: it starts the daemon on both
runtimes (with an engine of its own), creates a kernel that runs and one that has ended, and
keeps their labels, records and the node's files in NAME.json. `test_upgrade.py` has every
such file adopted by the agentd of today.
"""

import asyncio
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from daemon import AGENTS, Daemon, gpus
from engine import Engine

HERE = Path(__file__).parent
BODIES = {
    "lives": {"slots": {"cuda.device": 1, "cpu": 1, "mem": "64m"}, "env": {"A": "b"}},
    "ended": {"slots": {"cuda.device": 1}, "command": ["sh", "-c", "exit 3"]},
}


async def recorded(folder: Path, runtime: str, engine: Engine) -> dict[str, Any]:
    """Run kernels on a runtime, and return what is written down about them."""
    folder.chmod(0o755)
    daemon = Daemon(folder, runtime, engine)
    daemon.node = f"recorded-{runtime}"
    await daemon.start(AGENTS + gpus(2))
    try:
        return await of(daemon, engine)
    finally:
        if daemon.process is None:
            await daemon.start()
        await daemon.close()


async def of(daemon: Daemon, engine: Engine) -> dict[str, Any]:
    for name, body in BODIES.items():
        made = await daemon.create(kernel_id=name, **body)
        assert made.status == 201, made.content
    await daemon.until("ended", "terminated")
    kernels = {kernel["kernel_id"]: kernel for kernel in await daemon.get("/v1/kernels")}
    await daemon.stop(signal.SIGKILL)
    state = daemon.folder / "state"
    files = {
        str(path.relative_to(state)): path.read_text()
        for path in sorted(state.rglob("*"))
        if path.is_file() and path.name not in ("lock", "output.log")
    }
    containers = {
        container["Labels"]["io.agentd.kernel"]: {
            "name": container["Names"][0].removeprefix("/"),
            "labels": container["Labels"],
        }
        for container in engine.containers()
    }
    return {"node": daemon.node, "kernels": kernels, "files": files, "containers": containers}


async def main(name: str) -> None:
    home = Path(tempfile.mkdtemp(prefix="agentd-engine-", dir="/tmp"))
    engine = Engine(home)
    engine.start()
    engine.import_image()
    found: dict[str, Any] = {"bodies": BODIES}
    try:
        for runtime in ("process", "docker"):
            folder = Path(tempfile.mkdtemp(prefix="agentd-", dir="/tmp"))
            found[runtime] = await recorded(folder, runtime, engine)
            shutil.rmtree(folder)
    finally:
        engine.end()
        shutil.rmtree(home, ignore_errors=True)
    (HERE / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
