"""The place of :mod:`callboard.demo.training` in version 0.1."""

from callboard.demo.training import TrainingActor

__all__ = ["TrainingActor"]
