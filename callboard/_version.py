"""The version, alone in a module so that build tools and programs read it without importing more."""

__version__ = "0.1.0"
