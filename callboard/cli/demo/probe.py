"""The place of :mod:`callboard.demo.probe` in version 0.1."""

from callboard.demo.probe import Probe

__all__ = ["Probe"]
