"""The node agent: one process per node that acts for the controller.

Its modules answer one question each, and `node_agent` puts them together:

what is this node, and where does it keep its things – options, inventory, devices, loopback, run_dir;
what was asked of it, and what did it answer – session, channel, lease, outbox, commands;
what runs, and how is it ended with proof – worker (its table, life and ladder), processes, process_tree,
pid_watch;
what waits ready for a start – spares;
what does the next agent go on with when this one is killed – run_dir, order, adoption;
how is a worker hosted – runtime, process_runtime, ray_runtime, driver, and in the worker itself worker_host;
how does the node take part in Ray – ray_membership, ray_plan, ray_node, ray_command, driver_client;
what is below all of these, so that it can be simulated – machine, processes;
when does it end – departure.
"""
