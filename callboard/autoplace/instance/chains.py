"""Options in chains: more GPUs, less time, everything else alike.

The more GPUs an option of a chain has, the sooner everything ends that depends on it, so a bound needs only the ends
of a range of options, and the widest options that fit are the best of their chains. What is not so ordered (pools,
offloading, memory, sharing) is chosen first: one chain per task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from callboard.autoplace.instance.tasks import Arc, Instance, Option
from callboard.model.frozen import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Options of one task, ascending in GPUs, descending in time.

    Attributes:
        options: at least one.
        spans: shortest span of each.
        pieces: time of a piece of each.
        gpus: GPUs of each, over all pools.
        areas: GPUs · span of each.
        pools: indices of the pools they use.
        alone: they share no GPU.
        peak: MiB per GPU while running.
        resident: MiB per GPU between spans.
    """

    options: tuple[Option, ...]
    spans: tuple[int, ...]
    pieces: tuple[int, ...]
    gpus: tuple[int, ...]
    areas: tuple[int, ...]
    pools: tuple[int, ...]
    alone: bool
    peak: int
    resident: int

    @classmethod
    def of(cls, options: Iterable[Option]) -> Chain:
        """The chain of options that differ in nothing but GPUs and time."""
        chosen = tuple(options)
        first = chosen[0]
        return cls(
            options=chosen,
            spans=tuple(option.span for option in chosen),
            pieces=tuple(option.piece for option in chosen),
            gpus=tuple(option.gpus for option in chosen),
            areas=tuple(option.gpus * option.span for option in chosen),
            pools=tuple(pool for pool, _ in first.widths),
            alone=first.alone,
            peak=first.peak,
            resident=first.resident,
        )


def chains_of(options: tuple[Option, ...]) -> tuple[Chain, ...]:
    """The options of a task as chains, those with the fastest option first."""
    alike: dict[object, list[list[Option]]] = {}
    for option in options:
        # Of an option in several pools only one width may vary, or "wider" would mean nothing.
        fixed = option.widths if len(option.widths) > 1 else tuple(pool for pool, _ in option.widths)
        pools = tuple(part.mode.pool for part in option.parts)
        key = (fixed, pools, option.extra, option.alone, option.peak, option.resident)
        runs = alike.setdefault(key, [])
        for run in runs:
            if run[-1].gpus < option.gpus and run[-1].work > option.work and run[-1].piece >= option.piece:
                run.append(option)
                break
        else:
            runs.append([option])
    chains = [Chain.of(run) for runs in alike.values() for run in runs]
    return tuple(sorted(chains, key=lambda chain: (chain.spans[-1], chain.gpus[-1], chain.gpus[0])))


def combinations_of(instance: Instance) -> Iterator[tuple[Chain, ...]]:
    """One chain per task, in every combination."""
    return product(*(chains_of(task.options) for task in instance.tasks))


@dataclass(frozen=True, slots=True)
class Link:
    """An arc between two tasks whose pools are known.

    Attributes:
        other: the task at its other end.
        barrier: waits for the end.
        whole: transfer time of the batch.
        piece: transfer time of a piece.
    """

    other: int
    barrier: bool
    whole: int
    piece: int


def links_of(arcs: Iterable[Arc], options: tuple[Option, ...]) -> tuple[list[list[Link]], list[list[Link]]]:
    """(into, out of) each task, for options in these pools."""
    into: list[list[Link]] = [[] for _ in options]
    out: list[list[Link]] = [[] for _ in options]
    for arc in arcs:
        whole, piece = arc.delay(options[arc.source], options[arc.target])
        into[arc.target].append(Link(arc.source, arc.barrier, whole, piece))
        out[arc.source].append(Link(arc.target, arc.barrier, whole, piece))
    return into, out
