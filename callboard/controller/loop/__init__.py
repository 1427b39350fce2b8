"""The loop that decides: what arrives, in which order it is decided, and who follows."""
