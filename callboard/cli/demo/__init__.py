"""The live demonstrations. `workers` is imported inside worker processes and needs nothing but Python."""
