"""What is checked during a run and at its end, and how a failure is reported."""
