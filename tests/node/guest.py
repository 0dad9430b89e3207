"""In the guest: runs commands that come over a virtio-serial port; a line of JSON in, one out."""

import json
import os
import subprocess
import threading
import time

MOST_CHARACTERS = 60_000
lock = threading.Lock()


def work(port: int, order: dict[str, object]) -> None:
    """Run one command, and send its status and the end of its output."""
    try:
        done = subprocess.run(
            ["bash", "-c", str(order["command"])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=float(str(order["timeout"])),
            cwd="/root",
            env={**os.environ, "HOME": "/root", "LANG": "C.UTF-8"},
            check=False,
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        status, output = 124, late.stdout or b""
    text = output.decode(errors="replace")[-MOST_CHARACTERS:]
    unsent = (json.dumps({"id": order["id"], "status": status, "output": text}) + "\n").encode()
    with lock:
        while unsent:
            unsent = unsent[os.write(port, unsent) :]


def main() -> None:
    """Take commands for ever, each in a thread of its own."""
    port = os.open("/dev/virtio-ports/control", os.O_RDWR)
    unread = b""
    while True:
        chunk = os.read(port, 65536)
        if not chunk:  # nobody is connected
            time.sleep(0.2)
            continue
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            try:
                order = json.loads(line)
            except ValueError:
                continue
            threading.Thread(target=work, args=(port, order), daemon=True).start()


main()
