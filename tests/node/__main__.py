"""One machine by hand, in $AGENTD_NODE_FOLDER, with the package installed.

PYTHONPATH=tests python -m node boot          start it
PYTHONPATH=tests python -m node run COMMAND   run a command in it, as root
PYTHONPATH=tests python -m node off           end it
"""

import os
import sys
from pathlib import Path

from node import images

folder = Path(os.environ.get("AGENTD_NODE_FOLDER", images.CACHE / "machine"))
word, *rest = sys.argv[1:] or ["boot"]
if word == "boot":
    images.start_installed(images.machine(folder))
elif word == "off":
    images.machine(folder).pull_plug()
else:
    done = images.machine(folder).run(" ".join(rest), timeout_s=600)
    sys.stdout.write(done.output)
    sys.exit(done.status)
