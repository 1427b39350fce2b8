"""What is asked of the batches of a steady state? Rules on the starts and ends of one batch and of the next ones."""

from __future__ import annotations

from callboard.autoplace.cyclic import Rule
from callboard.autoplace.groups import Split
from callboard.autoplace.tasks import Instance


def batch_rules(instance: Instance, split: Split, sync: int, staleness: float) -> list[Rule]:
    """What is asked of one batch, of two batches of one task, and of the latency."""
    rules: list[Rule] = []
    options = {task: option for group in split for task, option in zip(group.members, group.options, strict=True)}
    tails = {task: tail for group in split for task, tail in zip(group.members, group.tails, strict=True)}
    for group in split:
        for task, span in zip(group.members, group.spans, strict=True):
            rules += [
                Rule(0, start_of(task), 0.0, 0.0),
                Rule(start_of(task), end_of(task), float(span), 0.0),
                Rule(end_of(task), start_of(task), 0.0, 1.0),  # done before its next batch
                # The whole batch, its weight sync included, within (η + 1) periods of variable 0.
                Rule(end_of(task), 0, float(tails[task] + sync), staleness + 1.0),
            ]
    for arc in instance.arcs:
        i, j = arc.source, arc.target
        whole, piece = arc.delay(options[i], options[j])
        if arc.barrier:
            rules.append(Rule(end_of(i), start_of(j), float(tails[i] + whole), 0.0))
            continue
        # What hides under the next batch still has to arrive: the end of j's span plus its own tail.
        rules += [
            Rule(start_of(i), start_of(j), float(options[i].piece + piece), 0.0),
            Rule(end_of(i), end_of(j), float(tails[i] + piece + options[j].piece - tails[j]), 0.0),
        ]
        if whole:
            rules.append(Rule(start_of(i), end_of(j), float(options[i].piece + whole + options[j].piece), 0.0))
    return rules


def turn_rules(i: int, j: int, shift: int) -> list[Rule]:
    """What is asked of two tasks that take turns, ``shift`` periods apart."""
    # i ends before the turn of j, `shift` periods on; j before that of i, 1 − `shift` periods on.
    return [
        Rule(end_of(i), start_of(j), 0.0, float(shift)),
        Rule(end_of(j), start_of(i), 0.0, float(1 - shift)),
    ]


def start_of(task: int) -> int:
    """The variable of a task's start."""
    return 2 * task + 1


def end_of(task: int) -> int:
    """The variable of a task's end."""
    return 2 * task + 2
