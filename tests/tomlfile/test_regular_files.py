"""Reading files that somebody else may have replaced: nothing blocks, nothing is too much."""

import os
import socket
from pathlib import Path

import pytest

from agentd.tomlfile.regular_files import MissingFile, RegularFile, UnusableFile, read_regular


def test_a_regular_file_is_read_with_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    file.chmod(0o640)
    (tmp_path / "link").symlink_to(file)
    assert read_regular(tmp_path / "link") == RegularFile(
        b"text", 0o640, os.getuid(), str(tmp_path.resolve() / "file")
    )
    assert read_regular(file, 4).text == "text"
    with pytest.raises(UnusableFile, match="is larger than 3 bytes"):
        read_regular(file, 3)
    with pytest.raises(UnusableFile, match="cannot be read"):
        read_regular(tmp_path / "link", follows_links=False)


def test_anything_else_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    refused = {
        tmp_path / "fifo": "is a FIFO, expected a regular file",
        tmp_path: "is a directory, expected a regular file",
        Path("/dev/zero"): "is a device, expected a regular file",
        tmp_path / "socket": "cannot be read: No such device or address",
        Path("/tmp/\0x"): "cannot be read: a NUL in the path",
    }
    for path, why in refused.items():
        with pytest.raises(UnusableFile) as error:
            read_regular(path)
        assert str(error.value) == why
    with pytest.raises(MissingFile):
        read_regular(tmp_path / "absent")
    with pytest.raises(UnusableFile, match="is not UTF-8"):
        _ = read_regular(tmp_path / "bytes").text


TEXTS = [("utf-8", "is UTF-8"), ("utf-8-sig", "a mark"), ("utf-8-sig", "")]


@pytest.mark.parametrize(("encoding", "text"), TEXTS)
def test_byte_order_mark_is_not_part_of_a_text(tmp_path: Path, encoding: str, text: str) -> None:
    (tmp_path / "file").write_text(text, encoding=encoding)
    assert read_regular(tmp_path / "file").text == text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32"])
def test_utf_16_is_refused_by_its_name(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "file").write_text("key = 1", encoding=encoding)
    with pytest.raises(UnusableFile, match="is not UTF-8: it looks like UTF-16"):
        _ = read_regular(tmp_path / "file").text
