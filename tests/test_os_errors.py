"""The meaning of error numbers, and the refusal of a request that each becomes."""

import errno
import os

import pytest

from agentd.os_errors import (
    OsErrorKind,
    ending_process_as_gone,
    os_error_as_refusal,
    os_error_kind,
)

CASES = [
    ("ENOENT", OsErrorKind.GONE, "RuntimeFailure"),
    ("ESRCH", OsErrorKind.GONE, "RuntimeFailure"),
    ("ENODEV", OsErrorKind.GONE, "RuntimeFailure"),
    ("EMFILE", OsErrorKind.PASSING, "RuntimeUnavailable"),
    ("ENOMEM", OsErrorKind.PASSING, "RuntimeUnavailable"),
    ("EAGAIN", OsErrorKind.PASSING, "RuntimeUnavailable"),
    ("ENOSPC", OsErrorKind.DISK, "StateUnavailable"),
    ("EDQUOT", OsErrorKind.DISK, "StateUnavailable"),
    ("EROFS", OsErrorKind.DISK, "StateUnavailable"),
    ("EIO", OsErrorKind.DISK, "StateUnavailable"),
    ("EUCLEAN", OsErrorKind.DISK, "StateUnavailable"),
    ("EBADMSG", OsErrorKind.DISK, "StateUnavailable"),
    ("EACCES", OsErrorKind.UNREADABLE, "RuntimeFailure"),
    ("EPERM", OsErrorKind.UNREADABLE, "RuntimeFailure"),
    ("ELOOP", OsErrorKind.UNREADABLE, "RuntimeFailure"),
    ("ENOTDIR", OsErrorKind.UNREADABLE, "RuntimeFailure"),
    ("ESTALE", OsErrorKind.SILENT, "RuntimeUnavailable"),
    ("ENOTCONN", OsErrorKind.SILENT, "RuntimeUnavailable"),
    ("EHOSTDOWN", OsErrorKind.SILENT, "RuntimeUnavailable"),
    ("ETIMEDOUT", OsErrorKind.SILENT, "RuntimeUnavailable"),
]


@pytest.mark.parametrize(("name", "kind", "code"), CASES, ids=[case[0] for case in CASES])
def test_only_not_found_proves_absence(name: str, kind: OsErrorKind, code: str) -> None:
    number = getattr(errno, name)
    error = OSError(number, os.strerror(number), "/srv/k1")
    refusal = os_error_as_refusal(error, "kernel k1")
    assert (os_error_kind(error), refusal.code) == (kind, code)
    assert str(refusal).endswith(f"/srv/k1: {os.strerror(number)}")


def test_error_without_a_number_is_unreadable() -> None:
    error = OSError("odd")
    assert os_error_kind(error) is OsErrorKind.UNREADABLE
    assert str(os_error_as_refusal(error, "kernel k1")) == "kernel k1: odd"


@pytest.mark.parametrize(
    ("name", "raised"),
    [("EINVAL", ProcessLookupError), ("ESRCH", ProcessLookupError), ("EMFILE", OSError)],
)
def test_process_that_is_ending_is_gone(name: str, raised: type[OSError]) -> None:
    number = getattr(errno, name)
    with pytest.raises(OSError) as caught, ending_process_as_gone():  # noqa: PT011 - any
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is raised
