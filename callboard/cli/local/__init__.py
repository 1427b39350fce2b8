"""A whole cluster on this machine: started, watched and taken down as child processes."""
