"""The worker host in a Ray actor, with the main thread of its process for code of the user.

Ray runs its task loop on the main thread, and methods of an actor that has `async` ones on others. Signal handlers can
be set on the main thread alone, so it is given away: Ray looks for signals there every 10 ms, and the handler of one
never returns but serves code of the user, while a second thread runs Ray's loop. Ray aborts ("RAY_CHECK") if the thread
of an actor's calls changes after the first, and doesn't report the actor alive before it answered its creation; so the
driver sends that signal between the two (`Driver._launch`). Ray imports this module on the main thread.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.actor import ActorClass
from ray.remote_function import RemoteFunction
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from callboard.agents.host.worker_host import WorkerHost
from callboard.agents.host.worker_lanes import MainThread, in_thread

GIVE_AWAY = signal.SIGURG
"""By default it does nothing, so one too many harms nobody. Caught: the main thread is still Ray's."""


_SET_TASK = "_ZN3ray4core13WorkerContext16SetCurrentTaskIdERKNS_6TaskIDEm"
"""WorkerContext::SetCurrentTaskId(task, attempt): of the calling thread. Of its object nothing is used but for threads
that Ray has never met."""

_OBJECT_BYTES = 4096
"""More than that object and a task's id have."""


def _give_away_when_told() -> MainThread | None:
    worker: Any = ray._private.worker.global_worker  # noqa: SLF001 - Ray has no public name for its loop
    if worker.mode != ray.WORKER_MODE:
        return None  # the driver, which makes the actors
    if not in_thread(_named, worker.core_worker).result():
        sys.stderr.write("callboard: this version of Ray keeps the main thread; code of the user runs on another\n")
        return None
    for warned in ("blocking_get_inside_async_warned", "blocking_wait_inside_async_warned"):
        # Ray would warn, in the user's output, that `ray.get` holds up the actor's event loop: no code of the user is
        # on it.
        setattr(ray._private.worker, warned, True)  # noqa: SLF001
    main = MainThread()

    def run_loop() -> None:
        worker.core_worker.run_task_loop()
        _leave(0)  # Ray is done with the actor, whatever the main thread is at.

    def give_away(number: int, _: object) -> None:
        # First: a second signal would start a second loop, and Ray aborts when two threads hand out its calls. One that
        # comes before this line nests, serves, and never comes back here.
        signal.signal(number, signal.SIG_DFL)
        # Ray's handler raises SystemExit, which now would be in code of the user; a plain process just ends.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _named(worker.core_worker)  # The end of the actor's creation took it away again.
        threading.Thread(target=run_loop, name="callboard-ray", daemon=True).start()
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


def _named(core_worker: Any) -> bool:
    """Give the calling thread an id in Ray, as any thread but the main one has between tasks; whether it has it now.

    Ray names objects and tasks by what the thread is at that makes them. The main thread's id is nil outside of tasks:
    what two workers put would have the same names.
    """
    try:
        function = getattr(ctypes.CDLL(ray._raylet.__file__), _SET_TASK)  # noqa: SLF001
    except AttributeError:
        return False
    # Nobody else uses it: its thread is over then.
    wanted = in_thread(core_worker.get_current_task_id).result()
    # A hash that is computed when it is needed, and the id.
    task = ctypes.create_string_buffer(bytes(8) + wanted.binary(), _OBJECT_BYTES)
    function(ctypes.create_string_buffer(_OBJECT_BYTES), task, ctypes.c_uint64(0))
    return bool(core_worker.get_current_task_id() == wanted)


def _leave(code: object) -> None:
    """As `sys.exit(code)`, but without Ray's exit handlers: they wait for a cluster that may be gone."""
    if not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


_MAIN = _give_away_when_told()


def _keep_children_in(bundle_index: int) -> None:
    """Have Ray run what this process starts with GPUs in the bundle of this worker, unless the caller says where.

    What is captured into a group has no bundle for Ray: in a group of several it may get the GPU of another worker.
    What asks for more than the bundle has, or for no GPU, is left to Ray.
    """

    def kept(remote: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(remote)
        def told(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            group = get_current_placement_group()
            if group is not None and group.bundle_count > 1 and _says_no_place(options):
                bundle = group.bundle_specs[bundle_index]
                named = options.get("num_cpus")
                asked = {"GPU": options.get("num_gpus"), "CPU": 1 if named is None else named}
                asked |= {"memory": options.get("memory"), **(options.get("resources") or {})}
                if asked["GPU"] and all(bundle.get(name, 0) >= (amount or 0) for name, amount in asked.items()):
                    options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle_index)
            return remote(self, args, kwargs, **options)

        return told

    kind: Any
    for kind in (RemoteFunction, ActorClass):
        kind._remote = kept(kind._remote)  # noqa: SLF001 - Ray has no public way to a default place


def _says_no_place(options: Mapping[str, Any]) -> bool:
    """Whether the options of a task or an actor leave its place to Ray."""
    index = options.get("placement_group_bundle_index")
    return (
        options.get("scheduling_strategy") is None
        and options.get("placement_group", "default") == "default"
        and (index is None or index == -1)
        and options.get("placement_group_capture_child_tasks") in (None, True)
    )


class RayWorkerHost(WorkerHost):
    """The host as Ray's actor.

    Args:
        bundle_index: Ray's index of the bundle in which it runs; None: in none.
    """

    def __init__(self, bundle_index: int | None = None) -> None:
        if bundle_index is not None:
            _keep_children_in(bundle_index)
        super().__init__(_MAIN)
