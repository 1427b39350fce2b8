"""The agent's side of workers: from the start command to the proof that one is gone."""
