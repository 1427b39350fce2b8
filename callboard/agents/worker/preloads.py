"""Preloads: which spares with imported modules are kept, and which of them suits a start.

A pool may name modules (`preload: [torch]`) that spares import before a start takes one: `import torch` is nearly all
of what the start of a GPU worker takes. Each such spare imports them itself. A zygote that imports once and forks was
the other way, and was not taken:

- A Ray worker can't be forked: it talks to its raylet through threads that a child doesn't have. So importing spares
  are needed in any case, and a zygote would be a second mechanism, for plain processes alone.
- What was imported isn't safe to fork. `import torch` brings numpy, whose OpenBLAS has begun a thread by then (two
  tasks in /proc/PID/task); transformers and others begin more, with locks that a child may inherit held.
- The child of a zygote isn't the agent's, which then neither learns its exit code nor reaps it.
- What it would save: 148 MB private memory for each spare of torch on a CPU build (284 MB on an H200 host, of which a
  forked child has 54), and the seconds of a CPU that make the next spare, which no start waits for.

Importing spares keep their threads, so those need not be refused. What makes a spare unfit does: a preload that fails,
takes too long or too much memory, touches a device, or reads what is set for each worker. Then the node doesn't preload
these modules any more, says why, and starts import them themselves.

A start whose variables differ in what the imports read takes none of these spares. Which variables those are is not
guessed: reads in Python are recorded while a spare imports, and those of native code go by the prefixes of their
libraries. Spares are made for the variables that starts came with lately.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from callboard.agents.host.worker_preload import ANY
from callboard.agents.supplies.worker_env import RENDERER_VARIABLES
from callboard.model.names import OWNED_VARIABLES, is_secret

MAX_LISTS = 64
"""Lists of modules that one node preloads at one time."""

_MAX_KINDS = 4
"""Sets of variables for which a node keeps spares of one list of modules: those that starts came with last."""

_BURST_S = 10.0
"""Starts within so many seconds are those of one gang: so many spares are kept."""

_NATIVE_PREFIXES = (
    *("AMD_", "ASCEND_", "BLIS_", "CUBLAS_", "CUDA_", "CUDNN_", "FI_", "GLIBC_", "GLOO_", "GOMP_", "GOTO_", "HF_"),
    *("HIP_", "HSA_", "HUGGINGFACE_", "JAX_", "KINETO_", "KMP_", "MALLOC_", "MIOPEN_", "MKL_", "NCCL_", "NUMEXPR_"),
    *("NVIDIA_", "NVTE_", "OMP_", "OPENBLAS_", "PYTORCH_", "RCCL_", "ROCM_", "TF_", "TOKENIZERS_", "TORCH_"),
    *("TORCHINDUCTOR_", "TRANSFORMERS_", "TRITON_", "UCX_", "VECLIB_", "XLA_"),
)
"""Variables of libraries that read them as they are loaded, or keep what they read, where Python doesn't see it."""

_OWN = frozenset((*OWNED_VARIABLES, *RENDERER_VARIABLES))
_OWN_PREFIX = "CALLBOARD_"
_SHOWN_NAMES = 3

Modules = tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """What a spare has imported, and under which values of the variables that its imports read."""

    modules: Modules = ()
    variables: tuple[tuple[str, str], ...] = field(default=(), repr=False)


PLAIN = Kind()
"""A spare that has imported nothing."""


@dataclass(frozen=True)
class Wish:
    """What a start would like a spare to have imported."""

    modules: Modules
    variables: Mapping[str, str] = field(repr=False)
    """All variables of the worker."""
    secrets: frozenset[str] = frozenset()
    """Names of those whose values are secret: no spare holds them before its start."""
    code: tuple[str, ...] = ()
    """Folders that the worker's modules are looked for in first."""


@dataclass
class _Demand:
    """How many spares of one kind starts asked for at one time."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_LISTS))
    most: int = 0

    def note(self, now_s: float) -> None:
        self.times.append(now_s)
        self.most = max(self.most, sum(now_s - each <= _BURST_S for each in self.times))


class Preloads:
    """What is known of the modules that are preloaded on one node.

    Attributes:
        lists: the lists of modules that are asked for now.
        refused: why a list of modules isn't preloaded here.
        bytes: memory of the last spare of a list.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        """
        Args:
            variables: environment of a host before it has a job.
        """
        self.refused: dict[Modules, str] = {}
        self.bytes: dict[Modules, int] = {}
        self._variables = variables
        self.lists: tuple[Modules, ...] = ()
        self._read: dict[Modules, frozenset[str]] = {}
        self._demands: dict[Modules, OrderedDict[Kind, _Demand]] = {}

    def ask(self, lists: Sequence[Sequence[str]]) -> None:
        """Preload these lists of modules from now on."""
        self.lists = tuple(dict.fromkeys(map(tuple, lists)))[:MAX_LISTS]
        # What is known of others is kept, in case that they come again, as far as that stays little.
        for known in (self.refused, self.bytes, self._read, self._demands):
            for modules in [each for each in known if each not in self.lists][MAX_LISTS:]:
                del known[modules]

    def wanted(self, at_least: int, at_most: int) -> dict[Kind, int]:
        """How many spares of each kind there should be."""
        return {
            kind: min(max(at_least, demand.most), at_most)
            for modules in self.lists
            if modules not in self.refused
            for kind, demand in reversed(self._demands.get(modules, OrderedDict(self._first(modules))).items())
        }

    def learn(self, modules: Modules, read: Sequence[str], size_bytes: int) -> None:
        """A spare imported them: which variables were read meanwhile, and how much memory it takes."""
        self._read[modules] = frozenset(read)
        self.bytes[modules] = size_bytes
        own = sorted(name for name in read if name in _OWN or name.startswith(_OWN_PREFIX))
        if own:
            self.refused[modules] = f"importing them reads {_listed(own)}, which is set for each worker"

    def kind(self, modules: Modules, variables: Mapping[str, str]) -> Kind:
        """The kind of spare that suits these variables."""
        read = self._read.get(modules, frozenset())
        return Kind(modules, tuple(sorted(item for item in variables.items() if _matters(item[0], read))))

    def variables_of(self, kind: Kind) -> dict[str, str]:
        """Variables under which a spare of a kind imports."""
        read = self._read.get(kind.modules, frozenset())
        kept = {name: value for name, value in self._variables.items() if not _matters(name, read)}
        return kept | dict(kind.variables)

    def suits(self, wish: Wish, now_s: float) -> Kind | str:
        """The kind of spare that suits a start, whose demand is noted; or why none can."""
        if wish.modules in self.refused:
            return f"this node does not preload {', '.join(wish.modules)}: {self.refused[wish.modules]}"
        if shadowed := _shadowed(wish):
            return f"the job's own code has a module {shadowed}"
        kind = self.kind(wish.modules, wish.variables)
        own = {name for name, value in kind.variables if self._variables.get(name) != value}
        if secret := sorted(name for name in own if name in wish.secrets or is_secret(name)):
            return f"{_listed(secret)} is secret, so no spare is made with it"
        if wish.modules in self._read:  # before, it isn't known what its kind depends on
            demands = self._demands.setdefault(wish.modules, OrderedDict())
            demands.setdefault(kind, _Demand()).note(now_s)
            demands.move_to_end(kind)
            if len(demands) > _MAX_KINDS:
                demands.popitem(last=False)
        return kind

    def _first(self, modules: Modules) -> Iterator[tuple[Kind, _Demand]]:
        """Before a start came: a guess at its variables. A worker has a thread for each CPU that it asks for."""
        yield self.kind(modules, {**self._variables, "OMP_NUM_THREADS": "1"}), _Demand()


def difference(kind: Kind, other: Kind) -> str:
    """Names of the variables in which two kinds of spares with the same modules differ."""
    one, two = dict(kind.variables), dict(other.variables)
    return _listed(sorted(name for name in {*one, *two} if one.get(name) != two.get(name)))


def _matters(name: str, read: frozenset[str]) -> bool:
    """Whether it matters to a spare which value a variable had as its modules were imported."""
    if name in _OWN or name.startswith(_OWN_PREFIX):
        return False
    return name in read or ANY in read or name.startswith(_NATIVE_PREFIXES)


def _shadowed(wish: Wish) -> str:
    """Which of the modules the job's own code would be imported for; empty: none."""
    tops = dict.fromkeys(module.partition(".")[0] for module in wish.modules)
    places = [(top, Path(folder, name)) for top in tops for folder in wish.code for name in (top, f"{top}.py")]
    return next((top for top, place in places if place.exists()), "")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"{', '.join(names[:_SHOWN_NAMES])}{more}"
