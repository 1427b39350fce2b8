"""structlog, loaded without rich, which it looks for to colour tracebacks: a tenth of all that a controller or an agent
loads before it serves, and none of them prints such a traceback."""

from __future__ import annotations

import sys
from types import ModuleType

_absent: ModuleType | None = None

if "rich" in sys.modules:
    import structlog
else:
    sys.modules["rich"] = _absent  # type: ignore[assignment]  # what an import takes for "there is none"
    try:
        import structlog
    finally:
        del sys.modules["rich"]

__all__ = ["structlog"]
