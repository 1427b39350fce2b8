"""The node agent: one process per node that acts for the controller.

`node_agent` puts its parts together; `adoption` goes on with what an earlier agent left, `departure` says when it ends,
`machine` is all that is below it, so that it can be simulated. CONTRIBUTING.md has a line for each of its rooms.
"""
