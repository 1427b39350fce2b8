"""A class that was defined in a program's own script, made again inside a worker from the script's text.

Workers don't run the script, so they can't import the class by name. Its text travels in the arguments of the job
instead, bounded as all arguments are (1 MiB), and becomes a module that is named by its content. What the script does
under ``if __name__ == "__main__":`` is not run there.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any


class ScriptClass:
    """The actor class of such a job; making one gives an object of the script's class.

    Args:
        source: text of the script.
        name: name of the class in it, ``Outer.Inner`` for one in another.
        args, kwargs: what the class is constructed with.
    """

    def __new__(cls, source: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An object of the script's class, not of this one."""
        found: Any = _module(source)
        for part in name.split("."):
            found = getattr(found, part)
        plain = getattr(found, "__ray_actor_class__", found)
        return plain(*args, **kwargs)


def _module(source: str) -> types.ModuleType:
    name = f"callboard_script_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        file = f"<script {name}>"
        module = types.ModuleType(name)
        module.__file__ = file
        # Tracebacks show the lines of the script.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        sys.modules[name] = module
        try:
            exec(compile(source, file, "exec"), module.__dict__)  # noqa: S102 - the user's own code, as in any worker
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
