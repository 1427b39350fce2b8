"""Do the figures say what is true, and does a scrape harm nobody?"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from callboard.cli.watch import status
from callboard.controller.metrics import metrics
from callboard.controller.metrics.gauges import gauges
from callboard.controller.metrics.server import MetricsServer
from callboard.controller.options import ControllerOptions
from callboard.controller.server import Controller
from callboard.controller.views.stats import stats_message
from callboard.model.options import OptionError
from callboard.scheduler.records import events as ev
from callboard.v1 import job_pb2, scheduler_pb2
from callboard.wire.refusals import Unavailable
from tests.controller.support import api_at, job, options_for, pool, running
from tests.scheduler.world import World
from tests.support.fake_agent import FakeAgent

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def get(url: str, token: str = "") -> str:
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


async def scrape(controller: Controller) -> Samples:
    text = await asyncio.to_thread(get, f"http://{controller.metrics.address}/metrics", controller.access.token)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_scrape_is_worked_out_beside_the_loop_and_on_it_where_nothing_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return gauges(*arguments)

    monkeypatch.setattr(metrics, "gauges", noted)
    async with running(options_for(tmp_path, metrics="127.0.0.1:0")) as controller, api_at(controller.address) as api:
        await api.pools.CreatePool(pool())
        before = await scrape(controller)
        await api.pools.CreatePool(pool("other"))
        after = await scrape(controller)
        refused = Unavailable("it has no journal")
        monkeypatch.setattr(controller.driver, "check_serving", lambda: (_ for _ in ()).throw(refused))
        during = await scrape(controller)
        monkeypatch.undo()
    series = ("callboard_queue_length", labelled(pool="other"))
    assert series not in before
    assert after[series] == during[series] == 0
    assert threads == [False, False, True]


def labelled(**labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


class TestMetrics:
    async def test_gauges_are_the_ledger_and_counts_are_what_happened(self, tmp_path: Path) -> None:
        options = options_for(tmp_path, metrics="127.0.0.1:0")
        async with running(options) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n1", gpus=2):
                await api.submit(job("a", gpu=1000))
                await api.until(lambda event: event.subject == "jobs/a" and event.state == "RUNNING")
                found = await scrape(controller)
                told = (await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())).stats
        assert told.metrics_address == controller.metrics.address
        assert found["callboard_nodes", labelled(state="READY")] == 1
        assert found["callboard_gpus", labelled(state="used")] == 1
        assert found["callboard_gpus", labelled(state="free")] == 1
        assert found["callboard_jobs", labelled(state="RUNNING")] == 1
        assert found["callboard_queue_length", labelled(pool="rlhf")] == 0
        assert found["callboard_pool_usage", labelled(pool="rlhf", resource="gpu")] == 1
        assert found["callboard_component_workers", labelled(job="a", component="w")] == 1
        assert found["callboard_task_schedule_seconds_count", labelled(pool="rlhf")] == 1
        assert found["callboard_worker_start_seconds_count", labelled(spare="miss")] == 1
        assert found["callboard_worker_starts_total", labelled(spare="miss")] == 1
        assert found["callboard_decision_seconds_count", ()] > 0
        assert found["callboard_journal_commit_seconds_count", ()] > 0
        assert found["callboard_call_seconds_count", labelled(method="SubmitJob", code="OK")] == 1
        assert ("callboard_agent_heartbeat_age_seconds", labelled(node="n1")) in found

    async def test_a_preemption_is_counted_with_its_rule_and_how_it_ended(self, tmp_path: Path) -> None:
        options = options_for(tmp_path, metrics="127.0.0.1:0")
        async with running(options) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n1", gpus=1):
                await api.submit(job("low", gpu=1000, priority_milli=1000))
                await api.until(lambda event: event.subject == "jobs/low" and event.state == "RUNNING")
                await api.submit(job("high", gpu=1000, priority_milli=9000))
                await api.until(lambda event: event.subject == "jobs/high" and event.state == "RUNNING")
                found = await scrape(controller)
        counted = {labels: value for (name, labels), value in found.items() if name == "callboard_preemptions_total"}
        assert list(counted.values()) == [1]
        assert dict(next(iter(counted)))["reason"] == "SAME_POOL"
        assert found["callboard_preemption_execution_seconds_count", ()] == 1
        assert found["callboard_preemption_to_start_seconds_count", ()] == 1
        assert found["callboard_queue_length", labelled(pool="rlhf")] == 1

    async def test_a_refused_call_is_counted_by_its_status(self, tmp_path: Path) -> None:
        options = options_for(tmp_path, metrics="127.0.0.1:0")
        async with running(options) as controller, api_at(controller.address) as api:
            with pytest.raises(Exception, match="nobody"):
                await api.jobs.GetJob(job_pb2.GetJobRequest(name="jobs/nobody"))
            found = await scrape(controller)
        assert found["callboard_call_seconds_count", labelled(method="GetJob", code="NOT_FOUND")] == 1

    async def test_a_stuck_loop_is_told_and_other_methods_are_refused(self) -> None:
        loop = asyncio.get_running_loop()
        server = MetricsServer(
            "127.0.0.1", 0, CollectorRegistry(), loop, {"/demand": lambda: {"jobs": []}}, admits=None
        )
        try:
            base = f"http://127.0.0.1:{server.port}"
            assert json.loads(await asyncio.to_thread(get, f"{base}/demand")) == {"jobs": []}
            for url, data, code in ((f"{base}/nothing", None, 404), (f"{base}/metrics", b"x", 405)):
                with pytest.raises(urllib.error.HTTPError) as refused:
                    await asyncio.to_thread(urllib.request.urlopen, url, data, 10)
                assert refused.value.code == code
                refused.value.close()
        finally:
            await asyncio.to_thread(server.close)

    async def test_a_peer_that_says_nothing_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("callboard.controller.metrics.server._Patient.timeout", 0.05)
        server = MetricsServer("127.0.0.1", 0, CollectorRegistry(), asyncio.get_running_loop(), {}, admits=None)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await reader.read() == b""
        writer.close()
        await asyncio.to_thread(server.close)

    def test_an_address_that_others_can_reach_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match="--metrics"):
            ControllerOptions(state_dir=tmp_path, metrics="0.0.0.0:8080")


def test_pc_14_a_name_has_one_series_while_one_job_ends_and_the_next_starts() -> None:
    world = World({"n1": 2})
    world.pool()
    world.submit("j")
    world.hold_stops_of("j")
    world.cancel("j")
    world.submit("j")
    series = [
        tuple(sorted(sample.labels.items()))
        for metric in gauges(world.state, world.now_ms)
        if metric.name == "callboard_component_workers"
        for sample in metric.samples
    ]
    assert series == [labelled(job="j", component="main")]


def test_ft_c6_whole_gpus_and_parts_of_shared_ones_are_told_apart() -> None:
    world = World({"n1": 4, "n2": 2})
    world.pool()
    on_n1 = (("node", "n1"),)
    for n in range(4):
        world.submit(f"a{n}", ask={"gpu": 0.6}, node_selector=on_n1)
    world.submit("asks", priority=1, ask={"gpu": 1}, node_selector=on_n1)
    stats = stats_message(world.state)
    assert (stats.free_whole_gpus, stats.free_gpu_parts_milli) == (2, 1600)
    assert headline_of(stats) == "In use: 0/128 CPU, 2.4/6 GPU (2 whole free, 1.6 in parts), 0/128GiB memory"
    figures = {
        (sample.name, *sample.labels.values()): sample.value
        for family in gauges(world.state, world.now_ms)
        for sample in family.samples
    }
    assert figures["callboard_free_gpus", "whole"] == 2
    assert figures["callboard_free_gpus", "part"] == 1.6
    assert figures["callboard_demand_whole_gpus", "pool", "false"] == 1
    assert "n1 lacks 1 GPU (needs 1; 0 whole free and 1.6 in parts)" in world.explain("asks").summary
    world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id="n2", cordoned=True))
    assert world.state.cluster_use.free_gpus.whole == 0, "nothing of a cordoned node can be given"


def headline_of(stats: scheduler_pb2.Stats) -> str:
    """The line of `callboard status` that says what is in use."""
    return status._headline("127.0.0.1:6990", stats).plain.split("\n")[1]


MONITORING = Path(__file__).resolve().parents[2] / "scripts" / "deploy" / "monitoring"


def expressions() -> dict[str, list[str]]:
    """What the rules for alerts and the dashboard ask Prometheus for, by file."""
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    board = json.loads((MONITORING / "grafana.json").read_text())
    return {
        "alerts.yaml": [rule["expr"] for group in rules["groups"] for rule in group["rules"]],
        "grafana.json": [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())],
    }


class TestMonitoring:
    async def test_alerts_and_dashboard_ask_for_figures_labels_and_values_that_exist(self, tmp_path: Path) -> None:
        options = options_for(tmp_path, metrics="127.0.0.1:0")
        async with running(options) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address, "n1", gpus=2):
                await api.submit(job("a", gpu=1000))
                await api.until(lambda event: event.subject == "jobs/a" and event.state == "RUNNING")
                found = await scrape(controller)
        # Histograms and counters with labels show no sample before the first; their families are there.
        declared = {
            f"{name}{ending}": set(metric._labelnames) | ({"le"} if ending == "_bucket" else set())
            for metric in vars(controller.metrics.observations).values()
            if isinstance(metric, MetricWrapperBase)
            for name in [metric._name]
            for ending in ("_total", "_count", "_bucket", "_sum")
        }
        for name, labels in found:
            declared.setdefault(name, set()).update(label for label, _ in labels)
        states = {"LOST", *(dict(labels).get("state", "") for _, labels in found)}
        kinds = {dict(labels).get("kind", "") for _, labels in found}
        for file, asked in expressions().items():
            assert len(asked) >= 10
            for expression in asked:
                names = set(re.findall(r"callboard_\w+", expression))
                assert names, (file, expression)
                assert names <= set(declared), (file, expression, names - set(declared))
                known = set[str]().union(*(declared[name] for name in names))
                by = re.findall(r"\b(?:by|on) ?\(([^)]*)\)", expression)
                wanted = {label.strip() for part in by for label in part.split(",") if label.strip()}
                selected = dict(re.findall(r'(\w+)="([^"]*)"', expression))
                assert wanted | set(selected) <= known, (file, expression)
                assert selected.get("state", "") in states, (file, expression)
                assert selected.get("kind", "") in kinds, (file, expression)

    def test_legends_name_labels_that_their_expressions_keep(self) -> None:
        board = json.loads((MONITORING / "grafana.json").read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                by = re.search(r"\bby ?\(([^)]*)\)", target["expr"])
                if by:
                    assert shown <= {label.strip() for label in by[1].split(",")}, target["expr"]

    def test_no_two_panels_lie_on_each_other(self) -> None:
        board = json.loads((MONITORING / "grafana.json").read_text())
        taken = [
            (x, y)
            for place in (panel["gridPos"] for panel in board["panels"])
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(taken) == len(set(taken))
        assert max(x for x, _ in taken) < 24
