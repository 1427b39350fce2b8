"""Jobs on the command line: submit, follow, steer, explain, logs, and programs as jobs."""
