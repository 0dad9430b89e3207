import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from agentd.runtimes.host.private_folder import PrivateFolder

NOBODY = 65534


@pytest.mark.needs("root")
def test_a_folder_without_rights_is_removed_by_its_owner() -> None:
    with TemporaryDirectory(dir="/tmp") as parent:
        os.chown(parent, NOBODY, NOBODY)
        before = os.geteuid()
        os.seteuid(NOBODY)
        try:
            folder = PrivateFolder(Path(parent, "k1"))
            folder.path.mkdir(mode=0o700)
            folder.write("record.json", "{}")
            folder.path.chmod(0)
            folder.remove()
            assert not folder.path_exists()
        finally:
            os.seteuid(before)
