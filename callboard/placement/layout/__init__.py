"""The layout: texts laid over the resources of the cluster, process by process."""
