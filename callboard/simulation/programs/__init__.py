"""The programs that ship, started, killed and frozen on virtual machines."""
