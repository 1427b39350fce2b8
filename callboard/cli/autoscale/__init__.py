"""A cluster that follows its demand: how many nodes, when, and where they come from. See docs/growing.md."""
