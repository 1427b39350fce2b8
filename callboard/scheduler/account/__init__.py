"""The account of what is: why a job waits, what would help, what is wanted, what is used."""
