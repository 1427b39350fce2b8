"""A class as users of Ray write it."""

from __future__ import annotations

from typing import Any, cast

import ray


@ray.remote(num_cpus=1)
class Decorated:
    """Ray puts an object that makes actors in the place of the class."""

    def echo(self, value: object) -> object:
        """What it was given."""
        return value

    class Inner:
        """A class in a class has a path, too."""


WithOptions = cast(Any, Decorated).options(num_cpus=2)
