"""What every verb shows results and failures with: the terminal, tables' words, data for programs, faults."""
