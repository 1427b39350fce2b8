"""The exact search: branch and bound with its bounds, and the same model for OR-Tools' CP-SAT."""
