"""Whose mistake an engine's refusal is: the caller's, the engine's, or that of the moment."""

import pytest
from msgspec.structs import replace

from agentd.core.kernel.edits import ContainerEdits, Mount
from agentd.errors import (
    AgentdError,
    CommandNotFound,
    InvalidRequest,
    RuntimeFailure,
    RuntimeUnavailable,
    StateUnavailable,
)
from agentd.runtimes.docker.docker_errors import DockerError
from agentd.runtimes.docker.error_translation import translate_error
from agentd.runtimes.docker.mounts import MountSource
from contracts.test_runtime import plan

PARSER = 'AppArmor enabled: exec: "apparmor_parser": executable file not found in $PATH'
HOOK = "error running hook #0: fork/exec /usr/bin/nvidia-hook: no such file or directory"
OCI = "failed to create task for container: failed to create shim task: OCI runtime create failed: "
PROCESS = f"{OCI}runc create failed: unable to start container process: "
INIT = f"{PROCESS}error during container init: "
SOURCE = 'invalid mount config for type "bind": bind source path does not exist: '
CPUSET = "/u/write /sys/fs/cgroup/x/cpuset.cpus"

MEANINGS = {
    "no such command": (
        400, f'{PROCESS}exec: "sleep": executable file not found in $PATH: unknown', 127,
        CommandNotFound,
    ),
    "a command that is a folder": (
        400, f'{PROCESS}exec: "/": permission denied: unknown', 126, CommandNotFound,
    ),
    "a command of an engine with other words": (500, "it cannot run", 127, CommandNotFound),
    "a command named as a port's trouble": (
        400, f'{PROCESS}exec: "port is already allocated": executable file not found in $PATH',
        127, CommandNotFound,
    ),
    "a command named as a hook": (
        400, f'{PROCESS}exec: "webhook": executable file not found in $PATH', 127, CommandNotFound,
    ),
    "a path of a command named as a hook": (
        400, f'{PROCESS}exec: "/opt/hook #1": stat /opt/hook #1: no such file or directory', 127,
        CommandNotFound,
    ),
    "a command named as a hook, crun": (
        500, "crun: executable file `webhook` not found in $PATH: No such file or directory", 127,
        CommandNotFound,
    ),
    "a command named as a mount's trouble": (
        400, f'{PROCESS}exec: "a \\" error mounting": executable file not found in $PATH', 127,
        CommandNotFound,
    ),
    "a command named as a full disk": (
        400, f'{PROCESS}exec: "no space left on device": executable file not found in $PATH', 127,
        CommandNotFound,
    ),
    "a path of a command named as a full disk": (
        400, f'{PROCESS}exec: "/x: no space left on device": stat /x: no space left on device: no',
        127, CommandNotFound,
    ),
    "a command on a file system that fails": (
        500, f'{PROCESS}exec: "/usr/nfs/run.sh": input/output error: unknown', 128, RuntimeFailure,
    ),
    "a command of another format named as a conflict": (
        500, f'{PROCESS}exec: "./no such container": exec format error: unknown', 128,
        RuntimeFailure,
    ),
    "a folder that cannot be entered": (
        500, f'{INIT}chdir to cwd ("/x") set in config.json failed: not a directory: unknown', 127,
        InvalidRequest,
    ),
    "a folder that cannot be made": (
        500, f"{INIT}mkdir /sys/x: read-only file system: unknown", 128, InvalidRequest,
    ),
    "a folder that is a file": (500, "Cannot mkdir: /x is not a directory", 0, InvalidRequest),
    "a user that the image lacks": (
        500, "unable to find user nosuch: no matching entries in passwd file", 128, InvalidRequest,
    ),
    "a device's mount that fails": (
        400, f'{INIT}error mounting "/x" to rootfs at "/usr/lib/x": not a directory: unknown', 127,
        RuntimeFailure,
    ),
    "AppArmor without its parser": (500, PARSER, 128, RuntimeFailure),
    "a hook that is not there": (400, f"{INIT}{HOOK}: unknown", 127, RuntimeFailure),
    "an init that is not there": (
        500, 'exec: "docker-init": executable file not found in $PATH', 128, RuntimeFailure,
    ),
    "an init that init-path does not name": (
        400, f'{INIT}error mounting "/x" to rootfs at "/sbin/docker-init": stat /x: no such file',
        127, RuntimeFailure,
    ),
    "a runtime that is not there": (
        500, 'failed to start shim: exec: "runc": executable file not found in $PATH: unknown', 128,
        RuntimeFailure,
    ),
    "a port that another has": (
        500, "driver failed programming: Bind for 0.0.0.0:80 failed: port is already allocated",
        128, RuntimeUnavailable,
    ),
    "a container that a prune removed": (
        404, "No such container: 7f1d3f", 0, RuntimeUnavailable,
    ),
    "a container that a prune removes": (
        409, "container is marked for removal and cannot be started", 0, RuntimeUnavailable,
    ),
    "a value that no engine takes": (400, "invalid reference format", 0, InvalidRequest),
    "a full disk": (500, "write /data/docker/x: no space left on device", 0, StateUnavailable),
    "a full disk in other words": (
        500, "error creating overlay mount to /data/x/merged: No space left on device", 0,
        StateUnavailable,
    ),
    "a user without room for keys": (
        500, f"{INIT}unable to join session keyring: disk quota exceeded", 0, RuntimeFailure,
    ),
    "a host without watches": (
        500, "inotify_add_watch: no space left on device", 0, RuntimeFailure,
    ),
    "a host without namespaces": (
        500, f"{PROCESS}fork/exec /proc/self/exe: no space left on device", 0, RuntimeFailure,
    ),
    "a device that fails": (
        500, 'adding custom device "/dev/nvidia0": input/output error', 0, RuntimeFailure,
    ),
    "a cgroup without the requested cores": (
        500, f"{INIT}error setting cgroup config: write cpuset.cpus: no space left on device", 0,
        RuntimeFailure,
    ),
    "a mount named as cores": (
        400, f"{SOURCE}/data/u/requested cpus are not available", 0, InvalidRequest,
    ),
    "a mount named as a cpuset": (
        400, f"{SOURCE}/data/u/write /sys/fs/cgroup/x/cpuset.cpus", 0, InvalidRequest,
    ),
    "a mount named as a full disk": (
        400, f"{SOURCE}/data/u: no space left on device", 0, InvalidRequest,
    ),
    "a mount named as a conflict": (
        400, f"{SOURCE}/data/u/port is already allocated", 0, InvalidRequest,
    ),
    "a requested source that fails": (500, "lstat /x: input/output error", 0, RuntimeFailure),
    "a requested source that fails, crun": (
        500, "crun: open `/x`: Input/output error: OCI runtime error", 0, RuntimeFailure,
    ),
    "a requested source that is full": (
        500, "error while creating mount source path '/x': mkdir /x: disk quota exceeded", 0,
        RuntimeFailure,
    ),
    "a requested source that is full, quoted": (
        500, "mkdir '/x': no space left on device", 0, RuntimeFailure,
    ),
    "a target on a read-only mount, crun": (
        500, "crun: mkdir `usr/lib/x`: Read-only file system: OCI runtime error", 0, RuntimeFailure,
    ),
    "a target on a read-only mount, crun with openat2": (
        500, "crun: creating `/m/s`: openat2 `m/s`: Read-only file system: OCI runtime error", 0,
        RuntimeFailure,
    ),
    "an engine's disk that is full, crun": (
        500, "crun: mkdir `/data/docker/x`: No space left on device: OCI runtime error", 0,
        StateUnavailable,
    ),
    "a setting of a read-only /proc": (
        500, f"{INIT}open /proc/sys/net/ipv4/ping_group_range: read-only file system: unknown", 128,
        RuntimeFailure,
    ),
    "a command named as a cpuset, crun": (
        500, f"crun: executable file `{CPUSET[3:]}` not found in $PATH", 127, CommandNotFound,
    ),
    "a command named as a cpuset in quotes, crun": (
        500, "crun: executable file `writing file `/sys/fs/cgroup/x/cpuset.cpus` not found", 127,
        CommandNotFound,
    ),
    "a hierarchy of cgroups that is full": (
        500, "mkdir /sys/fs/cgroup/memory/docker/x: no space left on device", 0, RuntimeFailure,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("status", "message", "exit_code", "meaning"), MEANINGS.values(), ids=MEANINGS
)
def test_engine_errors_are_attributed(
    status: int, message: str, exit_code: int, meaning: type[AgentdError]
) -> None:
    edits = ContainerEdits(mounts=(Mount("/x", "/usr/lib/x"),))
    made = replace(plan("sleep", "1000"), edits=edits)
    error = translate_error(DockerError(status, message), made, exit_code)
    assert type(error) is meaning, error
    if meaning is RuntimeFailure:
        assert str(error) == f"the Docker Engine: {message}"
    if meaning is StateUnavailable:
        assert str(error) == "the disk of the node's engine is full"


@pytest.mark.parametrize("path", [CPUSET, "/u/x: no space left on device", "/u/marked for removal"])
def test_mount_of_a_request_names_no_other_failure(path: str) -> None:
    """As Podman says that a source is not there, with a path that ends like a message."""
    made = plan("sleep", mounts=(Mount(path, "/home"),))
    error = translate_error(DockerError(500, f"statfs {path}"), made)
    assert type(error) is RuntimeFailure


def test_source_behind_a_link_is_not_the_disk_of_the_engine() -> None:
    made, message = plan("sleep", mounts=(Mount("/u/link", "/home"),)), "lstat /nfs/u: {}"
    for text in ("input/output error", "read-only file system", "disk quota exceeded"):
        error = DockerError(500, message.format(text))
        assert (
            type(translate_error(error, made, 0, [MountSource("/nfs/u", 1, 2)])) is RuntimeFailure
        )
        assert type(translate_error(error, made)) is StateUnavailable


@pytest.mark.parametrize(
    "path",
    [
        *("/srv/engine/overlay2/abc-init", "/srv/engine/volumes/db/_data", "/database/x"),
        *("/var/lib/docker/volumes/metadata.db", "/run/docker/runtime-runc/moby/x/state.json"),
    ],
)
@pytest.mark.parametrize("status", [400, 409, 500])
def test_no_path_of_an_engine_is_shown(path: str, status: int) -> None:
    made = plan("/data/run", mounts=(Mount("/home/ada", "/home"),))
    text = f"{'address already in use: ' * (status == 409)}open {path}: bad, not /home/ada/x"
    error = translate_error(DockerError(status, text), made)
    assert path not in str(error)
    assert "open [path]: bad, not /home/ada/x" in str(error)


@pytest.mark.parametrize("text", ["read-only file system", "input/output error"])
def test_disk_that_cannot_be_written_is_the_node_s(text: str) -> None:
    error = translate_error(DockerError(500, f"mkdir /srv/x: {text}"), plan("sleep"))
    assert type(error) is StateUnavailable
    assert str(error) == "the disk of the node's engine is not writable"


@pytest.mark.parametrize("requested", [{}, {"core": {"soft": 1, "hard": 1}}])
def test_default_limit_that_cannot_be_set_is_the_node_s(requested: dict) -> None:
    message = f"{INIT}error setting rlimit type 7: operation not permitted: unknown"
    made = plan("sleep", "1000", options={"ulimits": requested})
    error = translate_error(DockerError(500, message), made, 128)
    assert type(error) is RuntimeFailure
    assert str(error) == f"the Docker Engine cannot set a default ulimit: {message}"
    own = plan("sleep", "1000", options={"ulimits": {"nofile": {"soft": 1, "hard": 1}}})
    refusal = translate_error(DockerError(500, message), own, 128)
    assert isinstance(refusal, InvalidRequest)
    assert refusal.problems[0].where == "ulimits.nofile"
