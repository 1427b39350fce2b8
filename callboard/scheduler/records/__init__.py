"""The words of the scheduler: states and their transitions, records, events, commands and refusals."""
