"""A process that has imported agentd once, and forks its programs for the tests of one worker.

A cold start of a daemon spends most of its processor time on imports. A fork skips them and is
otherwise a program of its own: it has its own pid, environment, arguments and descriptors, it is
killed and waited for like any other, and failpoints are armed after the fork. A test may give it
shorter deadlines than the product's: they are set after the fork as well. The processes of its
plugins are forks too; tests/pluginhost starts them as the product does.

    worker   --- program, arguments, environment, descriptors --->   server
             <--- pid ---                                            fork() --> program
             <--- exit status, on a pipe of its own, once it is reaped ---
"""

from __future__ import annotations

import array
import asyncio
import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib.util
import io
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NoReturn

import importlib_metadata

PROGRAMS = {
    "agentd": "agentd.__main__:main",
    "agentctl": "agentd.cli.agentctl.main:agentctl",
    "agentd-fleet": "agentd_fleet.cli:agentd_fleet",
}
PRELOADED = (
    "agentd.cli.agentd.main",
    "agentd.daemon.lifecycle",
    "agentd.log",
    "agentd.config.loading",
    "agentd.cli.tables",
    "agentd.client",
    "agentd.host.systemd.dbus",
    "agentd.runtimes.docker.runtime",
    "agentd.runtimes.process.runtime",
    "concurrent.futures.thread",
    "termios",
    "zipp",
    "agentd_fleet.daemon",
    "agentd_fleet.join.publisher",
)
MAX_REQUEST_BYTES = 1 << 20
RUN_TIMEOUT_S = 80.0
PLUGIN = "plugin"
"""The name of a forked plugin's process, with the pid of its daemon: the environment that `/proc`
shows is the server's."""
BOOT_ID = b"/proc/sys/kernel/random/boot_id"
CLONE_NEWNS = 0x20000
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
"""For unshare(2) and mount(2)."""
STANDARD = 3
"""The descriptors of each request: standard input, output and error, then the status pipe."""


class Forked:
    """A forked program; the part of `subprocess.Popen` that tests use."""

    def __init__(self, args: Sequence[str], pid: int, status: int) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        weakref.finalize(self, os.close, status)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, or None while the program runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit status; a signal's is negative.

        Raises:
            subprocess.TimeoutExpired: the program still runs after `timeout` seconds.
        """
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                self.returncode = int(os.read(self._status, 16) or b"-9")
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The worker's end of the server."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the server; it kills what it forked and still runs."""
        self._channel.close()
        self._process.wait(10)

    def fork(
        self,
        program: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        deadlines: Mapping[str, float] = MappingProxyType({}),
        boot_id: str = "",
    ) -> Forked:
        """Start a program of `PROGRAMS` with these descriptors."""
        request = {"program": program, "arguments": arguments, "env": dict(env)}
        request |= {"cwd": str(Path.cwd()), "deadlines": dict(deadlines), "boot_id": boot_id}
        status, theirs = os.pipe()
        passed = array.array("i", [stdin, stdout, stderr, theirs])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)]
        with self._lock:
            try:
                self._channel.sendmsg([json.dumps(request).encode()], rights)
            finally:
                os.close(theirs)
            pid = int(self._channel.recv(16))
        return Forked([program, *arguments], pid, status)


@functools.cache
def of_worker() -> ForkServer:
    """Return the server of this process, started for the first caller."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def spawn(
    program: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    *,
    stdout: int,
    stderr: int,
    stdin: int | None = None,
    deadlines: Mapping[str, float] = MappingProxyType({}),
    boot_id: str = "",
) -> Forked:
    """Fork a program from this worker's server; it may see another boot of the machine.

    `deadlines` replace constants of the product in the fork, by dotted name:
    `{"agentd.daemon.lifecycle.AFTER_DRAIN_S": 1.0}`.
    """
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a descriptor is wanted
        source = nothing.fileno() if stdin is None else stdin
        return of_worker().fork(program, arguments, env, source, stdout, stderr, deadlines, boot_id)


def run(
    program: str, *arguments: str, env: Mapping[str, str] | None = None, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` with captured output does."""
    with (
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        source.write(text.encode())
        source.seek(0)
        descriptors = {"stdin": source.fileno(), "stdout": out.fileno(), "stderr": err.fileno()}
        environ = os.environ if env is None else env
        process = spawn(program, arguments, environ, **descriptors)
        status = process.wait(RUN_TIMEOUT_S)
        out.seek(0)
        err.seek(0)
        printed, said = out.read().decode(), err.read().decode()
    return subprocess.CompletedProcess([program, *arguments], status, printed, said)


def serve(channel: socket.socket) -> dict[str, Any]:
    """Fork for each request; return the request in the child, and never in the server."""
    children: dict[int, tuple[int, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in children:
                    selector.unregister(key.fd)
                    _report(key.fd, *children.pop(key.fd))
                    continue
                content, descriptors, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 4)
                if not content:
                    _kill(pid for pid, _ in children.values())
                    os._exit(0)
                request: dict[str, Any] = json.loads(content)
                if (pid := os.fork()) == 0:
                    selector.close()
                    _take(descriptors)
                    return request
                for descriptor in descriptors[:STANDARD]:
                    os.close(descriptor)
                watched = os.pidfd_open(pid)
                children[watched] = pid, descriptors[STANDARD]
                selector.register(watched, selectors.EVENT_READ)
                channel.send(str(pid).encode())


def _report(watched: int, pid: int, pipe: int) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(watched)
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, str(status).encode())
    os.close(pipe)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _set(deadlines: Mapping[str, float]) -> None:
    """Replace constants wherever they were imported, and defaults of classes with timeouts."""
    for path, seconds in deadlines.items():
        owner, _, name = path.rpartition(".")
        module, _, kind = owner.rpartition(".")
        new: Any = seconds
        if kind[0].isupper():
            old = getattr(importlib.import_module(module), kind)
            new = functools.partial(old, **{name: seconds})
            new()  # it has such a field
            name = kind
        else:
            old = getattr(importlib.import_module(owner), name)
        for loaded in [found for at, found in sys.modules.items() if at.startswith("agentd")]:
            if vars(loaded).get(name) is old:
                setattr(loaded, name, new)


def _see_another_boot(boot_id: str) -> None:
    """Replace the boot id in a mount namespace of this process's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(f"{boot_id}\n")
        file.flush()
        for call in (
            lambda: libc.unshare(CLONE_NEWNS),
            lambda: libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None),
            lambda: libc.mount(file.name.encode(), BOOT_ID, None, MS_BIND, None),
        ):
            if call():
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _take(descriptors: Sequence[int], keep: int = STANDARD - 1) -> None:
    """Make these descriptors the standard ones, and close all others but one."""
    for number, descriptor in enumerate(descriptors[:STANDARD]):
        os.dup2(descriptor, number)
    os.closerange(STANDARD, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))


class ForkedPlugin:
    """A forked process of a plugin; the part of `subprocess.Popen` that agentd uses."""

    def __init__(self, pid: int, stdout: BinaryIO) -> None:
        self.pid, self.stdout = pid, stdout
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        if self._status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if ended else None
        return self._status


def _fork_plugin(
    program: Callable[[], None],
    modules: frozenset[str],
    environment: Callable[[str], dict[str, str]],
    name: str,
    channel: socket.socket,
    mark: str,
) -> ForkedPlugin:
    """Fork a daemon into the process of a plugin, as `agentd.pluginhost.process` starts one."""
    daemon = os.getpid()
    output, theirs = os.pipe()
    begun, begins = os.pipe()

    def become() -> None:
        os.setsid()
        os.chdir("/")
        Path("/proc/self/comm").write_text(f"{PLUGIN} {daemon}")
        _take([os.open(os.devnull, os.O_RDONLY), theirs, theirs], keep=channel.fileno())
        _begin_anew(environment(mark), modules)
        sys.argv = [sys.argv[0], name, str(channel.fileno()), str(daemon)]
        program()

    try:
        if (pid := os.fork()) == 0:
            _end(_status_of(become))
    except OSError:
        os.close(output)
        raise
    finally:
        os.close(theirs)
        os.close(begins)
        os.read(begun, 1)  # until the child has a name and has closed its end, or there is none
        os.close(begun)
    return ForkedPlugin(pid, open(output, "rb", buffering=0))  # noqa: PTH123


def _begin_anew(environ: Mapping[str, str], modules: frozenset[str]) -> None:
    """Forget what a program that has just started would not know."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    asyncio.set_event_loop(None)
    asyncio._set_running_loop(None)
    faulthandler.disable()
    gc.freeze()
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    errors = io.FileIO(2, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(errors, errors="backslashreplace", write_through=True)
    os.environ.clear()
    os.environ.update(environ)
    for loaded, module in list(sys.modules.items()):
        if module is None or (loaded.startswith("agentd") and loaded not in modules):
            del sys.modules[loaded]  # a plugin that imports it is found out
            package, _, attribute = loaded.rpartition(".")
            if package in modules:
                vars(sys.modules[package]).pop(attribute, None)
    importlib.invalidate_caches()


def _go_on_as(_: str, command: Sequence[str]) -> NoReturn:
    """Run a module of agentd, which a cold program would execute in its place (`python -m`)."""
    _, _, _, module, *arguments = command
    assert all(os.get_inheritable(int(number)) for number in arguments)
    sys.argv = [module, *arguments]
    sys.modules[module].main()
    raise SystemExit


def main() -> None:
    """Import what the programs need, serve, and become the program in each child."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    # Python 3.12 and later print this where a daemon forks a plugin, into what tests compare.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.remove(str(Path(__file__).parent))
    child = importlib.import_module("agentd.pluginhost.child")
    of_plugins = frozenset(name for name in sys.modules if name.startswith("agentd"))
    for module in [*PRELOADED, *(name.partition(":")[0] for name in PROGRAMS.values())]:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:  # the fleet is optional
            importlib.import_module(module)
    importlib_metadata.entry_points()  # it caches the list of what is installed
    gc.freeze()  # a collection in a child would copy every page
    request = serve(channel)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if request["boot_id"]:
        _see_another_boot(request["boot_id"])
    _set(request["deadlines"])
    process: Any = importlib.import_module("agentd.pluginhost.process")
    process._popen = functools.partial(_fork_plugin, child.main, of_plugins, process._environment)
    os.execv = _go_on_as
    sys.argv = [request["program"], *request["arguments"]]
    module, _, function = PROGRAMS[request["program"]].partition(":")
    _end(_status_of(getattr(sys.modules[module], function)))


def _status_of(program: Callable[[], object]) -> int:
    """Run a program; return the exit status that Python would give it."""
    try:
        program()
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - Python would print it, and end
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """Exit as Python does, without freeing what the server imported: 0.2 s of processor time."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
