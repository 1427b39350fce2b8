"""What the user wrote, with the place of every value: YAML, mappings and OmegaConf as one tree."""
