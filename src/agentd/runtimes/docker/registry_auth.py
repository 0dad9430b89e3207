"""Credentials of registries, from a file of the operator in the format of Docker's `config.json`.

`auths` has logins by registry, `credHelpers` and `credsStore` name programs that keep them. As with
`docker pull`, the entry of a registry is found whatever its scheme, path and final slash. Among
entries of one registry, the longest namespace that contains the image wins.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from agentd.concurrency import Walk
from agentd.errors import Problem, RuntimeFailure, RuntimeUnavailable
from agentd.host.lookups import Lookups
from agentd.os_errors import OsErrorKind, os_error_kind
from agentd.runtimes.docker.mounts import MAX_LINKS
from agentd.shared_calls import SharedCalls
from agentd.tomlfile.regular_files import SilentFile, UnusableFile, read_configured

Credentials: TypeAlias = dict[str, str]

_HUB_HOST, _HUB_INDEX = "docker.io", "index.docker.io"
_HUB_NAMES = (_HUB_HOST, _HUB_INDEX, "registry-1.docker.io")
_LOGIN_MEMBERS = ("username", "password", "auth", "identitytoken", "registrytoken")
_HELPER = re.compile(r"docker-credential-[\w.-]+")
_HELPER_VARIABLES = (
    *("HOME", "LANG", "PATH"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)
"""Variables of agentd that a helper gets, if they are set."""
_ROOT_HOME = "/root"
"""HOME of a helper if agentd has none, as a service of systemd; without one, some hang."""
HELPER_TIMEOUT_S = 30.0
MAX_HELPERS = 4
"""Helpers of one file that run at once; a caller chooses the registries, so how many it needs."""
_MAX_ANSWER_BYTES = 64 << 10
"""The size of a pipe; a helper that prints more does not end."""
_NOT_FOUND = b"credentials not found"
"""Output of a helper that has no credentials for a registry."""
_TOKEN_USER = "<token>"  # noqa: S105 - the protocol's name for "the secret is a token"
_NO_HELPER = "is not the name of a credential helper"
_WRITABLE_BY_OTHERS = 0o022


class _Answer(msgspec.Struct, rename="pascal"):
    """The output of a helper."""

    username: str
    secret: str


class RegistryAuth(msgspec.Struct, rename="camel"):
    """The content of a file; other members are ignored."""

    auths: dict[str, Any] = {}
    creds_store: str = ""
    cred_helpers: dict[str, str | None] = {}

    def login_of(self, image: str) -> Credentials | None:
        """Return the login in the file for an image, None if there is none.

        Raises:
            ValueError: the entry is malformed.
        """
        key = _best_key((key for key, entry in self.auths.items() if _has_login(entry)), image)
        return None if key is None else _parse_login(self.auths[key])

    @property
    def helpers(self) -> dict[str, str]:
        """The programs that keep logins, by member."""
        names = {f"credHelpers.{key}": name for key, name in self.cred_helpers.items()}
        names["credsStore"] = self.creds_store
        return {member: f"docker-credential-{name}" for member, name in names.items() if name}

    def helper_of(self, image: str) -> str:
        """Return the program that keeps the login for an image, "" for none.

        Raises:
            ValueError: its name is malformed.
        """
        key = _best_key(self.cred_helpers, image)
        member = "credsStore" if key is None else f"credHelpers.{key}"
        program = self.helpers.get(member, "")
        if program and not _HELPER.fullmatch(program):
            raise ValueError(f"{member} {_NO_HELPER}")
        return program


def read_registry_auth(path: Path, walk: Walk | None = None) -> RegistryAuth:
    """Read a file of credentials.

    Raises:
        ValueError: it cannot be read, others could replace the helpers that it names, or a link of
            another user leads to it.
    """
    file = read_configured(path, walk=walk)
    real_path = ""
    with suppress(OSError):  # a link was removed
        real_path = _follow_links(path.absolute(), (0, os.geteuid(), file.owner))
    if real_path != file.real_path:
        raise UnusableFile("was replaced while it was read")
    try:
        members = msgspec.json.decode(file.text, type=dict[str, Any])
    except RecursionError:
        raise UnusableFile("is nested too deeply") from None
    auth = msgspec.convert({k: v for k, v in members.items() if v is not None}, RegistryAuth)
    is_foreign = file.owner not in (0, os.geteuid())
    if auth.helpers and (is_foreign or file.mode & _WRITABLE_BY_OTHERS):
        raise UnusableFile("names credential helpers, and other users can write to it")
    return auth


def _follow_links(path: Path, users: Sequence[int], max_links: int = MAX_LINKS) -> str:
    """Return a path without links; each link must belong to one of some users.

    Others could have their pulls use the login, or run the helper, of somebody else.

    Raises:
        UnusableFile: a link belongs to another user.
    """
    for part in reversed((path, *path.parents)):
        if max_links and part.is_symlink():
            if part.lstat().st_uid not in users:
                raise UnusableFile(f"cannot be used: {part} is a link of another user")
            target = part.parent / part.readlink() / path.relative_to(part)
            return _follow_links(target, users, max_links - 1)
    return os.path.normpath(path)


class RegistryLogins:
    """The logins in a file and of the helpers that it names; a few helpers run at once."""

    def __init__(self, path: Path) -> None:
        self._path, self._lookups = path, Lookups()
        self._helpers: SharedCalls[tuple[str, str], Credentials | None] = SharedCalls()
        self._free_helpers = asyncio.Semaphore(MAX_HELPERS)

    async def find(self, image: str) -> Credentials | None:
        """Return the credentials for the registry of an image, None if there are none.

        Raises:
            RuntimeFailure: the file or its entry is unusable; without it a pull could fetch
                another image.
            RuntimeUnavailable: the file's file system does not answer, or a helper fails.
        """
        where = f"image {image}: registry-auth {self._path}"
        read = partial(read_registry_auth, self._path)
        try:
            auth = await self._lookups.call(str(self._path), read)
            login, helper = auth.login_of(image), auth.helper_of(image)
        except SilentFile as error:
            raise RuntimeUnavailable(f"{where}: {error}") from None
        except ValueError as error:
            raise RuntimeFailure(f"{where}: {error}") from None
        host = _split_image(image)[0]
        if helper:
            run = partial(self._run_helper, helper, host)
            try:
                login = await self._helpers.call((helper, host), run) or login
            except (RuntimeFailure, RuntimeUnavailable) as error:
                if login is None:
                    raise type(error)(f"{where}: {error}") from None
        # The containerd store compares hosts, and knows Docker Hub by this one, as Podman does.
        return login and {**login, "serveraddress": _HUB_INDEX if host == _HUB_HOST else host}

    async def _run_helper(self, program: str, host: str) -> Credentials | None:
        try:
            async with asyncio.timeout(HELPER_TIMEOUT_S), self._free_helpers:
                find_file = partial(shutil.which, program)  # in folders that may be on a dead mount
                file = await self._lookups.call(f"{program} in PATH", find_file)
                return await _run_helper(program, file or program, host)
        except TimeoutError:
            reason = f"{program} does not answer within {HELPER_TIMEOUT_S:g} s"
            raise RuntimeUnavailable(reason) from None


async def _run_helper(program: str, file: str, host: str) -> Credentials | None:
    """Return the credentials that a helper keeps; None if it has none.

    https://github.com/docker/docker-credential-helpers
    """
    env = {name: os.environ[name] for name in _HELPER_VARIABLES if name in os.environ}
    env.setdefault("HOME", _ROOT_HOME)
    server = f"https://{_HUB_INDEX}/v1/" if host == _HUB_HOST else host
    reader, writer = os.pipe()  # no stream: one that prints without end fills no memory
    with FileIO(reader) as source, FileIO(writer, "w") as printed:
        os.set_blocking(reader, False)  # what it leaves behind may keep the pipe open
        try:
            process = await asyncio.create_subprocess_exec(
                *(program, "get"), executable=file, stdin=asyncio.subprocess.PIPE, stdout=printed,
                stderr=asyncio.subprocess.DEVNULL, env=env, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            is_passing = os_error_kind(error) is OsErrorKind.PASSING
            error_class = RuntimeUnavailable if is_passing else RuntimeFailure
            raise error_class(f"{program} cannot run: {error.strerror}") from None
        try:
            await process.communicate(server.encode())
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        output = source.read(_MAX_ANSWER_BYTES) or b""
    if process.returncode and _NOT_FOUND in output:
        return None
    if process.returncode:
        raise RuntimeUnavailable(f"{program} fails with exit status {process.returncode}")
    try:
        answer = msgspec.json.decode(output, type=_Answer)
    except (ValueError, RecursionError):
        raise RuntimeFailure(f"{program} answers without credentials") from None
    if answer.username == _TOKEN_USER:
        return {"identitytoken": answer.secret}
    return {"username": answer.username, "password": answer.secret}


def registry_auth_problems(where: str, path: Path, walk: Walk | None = None) -> Iterator[Problem]:
    """Yield the entries of a file that no pull can use."""
    try:
        auth = read_registry_auth(path, walk)
    except ValueError as error:
        yield Problem(where, f"{path}: {error}")
        return
    for key, entry in auth.auths.items():
        try:
            if _has_login(entry) or not auth.helpers:
                _parse_login(entry)
        except ValueError as error:
            yield Problem(where, f"{path}: auths.{key} {error}")
    for member, program in auth.helpers.items():
        if not _HELPER.fullmatch(program):
            yield Problem(where, f"{path}: {member} {_NO_HELPER}")
        elif shutil.which(program) is None:
            yield Problem(where, f"{path}: {member} cannot be used: {program} is not in PATH")


def _has_login(entry: Any) -> bool:
    """Return whether an entry has a login, usable or not; an empty one belongs to a helper."""
    return any(map(entry.get, _LOGIN_MEMBERS)) if isinstance(entry, dict) else bool(entry)


def _parse_login(entry: Any) -> Credentials:
    """Return the credentials of an entry.

    Raises:
        ValueError: the entry is malformed.
    """
    try:
        found = {name: entry[name] for name in _LOGIN_MEMBERS if entry.get(name)}
        login = msgspec.convert(found, Credentials)
    except (AttributeError, TypeError, ValueError):
        raise ValueError("cannot be used: a login is strings by name") from None
    try:
        if auth := login.pop("auth", ""):
            decoded = b64decode("".join(auth.split()), validate=True).decode()
            login["username"], login["password"] = decoded.split(":", 1)
    except ValueError:
        raise ValueError("cannot be used: auth is not the base64 of user:password") from None
    if not {"password", "identitytoken", "registrytoken"} & login.keys():
        raise ValueError("cannot be used: it has no auth, no username and password, and no token")
    return login


def _best_key(keys: Iterable[str], image: str) -> str | None:
    """Return the key for an image, None if none is about its registry.

    The longest namespace that contains the image wins. Without one, any key of the registry
    counts, as with Docker, which compares hosts alone.
    """
    host, path = _split_image(image)

    def rank(key: str) -> tuple[int, bool]:
        scope = _scope(key)
        return len(scope) if f"{host}/{path}/".startswith(f"{scope}/") else 0, key == scope

    of_host = [key for key in keys if _scope(key).partition("/")[0] == host]
    return max(of_host, key=rank, default=None)


def _scope(key: str) -> str:
    """Return the host of a key and its namespace, if it has one."""
    address = key.removeprefix("http://").removeprefix("https://").strip("/")
    host, _, path = address.partition("/")
    host = _canonical_host(host)
    return host if path in {"", "v1", "v2"} else f"{host}/{path}"


def _split_image(image: str) -> tuple[str, str]:
    """Return the registry of an image and its path there, without tag and digest."""
    host, _, path = image.partition("@")[0].partition("/")
    if not path or not ({".", ":"} & set(host) or host == "localhost"):
        host, path = _HUB_HOST, f"{host}/{path}" if path else f"library/{host}"
    folder, slash, last = path.rpartition("/")
    return _canonical_host(host), f"{folder}{slash}{last.partition(':')[0]}"


def _canonical_host(host: str) -> str:
    return _HUB_HOST if host in _HUB_NAMES else host
