"""The figures of one controller, from its start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from callboard.controller.loop.driver import Driver
from callboard.controller.metrics.gauges import gauges
from callboard.controller.metrics.observations import Observations
from callboard.controller.metrics.server import Build, LoopCollector, MetricsServer
from callboard.controller.options import split_address
from callboard.model.log import structlog
from callboard.security.tls import ServerTls
from callboard.wire.refusals import LimitReached, Unavailable

log = structlog.get_logger(__name__)


class MetricsPortTaken(Exception):
    """The address for the metrics can't be listened on, and was asked for."""


class Metrics:
    """Measures a driver and shows the figures, if an address is stated."""

    def __init__(self, driver: Driver, heard_ages_s: Callable[[], Mapping[str, float]]) -> None:
        """
        Args:
            driver: whose state is shown; it is followed from now on.
            heard_ages_s: seconds since each node was heard of.
        """
        self._driver = driver
        self._heard_ages_s = heard_ages_s
        self._registry = CollectorRegistry()
        self.observations = Observations(self._registry, lambda: driver.state)
        driver.subscribe(self.observations)
        self._server: MetricsServer | None = None
        self.address = ""

    def start(
        self,
        listen: str,
        *,
        required: bool,
        pages: Mapping[str, Build] | None = None,
        admits: Callable[[str], bool] | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        """Listens at ``listen`` ("host:port"; empty: nowhere).

        Args:
            required: fail if it can't be listened on, instead of going without.
            admits: whether a bearer token may read; None: everybody may.
            tls: what to listen with; None: plain HTTP.

        Raises:
            MetricsPortTaken: it can't, and is ``required``.
        """
        if not listen:
            return
        loop = asyncio.get_running_loop()
        host, port = split_address(listen)
        self._registry.register(LoopCollector(loop, self._gauges))
        try:
            self._server = MetricsServer(host, port, self._registry, loop, pages or {}, admits=admits, tls=tls)
        except OSError as error:
            if required:
                raise MetricsPortTaken(f"{listen} can't be listened on for metrics: {error.strerror}") from error
            log.warning("metrics are not served: the port is taken; choose one with --metrics", address=listen)
            return
        self.address = f"{host}:{self._server.port}"
        log.info("metrics", url=f"http{'s' if tls else ''}://{self.address}/metrics")

    async def stop(self) -> None:
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
            self._server = None

    async def _gauges(self) -> list[Metric]:
        self.observations.forget_gone()
        now_ms = self._driver.now_ms()
        try:
            found = await self._driver.question(lambda scheduler: list(gauges(scheduler.state, now_ms)))
        except (Unavailable, LimitReached):
            # Nothing is decided now, or others ask as many questions as may wait: then it is done here.
            found = list(gauges(self._driver.state, now_ms))
        ages = GaugeMetricFamily("callboard_agent_heartbeat_age_seconds", "Since a node was heard of.", labels=["node"])
        for node_id, age_s in sorted(self._heard_ages_s().items()):
            ages.add_metric([node_id], age_s)
        return [*found, ages]
