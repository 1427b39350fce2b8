"""The simulator: the whole system in virtual time, from one seed, with everything that can go wrong.

    report = simulate(SimulationOptions(seed=7, hours=24, nodes=100))

What is real: the controller as it ships (``callboard.controller.core`` on a virtual event loop: the scheduler, the loop
around it, sessions, liveness, event log), the agents as they ship (``callboard.agents.node_agent``: sessions, leases,
commands, workers, stop ladder, placement groups, spares, the part in Ray, taking over from a killed agent), the
journal with its store and SQLite (a crash is answered by opening what it left), and the messages between the two. What
is virtual: time, the network, the controller's disk, machines with their processes and records (by the protocols of
``callboard.agents.machine``), what runs beside an agent (Ray, its driver, the fence), the code of workers, clients.

=============  ==========================================================================
options        what to simulate, and which faults
timeline       virtual time: the only clock, the event loop of production code, and programs that are killed or stopped
machines       the physical truth: which process trees live, which devices they use
network        streams between agents and controller, with everything a network does to them
rayworld, driver   Ray: sessions, raylets, actors, placement groups; and what an agent asks of them
hosts          the process of one worker, and what the user's class in it does
agent, agent_machine   one run of an agent, the machine below it, and who starts the next one
controller, disk   the surroundings of the controller
shapes, calls, workload, operators   pools, jobs, and who asks for them
chaos          which fault happens when
audit, witness, acknowledged, yielding   what must hold: of every decision, message, acknowledged request, and stop
simulator      puts them together; report: what came out; shrinking: the least that still fails
=============  ==========================================================================

Guaranteed: the same options give the same journal, byte for byte, whatever PYTHONHASHSEED is.
"""

from callboard.simulation.checks.report import SimulationFailure, SimulationReport
from callboard.simulation.options import Fault, SimulationOptions, parse_faults
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
