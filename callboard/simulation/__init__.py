"""The simulator: the whole system in virtual time, from one seed, with everything that can go wrong.

    report = simulate(SimulationOptions(seed=7, hours=24, nodes=100))

What is real: the controller as it ships (``callboard.controller.core`` on a virtual event loop: the scheduler, the loop
around it, sessions, liveness, event log), the agents' sessions, outboxes and leases as they ship, the journal's codec
(every decision is encoded, and a crash is answered by decoding), and the messages between the two. What is virtual:
time, the network, the controller's disk, machines with their process trees, Ray, clients. What an agent does with its
commands is still rebuilt here, rule by rule as in ``callboard.agents``.

=============  ==========================================================================
options        what to simulate, and which faults
timeline       virtual time: the only clock, the event loop of production code, and programs that are killed or stopped
machines       the physical truth: which process trees live, which devices they use
rayworld       the placement groups that exist in Ray
network        streams between agents and controller, with everything a network does to them
agent, membership, commands, tasks, hosting, fence, behaviour   the surroundings of an agent, and its workers
controller, disk, watched_logs   the surroundings of the controller
shapes, calls, workload, operators   pools, jobs, and who asks for them
chaos          which fault happens when
audit, witness, promises   what must hold: of every decision, message, and acknowledged request
simulator      puts them together; report: what came out; shrinking: the least that still fails
=============  ==========================================================================

Guaranteed: the same options give the same journal, byte for byte, whatever PYTHONHASHSEED is.
"""

from callboard.simulation.options import Fault, SimulationOptions, parse_faults
from callboard.simulation.report import SimulationFailure, SimulationReport
from callboard.simulation.shrinking import Shrunk, shrink
from callboard.simulation.simulator import Simulator, simulate

__all__ = [
    "Fault",
    "Shrunk",
    "SimulationFailure",
    "SimulationOptions",
    "SimulationReport",
    "Simulator",
    "parse_faults",
    "shrink",
    "simulate",
]
