"""Edits of `agent.toml` that keep its comments and order."""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import ParseError, TOMLKitError

from agentd.config.loading import load_text
from agentd.errors import ConfigRefused, Problem
from agentd.tomlfile.parsing import source_name

NEW_MODE = 0o640
"""Mode of a new file; it names tokens and sockets, which other users must not see."""
_TOKENS = re.compile(r"\s*\[\[\s*rpc\s*\.\s*tokens\s*\]\]")


def with_setting(text: str, key: str, value: str, path: Path | None) -> str:
    """Return the file's text with one setting changed; comments and order are kept.

    `key` is a dotted path (`resource.allocation-mode`, `agents.0.id`); `value` is a TOML value, or
    plain text if it is not valid TOML.

    Raises:
        ConfigRefused: the result would be unusable; lists every reason.
    """
    source = source_name(path)
    try:
        document = tomlkit.parse(text)
        _assign(document, key.split("."), _parse_value(value))
        changed = tomlkit.dumps(document)
    except (ParseError, TOMLKitError) as error:
        raise ConfigRefused([Problem(key, f"invalid TOML: {error}")], source) from None
    except (IndexError, TypeError, ValueError) as error:
        raise ConfigRefused([Problem(key, f"cannot be set in the file: {error}")], source) from None
    load_text(changed, path, {})
    return changed


def without_token(text: str, name: str, path: Path) -> tuple[str, Path]:
    """Return a file's text without an entry of `[[rpc.tokens]]`, and the path of its token.

    Raises:
        ConfigRefused: the entry does not exist, or the result would be unusable.
    """
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise ConfigRefused([Problem("", f"invalid TOML: {error}")], str(path)) from None
    entries: Any = document.get("rpc", {}).get("tokens", [])
    names = [str(entry.get("name", "")) for entry in entries]
    if name not in names:
        reason = f"no token {name} (the file has: {', '.join(names) or 'none'})"
        raise ConfigRefused([Problem("rpc.tokens", reason)], str(path))
    index = names.index(name)
    file = Path(str(entries[index].get("file", "")))
    changed = _remove_block(text, index)
    del entries[index]
    if not entries:
        document["rpc"].remove("tokens")
    if changed is None or _parse_content(changed) != _parse_content(tomlkit.dumps(document)):
        changed = tomlkit.dumps(document)
    if not tomllib.loads(changed):
        changed = f"[rpc]\n{changed}"  # a file without a key is refused
    load_text(changed, path, {})
    return changed, file


def _remove_block(text: str, index: int) -> str | None:
    """Remove the lines of one `[[rpc.tokens]]` entry; keep the comments behind it.

    tomlkit assigns those comments to the entry, although they describe what follows. None if the
    entries are not written as blocks.
    """
    lines = text.splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if _TOKENS.match(line)]
    if index >= len(starts):
        return None
    start = starts[index]
    following = (
        number for number in range(start + 1, len(lines)) if lines[number].lstrip().startswith("[")
    )
    end = next(following, len(lines))
    while lines[end - 1].strip() == "" or lines[end - 1].lstrip().startswith("#"):
        end -= 1
    return "".join(lines[:start] + lines[end:])


def _parse_content(text: str) -> dict[str, Any] | None:
    """Parse TOML without empty tables, None if it is invalid."""
    try:
        return {key: value for key, value in tomllib.loads(text).items() if value != {}}
    except tomllib.TOMLDecodeError:
        return None


def _assign(container: Any, keys: list[str], value: object) -> None:
    *path, last = keys
    for key in path:
        if isinstance(container, list):
            container = container[int(key)]
        else:
            if key not in container:
                container[key] = tomlkit.table()
            container = container[key]
    if isinstance(container, list):
        container[int(last)] = value
    elif last in container and hasattr(container[last], "trivia"):
        item = tomlkit.item(value)
        item.trivia.comment_ws = container[last].trivia.comment_ws
        item.trivia.comment = container[last].trivia.comment
        container[last] = item
    else:
        container[last] = value


def _parse_value(text: str) -> object:
    try:
        tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return tomlkit.parse(f"value = {text}")["value"]


def write_file(path: Path, text: str) -> None:
    """Replace a file atomically, keeping its mode and owner."""
    path = path.resolve()
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        status = path.stat() if path.exists() else None
        Path(temporary).chmod(status.st_mode & 0o7777 if status else NEW_MODE)
        if status and os.geteuid() == 0:
            os.chown(temporary, status.st_uid, status.st_gid)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
