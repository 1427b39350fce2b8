"""Worker classes that tests run, as a user would write them: plain Python, no import of callboard."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any


def told_by_ray() -> list[object]:
    """What Ray says of the devices of the process that asks."""
    ray = importlib.import_module("ray")
    context = ray.get_runtime_context()
    return [ray.get_gpu_ids(), context.get_accelerator_ids()["GPU"], context.get_assigned_resources().get("GPU", 0)]


def _nothing() -> None:
    pass


class OnMain:
    """Sets a signal handler where it is built, as launchers of engines do."""

    def __init__(self) -> None:
        self.seen = 0
        self.before = signal.signal(signal.SIGUSR1, self._count)

    def _count(self, *_: object) -> None:
        self.seen += 1

    def thread(self) -> list[object]:
        """Whether this is the main thread, and what the handler saw of a signal to the process."""
        os.kill(os.getpid(), signal.SIGUSR1)
        return [threading.current_thread() is threading.main_thread(), self.seen]

    def enter(self) -> None:
        """As an event loop of an engine does."""
        assert threading.current_thread() is threading.main_thread()

    def put(self, count: int) -> list[object]:
        """Ids of so many objects in Ray's store, and of so many results of tasks."""
        import ray

        put = [ray.put(each) for each in range(count)]
        started = [ray.remote(num_cpus=0)(_nothing).remote() for _ in range(count)]
        assert [*ray.get(put)] == [*range(count)]
        return [*(each.hex() for each in put), *(each.hex() for each in started)]

    def wait_for(self, file: str) -> None:
        """Busy until there is a file."""
        while not Path(file).exists():
            time.sleep(0.01)


class Plain:
    """Answers what it sees."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.args, self.kwargs = args, kwargs
        self.thread = threading.get_ident()
        self.setup_context: object = None
        self.restored: object = None
        self.inside = 0
        self.meeting = threading.Barrier(2)

    def environment(self) -> dict[str, str]:
        """What a child of the worker would see."""
        return dict(os.environ)

    def seen_by_a_child(self) -> str:
        """What a program started by the worker, such as an engine, reads of its devices."""
        program = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()

    def told_by_ray(self) -> object:
        """What Ray says of the devices of this process."""
        return told_by_ray()

    def told_to_a_task(self, gpus: float, place: str = "") -> object:
        """What Ray says to a task that this worker starts; or to an actor, or in the first bundle of its group."""
        ray = importlib.import_module("ray")
        first = {"placement_group": ray.util.get_current_placement_group(), "placement_group_bundle_index": 0}
        options = first if place == "first bundle" else {}
        started = ray.remote(num_cpus=0, num_gpus=gpus, **options)(Plain if place == "actor" else told_by_ray).remote()
        return ray.get(started.told_by_ray.remote() if place == "actor" else started, timeout=30)

    def echo(self, value: object) -> object:
        """The value."""
        return value

    def built_with(self) -> list[object]:
        """Arguments of the constructor, and whether this runs on the thread that built it."""
        return [list(self.args), self.kwargs, threading.get_ident() == self.thread]

    def say(self, text: str) -> None:
        """Print a line."""
        print(text)  # noqa: T201 - what it is for

    def fail(self, why: str = "as asked") -> None:
        """Raise; of "a next()" what it raises."""
        raise (StopIteration if why == "a next()" else RuntimeError)(why)

    def count(self, to: int) -> Iterator[int]:
        """Yield."""
        yield from range(to)

    def meet(self) -> None:
        """Return once two are here at the same time."""
        self.meeting.wait()

    def company(self, until: str) -> int:
        """How many are here at the same time, once a file is written."""
        self.inside += 1
        wait_for_file(until)
        seen = self.inside
        self.inside -= 1
        return seen


class Broken:
    """Can't be built."""

    def __init__(self) -> None:
        raise ValueError("no weights here")


class SlowToBuild:
    """Is built for a long time."""

    def __init__(self, seconds: float = 60) -> None:
        time.sleep(seconds)


class Entry:
    """Runs to an end."""

    def __init__(self, result: str = "returns") -> None:
        self.result = result

    def run(self) -> None:
        """End as told."""
        print(f"about to {self.result[:-1]}", file=sys.stderr)  # noqa: T201 - tests look for it
        if self.result == "raises":
            raise RuntimeError("the loss is nan")
        if self.result == "exits":
            sys.exit(0)
        if self.result == "dies":
            os.kill(os.getpid(), signal.SIGKILL)


class Busy:
    """Is busy for ever; without hooks."""

    def __init__(self, how: str) -> None:
        self.how = how

    def run(self) -> None:
        """Never return."""
        if self.how == "python":
            while True:
                pass
        if self.how == "sleep":
            time.sleep(10**6)
        if self.how == "gil":
            # PyDLL keeps the GIL during the call: no other thread of this process runs Python any more.
            ctypes.PyDLL(None).sleep(10**6)


class Hanging(Busy):
    """Is busy, and its cancel() hangs as well."""

    def cancel(self) -> None:
        """Hang."""
        time.sleep(10**6)


class Yielding:
    """Ends its run() when told to, and leaves a checkpoint."""

    def __init__(self, checkpoint: str = "bytes") -> None:
        self.stop = threading.Event()
        self.steps = 0
        self.kind = checkpoint
        self.cancelled_for: object = None

    def restore(self, data: object) -> None:
        """Go on from there."""
        assert isinstance(data, bytes)
        self.steps = int(data)

    def run(self) -> int:
        """Work until told to stop."""
        while not self.stop.wait(0.005):
            self.steps += 1
        return self.steps

    def cancel(self, job: str) -> None:
        """Stop soon."""
        self.cancelled_for = job
        self.stop.set()

    def checkpoint(self) -> object:
        """The state, if it is one of those that end."""
        if self.kind == "never":
            threading.Event().wait()
        if self.kind == "dies":
            os._exit(9)
        if self.kind == "raises":
            raise OSError("No space left on device")
        return {
            "bytes": str(self.steps).encode(),
            "uri": "s3://bucket/key",
            "huge": b"x" * (2 << 20),
            "odd": 7,
        }[self.kind]

    def progress(self) -> dict[str, int]:
        """How far it is."""
        return {"steps": self.steps}


class Wedged:
    """Answers everything, and gets nowhere while it runs; ``stuck_at``: after so many steps."""

    def __init__(self, stuck_at: int = 0) -> None:
        self.stuck_at = stuck_at
        self.steps = 0

    def run(self) -> None:
        """Work until it is stuck, then wait for ever."""
        while True:
            time.sleep(0.01)
            if not self.stuck_at or self.steps < self.stuck_at:
                self.steps += bool(self.stuck_at)

    def progress(self) -> dict[str, float]:
        """How far it is. A loss of NaN is not equal to itself, and is no progress all the same."""
        return {"steps": self.steps, "loss": float("nan")}


class Asynchronous:
    """An async class."""

    def __init__(self) -> None:
        self.meeting = asyncio.Barrier(10)

    async def meet(self) -> None:
        """Return once ten are here at the same time."""
        await self.meeting.wait()

    async def count(self, to: int) -> AsyncIterator[int]:
        """Yield."""
        for number in range(to):
            yield number

    async def cancel(self) -> None:
        """Nothing to do."""


class DiesWhenBuilt:
    """Its process is killed while it is built."""

    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class QuickCancel(Busy):
    """Its cancel() returns at once, and nothing comes of it."""

    def cancel(self) -> None:
        """Nothing."""


class DumpsEnvironment:
    """Writes what it sees."""

    def __init__(self, file: str) -> None:
        self.file = file

    def run(self) -> None:
        """Write it."""
        Path(self.file).write_text(json.dumps(dict(os.environ)))


class Recorder:
    """Writes what it sees, and what a program that it starts sees, into a folder: one file a worker."""

    def __init__(self, folder: str) -> None:
        program = "import json, os; print(json.dumps(dict(os.environ)))"
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        name = f"{os.environ['CALLBOARD_COMPONENT']}-{os.environ['CALLBOARD_RANK']}.json"
        seen = {"worker": dict(os.environ), "child": json.loads(child), "pid": os.getpid()}
        (Path(folder) / name).write_text(json.dumps(seen))


class BadCancel(Busy):
    """Its cancel() raises."""

    def cancel(self) -> None:
        """Raise."""
        raise ValueError("can't")


class AsyncHookOfSyncClass(Yielding):
    """A sync class with an async hook."""

    async def cancel(self, job: str) -> None:  # type: ignore[override]
        """Stop soon."""
        await asyncio.sleep(0)
        self.stop.set()


STUBBORN_CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
time.sleep(10**6)
"""


def wait_for_file(path: str) -> str:
    """The content of a file that somebody is about to write (a test's process has no other way to tell)."""
    file = Path(path)
    while not (file.exists() and (text := file.read_text())):
        time.sleep(0.005)
    return text


class Stubborn:
    """Ignores SIGTERM and has a double-forked child in a session of its own."""

    def __init__(self, child_file: str) -> None:
        # Not from the main thread, where Python would refuse to set a handler.
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(1))
        subprocess.run([sys.executable, "-c", STUBBORN_CHILD, child_file], check=True)
        self.child = int(wait_for_file(child_file))

    def run(self) -> None:
        """Never return."""
        time.sleep(10**6)

    def die(self) -> None:
        """Be killed, as by the kernel for want of memory."""
        os.kill(os.getpid(), signal.SIGKILL)


class SlowToExit:
    """Its process takes a while to end by itself."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def run(self) -> None:
        """End, slowly, as an exit handler that frees device memory does."""
        self.cancelled.wait()
        time.sleep(0.3)
        os._exit(0)

    def cancel(self) -> None:
        """End soon."""
        self.cancelled.set()

    def leave(self) -> None:
        """End at once."""
        os._exit(0)


class Talker:
    """Prints, and ends once a file is there."""

    def __init__(self, gate: str) -> None:
        self.gate = Path(gate)

    def run(self) -> None:
        """Say hello and goodbye."""
        print("hello from the worker", flush=True)  # noqa: T201 - what it is for
        while not self.gate.exists():
            time.sleep(0.01)
        print("goodbye", flush=True)  # noqa: T201 - as above


class ChildFails:
    """Its constructor starts a program that says why it fails, and says itself only that it failed."""

    def __init__(self, secret: str = "") -> None:
        print("about to start the engine")  # noqa: T201 - what it is for
        program = "import sys; print(sys.argv[1], file=sys.stderr); raise ValueError('no such device')"
        child = subprocess.run([sys.executable, "-c", program, secret], check=False)
        raise RuntimeError(f"the engine ended with {child.returncode}: see root cause above")


class Fails:
    """Its entry method prints which attempt it is, and fails all but the last time."""

    def __init__(self, attempts: int = 1) -> None:
        self.attempts = attempts
        self.attempt = 0

    def setup(self, ctx: Any) -> None:
        """Learn the attempt."""
        self.attempt, self.rank = ctx.attempt, ctx.rank

    def run(self) -> None:
        """Print and fail."""
        print(f"attempt {self.attempt}, rank {self.rank}")  # noqa: T201 - what it is for
        print(f"trouble {self.attempt}", file=sys.stderr)  # noqa: T201 - as above
        if self.attempt < self.attempts:
            raise RuntimeError(f"attempt {self.attempt} failed")


class Printer:
    """Prints as much as it is told to, as fast as it can."""

    def __init__(self, mebibytes: int = 0) -> None:
        self.mebibytes = mebibytes

    def loud(self) -> None:
        """Print and end."""
        self.burst(self.mebibytes)

    def burst(self, mebibytes: int) -> float:
        """Print so much in lines of 64 bytes, numbered; how many seconds that took."""
        begun = time.perf_counter()
        for block in range(mebibytes * 16):
            os.write(1, b"".join(b"%062d \n" % (block * 1024 + line) for line in range(1024)))
        return time.perf_counter() - begun

    def complain(self, text: str) -> None:
        """Write a line to stderr as native code does, past Python."""
        os.write(2, text.encode() + b"\n")

    def say(self, text: str) -> None:
        """Print a line."""
        print(text)  # noqa: T201 - what it is for


class Noticed:
    """Writes down what its hooks are told, and leaves it as its checkpoint."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def cancel(self, notice: Any) -> None:
        """Remember the notice."""
        self.told.append([notice.reason, notice.kind, notice.seconds_left > 0])

    def checkpoint(self, job: str, *, notice: Any) -> bytes:
        """What was told."""
        return json.dumps([*self.told, job, notice.kind]).encode()


class SavesItself:
    """Saves on a signal to its own process, as trainers do that know nothing of callboard."""

    def __init__(self, file: str, name: str) -> None:
        self.file = Path(file)
        signal.signal(signal.Signals[name], self._save)

    def _save(self, *_: object) -> None:
        self.file.write_text("saved")

    def run(self) -> None:
        """Work until it has saved."""
        while not self.file.exists():
            time.sleep(0.01)


class SavesOnSignal:
    """Its child saves on SIGTERM; without it the child never ends."""

    def __init__(self, file: str) -> None:
        program = (
            "import pathlib, signal, sys, time\n"
            "def save(*_):\n    time.sleep(0.2); pathlib.Path(sys.argv[1]).write_text('saved'); sys.exit(0)\n"
            "signal.signal(signal.SIGTERM, save)\nprint('up', flush=True)\ntime.sleep(10**6)\n"
        )
        self.child = subprocess.Popen([sys.executable, "-c", program, file], stdout=subprocess.PIPE)
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == b"up\n"


class Returns:
    """Returns something from its entry method."""

    def __init__(self, value: Any = 1.5) -> None:
        self.value = value

    def run(self) -> dict[str, Any]:
        """What it was made with, and who it is."""
        return {"rank": int(os.environ["CALLBOARD_RANK"]), "value": self.value}


class LogsSecret:
    """Logs a secret by a logger of a library."""

    def __init__(self, logger: str, variable: str) -> None:
        self.logger, self.variable = logger, variable

    def run(self) -> None:
        """Log it."""
        logging.getLogger(self.logger).warning("the secret is %s", os.environ[self.variable])


HOLD_ON = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(10**6)
"""


class Holder:
    """Locks its devices, as files that stand for them, and so shows whether one is ever given twice.

    The kernel keeps the locks for as long as a process of it lives, its children among them. A device is two files:
    a worker with half of it locks one of them.
    """

    def __init__(self, folder: str, then: str = "", family: bool = False, gpu: float = 1) -> None:
        self.then = then
        self.stopped = threading.Event()
        self.files: list[int] = []
        node = os.environ["CALLBOARD_AGENT"].rpartition("/")[2]
        devices = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] if gpu else []
        seen = {
            "pid": os.getpid(),
            "started": _start_of(os.getpid()),
            "node": node,
            "devices": devices,
            "who": [os.environ[f"CALLBOARD_{name}"] for name in ("JOB", "COMPONENT", "RANK", "GENERATION")],
        }
        try:
            for device in devices:
                self._lock(Path(folder) / "devices" / f"{node}.{device}", half=gpu < 1)
        except BlockingIOError:
            _append(Path(folder) / "taken_twice", seen)
            raise
        if family:
            # In a session of its own, deaf to SIGTERM, with the locks.
            child = subprocess.Popen([sys.executable, "-c", HOLD_ON], pass_fds=self.files, start_new_session=True)
            seen["child"] = child.pid
        _append(Path(folder) / "held", seen)

    def _lock(self, device: Path, *, half: bool) -> None:
        for side in ("a", "b"):
            file = os.open(f"{device}.{side}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            self.files.append(file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if half and side == "a":
                    continue
                raise
            if half:
                break

    def run(self) -> None:
        """Work until told to stop; or end soon, or die."""
        if self.then == "hang":
            time.sleep(10**6)
        self.stopped.wait(0.3 if self.then else None)
        if self.then == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.then == "fail":
            raise RuntimeError("as asked")

    def cancel(self) -> None:
        """Stop soon; or don't."""
        if self.then == "hang":
            time.sleep(10**6)
        self.stopped.set()


def _append(file: Path, entry: object) -> None:
    with file.open("ab", buffering=0) as lines:
        lines.write(json.dumps(entry).encode() + b"\n")


def _start_of(pid: int) -> int:
    """Start time of a process in clock ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
