"""What an agent sees of its machine: processes and their use of it, devices, the inventory."""
