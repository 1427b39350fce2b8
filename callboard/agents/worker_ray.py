"""The worker host in a Ray actor, with the main thread of its process for code of the user.

Ray runs its task loop on the main thread, and methods of an actor that has `async` ones on others. Signal handlers can
be set on the main thread alone, so it is given away: Ray looks for signals there every 10 ms, and the handler of one
never returns but serves code of the user, while a second thread runs Ray's loop. Ray aborts ("RAY_CHECK") if the thread
of an actor's calls changes after the first, and doesn't report the actor alive before it answered its creation; so the
driver sends that signal between the two (`Driver._launch`). Ray imports this module on the main thread.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from typing import Any

import ray

from callboard.agents.worker_host import WorkerHost
from callboard.agents.worker_lanes import MainThread

GIVE_AWAY = signal.SIGURG
"""By default it does nothing, so one too many harms nobody. Caught: the main thread is still Ray's."""


def _give_away_when_told() -> MainThread | None:
    worker: Any = ray._private.worker.global_worker  # noqa: SLF001 - Ray has no public name for its loop
    if worker.mode != ray.WORKER_MODE:
        return None  # the driver, which makes the actors
    main = MainThread()

    def run_loop() -> None:
        worker.core_worker.run_task_loop()
        _leave(0)  # Ray is done with the actor, whatever the main thread is at.

    def give_away(number: int, _: object) -> None:
        threading.Thread(target=run_loop, name="callboard-ray", daemon=True).start()
        # Ray's handler raises SystemExit, which now would be in code of the user; a plain process just ends.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(number, signal.SIG_DFL)
        # Never back into Ray's loop: there would be two of them.
        try:
            main.serve()
        except SystemExit as end:
            _leave(end.code)
        except BaseException:  # noqa: BLE001 - of a signal handler of the user, while nothing of the user runs
            traceback.print_exc()
            _leave(1)

    signal.signal(GIVE_AWAY, give_away)
    return main


def _leave(code: object) -> None:
    """As `sys.exit(code)`, but without Ray's exit handlers: they wait for a cluster that may be gone."""
    if not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


_MAIN = _give_away_when_told()


class RayWorkerHost(WorkerHost):
    """The host as Ray's actor."""

    def __init__(self) -> None:
        super().__init__(_MAIN)
