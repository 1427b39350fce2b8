"""A worker whose process is in a container: what runs on either side of its wall. Run by its path, on Pythons that may
be older than ours, so nothing is imported that isn't needed and nothing newer than Python 3.6 is written.

    worker_container.py outside FD RUNTIME ARGUMENT…        on the node: starts the container and ends as it does
    worker_container.py inside looked-at [ray]               in the image: which Python, and which Ray, it has
    worker_container.py inside worker SUCCESSOR_S            in the image: a worker as a plain process
    worker_container.py inside …/default_worker.py …         in the image: a worker of the node's Ray
"""

import os
import sys

SOCKET = 3
"""Descriptor of the listening socket in the container: podman passes on those from 3."""

_PR_SET_CHILD_SUBREAPER = 36


def _outside(descriptor: int, command: "list[str]") -> None:
    """Start the container and end as it does. What podman starts leaves it by forking twice: this process is the
    subreaper, so that all of it stays below the worker's process, where its signals and its proof of death find it."""
    import ctypes  # noqa: PLC0415 - what is in the container has no need of it

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    os.dup2(descriptor, SOCKET, inheritable=True)
    if descriptor != SOCKET:
        os.close(descriptor)
    child = os.posix_spawn(command[0], command, os.environ)
    os.close(SOCKET)
    while True:
        pid, status = os.wait()
        if pid == child:
            break
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _inside(arguments: "list[str]") -> None:
    """Become what is asked for. The node's callboard comes behind everything that the image has, where it hides
    nothing."""
    host = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib takes a third of the start
    sys.path = [each for each in sys.path if os.path.abspath(each or ".") != host]  # noqa: PTH100 - likewise
    if arguments[0] == "looked-at":
        sys.stdout.write(" ".join([*map(str, sys.version_info[:2]), _ray_version() if arguments[1:] else "-"]))
        return
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(host))))  # noqa: PTH120 - likewise
    if arguments[0] == "worker":
        sys.argv = ["callboard", str(SOCKET), *arguments[1:]]
        from callboard.agents.host.worker_main import main  # noqa: PLC0415 - not on an older Python

        main()
        return
    import importlib.util  # noqa: PLC0415 - likewise
    import runpy  # noqa: PLC0415 - likewise

    # The image's own, wherever that has it.
    found = importlib.util.find_spec("ray._private.workers.default_worker")
    assert found is not None, "the image was looked into"
    assert found.origin, "a module of a file"
    sys.argv = [found.origin, *arguments[1:]]
    runpy.run_path(found.origin, run_name="__main__")


def _ray_version() -> str:
    try:
        from importlib.metadata import version  # noqa: PLC0415 - Python 3.8 has it first

        return version("ray")
    except ImportError:
        return "-"


if __name__ == "__main__":
    if sys.argv[1] == "outside":
        _outside(int(sys.argv[2]), sys.argv[3:])
    else:
        _inside(sys.argv[2:])
