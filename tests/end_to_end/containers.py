"""Steps that tests of containers share."""

from support.daemon import Daemon
from support.engine import Engine

MOUNTABLE = 'allowed-mounts = ["{folder}/data"]\n'


def inspected(engine: Engine, kernel: dict) -> dict:
    return engine.call("GET", f"/containers/{kernel['container_id']}/json")


async def printed(daemon: Daemon, script: str, **body: object) -> str:
    """Return the output of a script in a kernel with these members."""
    answer = await daemon.create(kernel_id="printer", command=["sh", "-c", script], **body)
    assert answer.status == 201, answer.content
    await daemon.until("printer", "terminated")
    log = await daemon.call("GET", "/v1/kernels/printer/logs")
    await daemon.call("DELETE", "/v1/kernels/printer")
    return log.content.decode()
