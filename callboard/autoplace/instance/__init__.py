"""The instance that the searches work on: tasks in whole units, their options, and their times."""
