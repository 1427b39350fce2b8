"""The problem and the plan: a workflow of costed components on a cluster, and what the search answers."""
