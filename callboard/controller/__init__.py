"""The controller: the program around the scheduler, with its clock, journal, sessions and services.

The loop (:mod:`~callboard.controller.loop.driver`): take what arrived, let the scheduler decide, write what changed to
the journal, then tell agents, watchers and callers. Nothing leaves before it is journaled.

Where to look:

- :mod:`~callboard.controller.server` puts everything together; ``run_controller(ControllerOptions(...))``.
- :mod:`~callboard.controller.loop.driver` and :mod:`~callboard.controller.journal.journal`: the loop and what survives
a crash.
- :mod:`~callboard.controller.sessions.sessions`: the streams of the agents.
- :mod:`~callboard.controller.services`: the API; :mod:`~callboard.controller.views`: records as messages.
"""
