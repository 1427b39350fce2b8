"""`ray start` with less: 3 s of CPU less for a head, 1 s for another node (m).

Left out are verbs of Ray's command line that a start has no use for (`ray serve`, `ray job` and `ray list` import
pandas and models of every request), and the server of Ray Client where no port is stated for it.
"""

from __future__ import annotations

import gc
import importlib
import sys
from typing import Any

_OTHER_VERBS = ("ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli")
"""What Ray's command line does without where it can't be imported."""

CLIENT_PORT = "--ray-client-server-port"


def main() -> None:
    """Be `ray` with the arguments of this program."""
    sys.modules.update(dict.fromkeys(_OTHER_VERBS))  # type: ignore[arg-type]  # None: it can't be imported
    gc.disable()  # What is imported stays: looking through it for garbage again and again is a tenth of a start.
    scripts: Any = importlib.import_module("ray.scripts.scripts")
    gc.enable()
    if not any(each.startswith(CLIENT_PORT) for each in sys.argv):
        # Otherwise it would start on port 10001: only Ray without the parts of Ray Client starts none.
        scripts.get_ray_client_dependency_error = lambda: ImportError("no port is stated for it")
    scripts.main()


if __name__ == "__main__":
    main()
