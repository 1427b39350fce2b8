"""The config: the placement of each component, as it is written, checked."""
