"""In the guest: runs commands and makes requests; a line of JSON in, one out.

They come over a virtio-serial port. A request goes to the daemon's main socket from this process,
which saves the start of an interpreted Python for each.
"""

import http.client
import json
import os
import socket
import subprocess
import threading
import time
from typing import Any

MOST_CHARACTERS = 60_000
SOCKET = "/run/agentd/agentd.sock"
lock = threading.Lock()


class Unix(http.client.HTTPConnection):
    """HTTP over the daemon's socket."""

    def connect(self) -> None:
        """Connect to it."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(SOCKET)


def request(order: dict[str, Any]) -> tuple[int, str]:
    """Make a request; return the status, 0 where there is none, and the content."""
    connection = Unix("agentd", timeout=order["timeout"])
    headers = {"Content-Type": "application/json"}
    try:
        connection.request(order["method"], order["path"], order["body"] or None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error)
    finally:
        connection.close()


def command(order: dict[str, Any]) -> tuple[int, str]:
    """Run a command of the shell; return its status and the end of its output."""
    try:
        done = subprocess.run(
            ["bash", "-c", order["command"]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=order["timeout"],
            cwd="/root",
            env={**os.environ, "HOME": "/root", "LANG": "C.UTF-8"},
            check=False,
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        status, output = 124, late.stdout or b""
    return status, output.decode(errors="replace")[-MOST_CHARACTERS:]


def work(port: int, order: dict[str, Any]) -> None:
    """Do one thing, and send what came of it."""
    status, output = command(order) if "command" in order else request(order)
    unsent = (json.dumps({"id": order["id"], "status": status, "output": output}) + "\n").encode()
    with lock:
        while unsent:
            unsent = unsent[os.write(port, unsent) :]


def main() -> None:
    """Take orders for ever, each in a thread of its own."""
    port = os.open("/dev/virtio-ports/control", os.O_RDWR)
    unread = b""
    while True:
        chunk = os.read(port, 65536)
        if not chunk:  # nobody is connected
            time.sleep(0.05)
            continue
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            try:
                order = json.loads(line)
            except ValueError:
                continue
            threading.Thread(target=work, args=(port, order), daemon=True).start()


main()
