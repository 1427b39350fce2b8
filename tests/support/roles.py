"""Classes of a user's own that stand in for the sample in `callboard demo elastic`."""

from __future__ import annotations

import os


class Generator:
    """An inference worker that knows nothing of Ray or callboard."""

    def generate(self, step: int) -> dict[str, object]:
        """A rollout."""
        return {"message": f"generated {step * 8} samples", "visible_devices": os.environ["CUDA_VISIBLE_DEVICES"]}
