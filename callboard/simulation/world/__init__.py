"""What the simulator supplies: time, chance, network, machines, disks and Ray."""
