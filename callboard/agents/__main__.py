"""`python -m callboard.agents OPTIONS.json`: the agent without the command line, for tests and supervisors.

The file holds the fields of `AgentOptions`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path


def main() -> int:
    """Run one agent."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m callboard.agents OPTIONS.json\n")
        return 2
    # Before gRPC is imported: it reads this once.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from callboard.agents.agent import run_agent  # noqa: PLC0415 - see above
    from callboard.agents.options import AgentOptions  # noqa: PLC0415

    try:
        options = AgentOptions(**json.loads(Path(sys.argv[1]).read_text()))
    except (OSError, TypeError, ValueError) as error:
        sys.stderr.write(f"{sys.argv[1]}: {error}\n")
        return 2
    return asyncio.run(run_agent(options))


if __name__ == "__main__":
    sys.exit(main())
