"""`callboard …`: one module per verb group says what can be asked, one in `actions` does it.

The modules here import typer and nothing heavier, so that `callboard --help` answers at once; what an
action needs (gRPC, rich) is imported when it runs.
"""
