"""A small GRPO loop in plain torch whose components callboard places: rollout, inference and actor."""
