"""In the guest: ask the daemon. `ask.py METHOD PATH [JSON]` prints the status and the answer."""

import http.client
import os
import socket
import sys

SOCKET = os.environ.get("AGENTD_SOCKET", "/run/agentd/agentd.sock")
TIMEOUT_S = 120


class Unix(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def connect(self) -> None:
        """Connect to the daemon's socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(SOCKET)


def main() -> None:
    """Make one request."""
    method, path, *body = sys.argv[1:]
    connection = Unix("agentd", timeout=TIMEOUT_S)
    connection.request(
        method, path, body[0] if body else None, {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    print(answer.status, flush=True)
    while content := answer.read1():
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
    print()


main()
