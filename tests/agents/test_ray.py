"""Does the agent do on real Ray what it does with plain processes, and does Ray's own book agree?

One cluster for all tests: a head and one more node, each with two simulated GPUs. What breaks a node comes last.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack, suppress
from io import BytesIO
from pathlib import Path

import pytest

from callboard.agents.files.run_dir import RunDir
from callboard.agents.host.framing import RemoteError
from callboard.agents.ray.loopback import host_addresses
from callboard.agents.ray.ray_driver_client import start_driver
from callboard.client.packing import pack_requirements
from callboard.security.processes import read_entry
from callboard.v1 import agent_pb2
from tests.agents.conftest import assert_nothing_left, is_gone, started_by, until_gone
from tests.agents.test_containers import actor, stand_in
from tests.support import images
from tests.support.agents_on_ray import START_S, Cluster, cluster, joined, run_node, stores_seen
from tests.support.fake_controller import start_worker
from tests.support.wheels import wheel

__all__ = ["cluster"]

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module")]

pytestmark.append(pytest.mark.timeout(START_S + 60))

CHOSEN_IPS = ["127.0.0.2", *[each for each in host_addresses() if ":" not in each and " " not in each][:1]]
"""A loopback address and the first of the host's own, if it has any."""


class TestNodes:
    async def test_the_second_node_is_in_the_first_ones_session(self, cluster: Cluster) -> None:
        head, other = cluster.nodes["n0"], cluster.nodes["n1"]
        assert head.head
        assert not other.head
        assert head.session == other.session
        assert head.node_ip != other.node_ip
        assert head.auth_token
        assert not other.auth_token, "only the head tells the token"

    async def test_the_token_is_kept_where_only_we_read_it(self, cluster: Cluster) -> None:
        token = cluster.nodes["n0"].auth_token
        for node in ("n0", "n1"):
            file = cluster.folder / node / "ray-token"
            assert file.read_text() == token
            assert file.stat().st_mode & 0o777 == 0o600
            assert token not in (cluster.folder / f"{node}.log").read_text()

    async def test_no_worker_waits_idle(self, cluster: Cluster) -> None:
        assert await cluster.probe.ask("actors") == []

    @pytest.mark.parametrize("ip", CHOSEN_IPS)
    async def test_pg_13_on_a_host_of_several_addresses_the_chosen_one_is_what_ray_and_the_controller_see(
        self, cluster: Cluster, ip: str
    ) -> None:
        node = f"ip-{ip}"
        agent = await run_node(cluster.controller, cluster.folder, node, node_ip=ip)
        try:
            told = await joined(cluster.controller, node)
            assert told.node_ip == ip
            assert (await cluster.probe.ask("nodes"))[told.ray_node_id] == ip
            # What is pinned to the node by its id gets there.
            command = await cluster.start("Plain", node=node, job=node)
            assert await cluster.call(command, "echo", 7) == [7]
            await cluster.stop(command, node=node)
        finally:
            agent.terminate()
            code = await agent.wait()
        assert code == 0
        assert_nothing_left(cluster.folder / node)


class TestPlacementGroups:
    async def test_rays_own_books_show_the_amounts(self, cluster: Cluster) -> None:
        before = await cluster.probe.ask("available")
        create = agent_pb2.CreatePlacementGroup(
            placement_group_id="pg-1",
            attempt=1,
            timeout_ms=10_000,
            bundles=[
                cluster.bundle("n1", cpu_milli=1500, gpu_milli=1000, memory_bytes=1 << 30),
                cluster.bundle("n1", cpu_milli=500, gpu_milli=500),
                cluster.bundle("n0", cpu_milli=1000),
            ],
        )
        report = await cluster.controller.do("n0", create_placement_group=create)
        ready = report.placement_group_ready
        assert ready.ray_session == cluster.nodes["n0"].session

        after = await cluster.probe.ask("available")

        def taken(node: str, resource: str) -> float:
            ray_id = cluster.nodes[node].ray_node_id
            return float(before[ray_id][resource] - after[ray_id].get(resource, 0.0))

        assert [taken("n1", "CPU"), taken("n1", "GPU"), taken("n1", "memory")] == [2.0, 1.5, 1 << 30]
        assert [taken("n0", "CPU"), taken("n0", "GPU")] == [1.0, 0.0]

        # By id, and from another agent than the one that made it.
        remove = agent_pb2.RemovePlacementGroup(
            placement_group_id="pg-1", attempt=1, ray_placement_group_id=ready.ray_placement_group_id
        )
        for _ in range(2):
            report = await cluster.controller.do("n1", remove_placement_group=remove)
            assert report.placement_group_removed.placement_group_id == "pg-1"
        assert await cluster.probe.ask("groups") == {}

    async def test_gv_14_a_task_that_is_not_ours_waits_for_what_we_booked(self, cluster: Cluster) -> None:
        create = agent_pb2.CreatePlacementGroup(
            placement_group_id="pg-14", attempt=1, timeout_ms=10_000, bundles=[cluster.bundle("n1", gpu_milli=2000)]
        )
        ready = (await cluster.controller.do("n0", create_placement_group=create)).placement_group_ready
        node = cluster.nodes["n1"].ray_node_id
        assert not await cluster.probe.ask("foreign task", ray_node=node, gpus=1, limit_s=1.0)
        remove = agent_pb2.RemovePlacementGroup(
            placement_group_id="pg-14", attempt=1, ray_placement_group_id=ready.ray_placement_group_id
        )
        await cluster.controller.do("n0", remove_placement_group=remove)
        assert await cluster.probe.ask("foreign task runs", limit_s=20.0)

    async def test_one_that_never_gets_ready_fails_and_leaves_nothing(self, cluster: Cluster) -> None:
        create = agent_pb2.CreatePlacementGroup(
            placement_group_id="pg-2",
            attempt=1,
            timeout_ms=700,
            bundles=[cluster.bundle("n1", gpu_milli=2000), cluster.bundle("n1", gpu_milli=1000)],
        )
        report = await cluster.controller.do("n0", create_placement_group=create)
        assert "not ready after 0.7 s" in report.placement_group_failed.message
        assert await cluster.probe.ask("groups") == {}

    async def test_one_that_is_removed_while_half_made_leaves_nothing(self, cluster: Cluster) -> None:
        create = agent_pb2.CreatePlacementGroup(
            placement_group_id="pg-3",
            attempt=4,
            timeout_ms=60_000,
            bundles=[cluster.bundle("n1", gpu_milli=1000)] * 3,
        )
        made = await cluster.controller.command("n0", create_placement_group=create)
        while not await cluster.probe.ask("groups"):
            pass
        remove = agent_pb2.RemovePlacementGroup(placement_group_id="pg-3", attempt=4)
        report = await cluster.controller.do("n0", remove_placement_group=remove)
        assert report.HasField("placement_group_removed")
        assert (await cluster.controller.report(made)).HasField("placement_group_failed")
        assert await cluster.probe.ask("groups") == {}

    async def test_removing_what_was_never_made_is_fine(self, cluster: Cluster) -> None:
        remove = agent_pb2.RemovePlacementGroup(placement_group_id="pg-9", attempt=1)
        report = await cluster.controller.do("n1", remove_placement_group=remove)
        assert report.HasField("placement_group_removed")

    async def test_ft_b1_what_workers_start_inside_their_groups_gets_their_own_devices(self, cluster: Cluster) -> None:
        async with cluster.group("pg-b1", ((1, 1000),)) as upper, cluster.group("pg-b1b", ((0, 1000),)) as lower:
            for job, group, device in (("upper", upper, 1), ("lower", lower, 0)):
                command = await cluster.start(
                    "Plain",
                    job=job,
                    devices=(str(device),),
                    in_bundle=True,
                    ray_placement_group_id=group,
                )
                assert await cluster.call(command, "told_to_a_task", 1) == [[[device], [str(device)], 1.0]]
                assert await cluster.call(command, "told_by_ray") == [[[device], [str(device)], 1.0]]
                await cluster.stop(command)

    async def test_ft_b1_bundles_in_another_order_than_their_devices_stay_apart(self, cluster: Cluster) -> None:
        async with cluster.group("pg-b1c", ((1, 1000),), ((0, 400),)) as group:
            command = start_worker("Plain", job="crossed", devices=("1",), in_bundle=True, ray_placement_group_id=group)
            assert command.allocation.bundle_index == 0
            assert (await cluster.controller.do("n1", start_worker=command)).HasField("worker_ready")
            assert await cluster.call(command, "told_to_a_task", 1) == [[[1], ["1"], 1.0]]
            # In Ray the bundles stand in the order of their devices.
            assert await cluster.told_in(group, bundle=0, gpus=0.4) == [[0], ["0"], 0.4]
            await cluster.stop(command)

    async def test_ft_b1_what_workers_of_a_gang_start_stays_in_their_own_bundles(self, cluster: Cluster) -> None:
        async with cluster.group("pg-b1d", ((0, 1000),), ((1, 1000),)) as group:
            gang = []
            for index in (0, 1):
                command = start_worker(
                    "Plain", job=f"own-{index}", devices=(str(index),), in_bundle=True, ray_placement_group_id=group
                )
                command.allocation.bundle_index = index
                assert (await cluster.controller.do("n1", start_worker=command)).HasField("worker_ready")
                gang.append(command)
            # The second one first: Ray by itself would give it the first bundle.
            for index in (1, 0):
                own = [[index], [str(index)], 1.0]
                assert await cluster.call(gang[index], "told_to_a_task", 1) == [own]
                assert await cluster.call(gang[index], "told_to_a_task", 1, "actor") == [own]
            # Who names a bundle gets that one.
            assert await cluster.call(gang[1], "told_to_a_task", 1, "first bundle") == [[[0], ["0"], 1.0]]
            for command in gang:
                await cluster.stop(command)

    async def test_ft_b2_shares_lie_in_ray_where_the_ledger_has_them(self, cluster: Cluster) -> None:
        async with AsyncExitStack() as groups:
            for number, (index, milli) in enumerate(((0, 300), (1, 300), (0, 700), (1, 700))):
                group = await groups.enter_async_context(cluster.group(f"pg-b2-{number}", ((index, milli),)))
                assert await cluster.told_in(group, gpus=milli / 1000) == [[index], [str(index)], milli / 1000]

    async def test_ft_b2_a_device_that_ray_gave_to_somebody_else_is_named(self, cluster: Cluster) -> None:
        bundle = cluster.bundle("n1", gpu_milli=1000)
        bundle.devices.add(index=0, milli=1000)
        create = agent_pb2.CreatePlacementGroup(
            placement_group_id="pg-b2f", attempt=0, timeout_ms=6_000, bundles=[bundle], certain_devices=True
        )
        report = agent_pb2.Report()
        async with cluster.foreign("n1"), AsyncExitStack() as given_back:

            async def remove() -> None:
                command = agent_pb2.RemovePlacementGroup(placement_group_id="pg-b2f", attempt=create.attempt)
                command.ray_placement_group_id = report.placement_group_ready.ray_placement_group_id
                await cluster.controller.do("n1", remove_placement_group=command)

            given_back.push_async_callback(remove)
            message = slow = "slow to tell"
            # Each time with twice the time; what the tests before held may not be free in Ray yet.
            while slow in message or "no room" in message:
                create.attempt += 1
                create.timeout_ms *= 2
                report = await cluster.controller.do("n1", create_placement_group=create)
                message = report.placement_group_failed.message
            assert "GPU 0 to something that callboard doesn't know of" in message, report
            # One that may have any device gets the other, and says so.
            create.attempt, create.timeout_ms, create.certain_devices = create.attempt + 1, 120_000, False
            report = await cluster.controller.do("n1", create_placement_group=create)
            assert [list(each.indexes) for each in report.placement_group_ready.devices] == [[1]], report
            await given_back.aclose()
            # The other device is there all the same.
            async with cluster.group("pg-b2g", ((1, 1000),)) as group:
                assert (await cluster.told_in(group))[0] == [1]
        # And this one, now that it was given back.
        async with cluster.group("pg-b2h", ((0, 1000),)) as lower:
            assert (await cluster.told_in(lower))[0] == [0]


class TestObjectStores:
    async def test_any_node_tells_how_full_those_of_all_nodes_are(self, cluster: Cluster) -> None:
        head, other = cluster.nodes["n0"].ray_node_id, cluster.nodes["n1"].ray_node_id
        await cluster.probe.ask("put", size=30 << 20)
        while (stores := await stores_seen(cluster))[head].used_bytes < 30 << 20:
            pass
        assert {node: store.total_bytes for node, store in stores.items()} == {head: 100 << 20, other: 100 << 20}
        assert stores[other].used_bytes == 0
        await cluster.probe.ask("forget")
        while (await stores_seen(cluster))[head].used_bytes:
            pass


class TestWorkers:
    async def test_gv_11_each_sees_exactly_its_devices_call_after_call(self, cluster: Cluster) -> None:
        with_gpu = await cluster.start("Plain", devices=("1",), env={"LEVEL": "9"})
        without = await cluster.start("Plain", rank=1)
        for command, expected in ((with_gpu, "1"), (without, "")):
            for environment in await cluster.call(command, "environment", times=3):
                assert environment["CUDA_VISIBLE_DEVICES"] == expected
                assert environment["RANK"] == str(command.worker.rank)
                assert environment["CALLBOARD_RUNTIME"] == "ray"
                assert "PS1" not in environment
                assert "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO" in environment, "Ray's own variables stay"
                assert "OLDPWD" not in environment
        for command in (with_gpu, without):
            assert (await cluster.stop(command)).outcome == agent_pb2.STOP_OUTCOME_KILLED

    async def test_ft_b3_ray_tells_a_worker_of_its_devices_what_it_tells_a_plain_actor(self, cluster: Cluster) -> None:
        async with cluster.group("pg-b3", ((1, 1000),)) as group:
            plain = await cluster.told_in(group)
            for job in ("told", "told-again"):  # A spare was there for one of them at the most.
                command = await cluster.start("Plain", job=job, devices=("1",))
                assert await cluster.call(command, "told_by_ray") == [plain] == [[[1], ["1"], 1.0]]
                await cluster.stop(command)
        without = await cluster.start("Plain", job="told-of-none")
        assert await cluster.call(without, "told_by_ray") == [[[], [], 0]]
        await cluster.stop(without)

    async def test_results_and_streams_go_over_ray_past_us(self, cluster: Cluster) -> None:
        command = await cluster.start("Plain", 1, "two", kwargs_json='{"three": 3}', job="streams")
        assert await cluster.call(command, "built_with") == [[[1, "two"], {"three": 3}, True]]
        actor = "cb/streams/main/0/g1"
        assert await cluster.probe.ask("stream", actor=actor, method="count", args=[20]) == list(range(20))
        await cluster.stop(command)

    async def test_pc_11_a_hanging_cancel_and_a_held_gil_end_by_the_timeout(self, cluster: Cluster) -> None:
        command = await cluster.start("Hanging", "gil", entry="run", devices=("1",), generation=2)
        end = await cluster.stop(command, cancel_timeout_ms=400, kill_timeout_ms=2000)
        assert end.outcome == agent_pb2.STOP_OUTCOME_KILLED
        assert end.detail == "cancel() took too long"
        assert end.took_ms >= 390
        # The device is free at once.
        again = await cluster.start("Plain", devices=("1",), generation=3)
        await cluster.stop(again)

    async def test_pc_12_the_hidden_child_goes_too(self, cluster: Cluster) -> None:
        file = cluster.folder / "child"
        command = await cluster.start("Stubborn", str(file), entry="run", generation=4)
        child = int(file.read_text())
        assert (await cluster.stop(command)).outcome == agent_pb2.STOP_OUTCOME_KILLED
        assert is_gone(child)

    async def test_a_cooperative_worker_leaves_its_checkpoint(self, cluster: Cluster) -> None:
        command = await cluster.start("Yielding", entry="run", generation=5)
        end = await cluster.stop(command, cancel_timeout_ms=5000, checkpoint=True)
        assert end.outcome == agent_pb2.STOP_OUTCOME_COOPERATIVE
        assert int(end.checkpoint.data) >= 0

    async def test_a_constructor_that_raises_gives_its_traceback(self, cluster: Cluster) -> None:
        report = await cluster.controller.do("n1", start_worker=start_worker("Broken", generation=6))
        assert "no weights here" in report.worker_start_failed.traceback

    async def test_ft_a3_a_worker_that_dies_alone_is_reported_with_its_signal_when_its_tree_is_gone(
        self, cluster: Cluster
    ) -> None:
        file = cluster.folder / "child2"
        command = start_worker("Stubborn", generation=7, args_json=json.dumps([str(file)]))
        report = await cluster.controller.do("n1", start_worker=command)
        os.kill(report.worker_ready.pid, signal.SIGKILL)
        dead = await cluster.exit_of(command)
        assert not dead.quarantined
        # Known though the raylet is its parent.
        assert "killed by signal 9 (SIGKILL); usually the out-of-memory killer" in dead.message
        assert is_gone(int(file.read_text()))

    async def test_one_in_an_environment_of_its_own_finds_what_is_built_there_and_ray_behind_it(
        self, cluster: Cluster, tmp_path: Path
    ) -> None:
        wheel(
            tmp_path / "wheels",
            "tool",
            "1.0",
            built_here="class Built:\n    def said(self): return __import__('sys').prefix",
        )
        (tmp_path / "r.txt").write_text("--no-index\n--find-links wheels\ntool\n")
        file = BytesIO()
        name = pack_requirements(tmp_path / "r.txt", file, "env.requirements")
        cluster.controller.packages[name] = file.getvalue()
        command = start_worker("", job="built", environment=f"requirements:{name}", start_timeout_ms=60_000)
        command.actor = "built_here:Built"
        report = await cluster.controller.do("n1", start_worker=command)
        assert report.worker_ready.cold_reason == "it has a Python environment of its own", report
        (prefix,) = await cluster.call(command, "said")
        assert str(prefix).startswith(f"{cluster.folder}/n1/environments/")
        await cluster.stop(command)

    @pytest.mark.timeout(300)  # it makes its image
    async def test_one_in_a_container_is_called_through_ray_and_leaves_its_checkpoint(
        self, cluster: Cluster, tmp_path: Path
    ) -> None:
        podman = cluster.folder / "podman"
        why = await asyncio.to_thread(images.why_unusable, podman, images.settings(podman, images.PACKAGES))
        if why:
            stand_in(cluster.folder / "bin", tmp_path / "log")
        start = actor(cluster.controller, "Actor", images.PYTHON, job="image", devices=("1",), start_timeout_ms=60_000)
        start.entry = ""
        report = await cluster.controller.do("n1", start_worker=start)
        assert report.worker_ready.cold_reason == "it runs in a container", report
        pid = report.worker_ready.pid
        assert await cluster.call(start, "seen") == [["yes", pid, [1]]]
        end = await cluster.stop(start, cancel_timeout_ms=8000, checkpoint=True)
        assert end.checkpoint.data == b"step 7", end
        assert is_gone(pid)

    @pytest.mark.parametrize("interpreter", ["", sys.executable])
    async def test_ft_b4_one_that_takes_one_call_at_a_time_lives_on_the_main_thread(
        self, cluster: Cluster, interpreter: str
    ) -> None:
        # One that names its interpreter gets no spare.
        job = "main-cold" if interpreter else "main"
        command = start_worker("OnMain", job=job, interpreter=interpreter)
        ready = (await cluster.controller.do("n1", start_worker=command)).worker_ready
        assert bool(ready.cold_reason) >= bool(interpreter)
        assert [await cluster.call(command, "thread") for _ in range(2)] == [[[True, 1]], [[True, 2]]]
        # As it would end a plain process: Ray's own handler would raise SystemExit in code of the user.
        os.kill(ready.pid, signal.SIGTERM)
        dead = await cluster.exit_of(command)
        assert "killed by signal 15 (SIGTERM)" in dead.message

    async def test_a_spare_that_imported_modules_is_taken_with_its_devices_and_main_thread(
        self, cluster: Cluster
    ) -> None:
        session = cluster.controller.sessions["n1"]
        preloads = [agent_pb2.Preload(modules=["wave"])]
        await session.send(spare_target=agent_pb2.SpareTarget(count=1, preloads=preloads))
        await cluster.controller.until(
            lambda: any(state.ready for beat in session.heartbeats for state in beat.preloads.states)
        )
        command = start_worker("OnMain", job="preloaded", devices=("1",), preload=["wave"])
        ready = (await cluster.controller.do("n1", start_worker=command)).worker_ready
        assert (ready.preloaded, ready.warm, ready.visible_devices) == (True, True, "1"), ready.preload_missed
        on_main = await cluster.probe.ask("call", actor=ready.actor_name, method="thread", args=[], times=1)
        assert on_main == [[True, 1]]
        assert (await cluster.stop(command)).outcome == agent_pb2.STOP_OUTCOME_KILLED
        await session.send(spare_target=agent_pb2.SpareTarget(count=0))

    async def test_ft_e4_a_workers_own_process_gets_the_signal_that_it_handles(self, cluster: Cluster) -> None:
        file = cluster.folder / "saved"
        command = start_worker("SavesItself", job="saves", args_json=json.dumps([str(file), "SIGTERM"]), entry="run")
        command.stop_signal = "SIGTERM"
        assert (await cluster.controller.do("n1", start_worker=command)).HasField("worker_ready")
        end = await cluster.stop(command, cancel_timeout_ms=60_000)
        assert (file.read_text(), end.outcome) == ("saved", agent_pb2.STOP_OUTCOME_COOPERATIVE)

    async def test_ft_b4_what_two_workers_put_into_ray_from_their_main_threads_stays_apart(
        self, cluster: Cluster
    ) -> None:
        commands = [await cluster.start("OnMain", job="putters", rank=rank) for rank in range(2)]
        put = [each for command in commands for ids in await cluster.call(command, "put", 3, times=2) for each in ids]
        assert len(set(put)) == len(put) == 24
        # FT-A6: Ray doesn't warn of a `ray.get` that holds up nothing.
        printed = [file.read_text() for file in (cluster.folder / "n1" / "output").rglob("std*") if file.is_file()]
        assert printed
        assert not any("blocking" in text for text in printed)
        for command in commands:
            await cluster.stop(command)

    @pytest.mark.parametrize("delay_ms", [0, 20, 400, 700])
    async def test_pc_13_a_stop_right_after_the_start(self, cluster: Cluster, delay_ms: int) -> None:
        command = start_worker("SlowToBuild", generation=10 + delay_ms, devices=("1",))
        start = await cluster.controller.command("n1", start_worker=command)
        await asyncio.sleep(delay_ms / 1000)  # The delays are the scenario's input.
        end = await cluster.stop(command)
        assert end.outcome == agent_pb2.STOP_OUTCOME_KILLED
        failed = (await cluster.controller.report(start)).worker_start_failed
        assert failed.failure == agent_pb2.START_FAILURE_STOPPED

    async def test_inside_a_bundle_it_can_be_hosted_too(self, cluster: Cluster) -> None:
        create = agent_pb2.CreatePlacementGroup(
            placement_group_id="pg-5", attempt=1, timeout_ms=10_000, bundles=[cluster.bundle("n1", cpu_milli=1000)]
        )
        group = (await cluster.controller.do("n1", create_placement_group=create)).placement_group_ready
        command = await cluster.start(
            "Plain", generation=1000, in_bundle=True, ray_placement_group_id=group.ray_placement_group_id
        )
        assert await cluster.call(command, "echo", 7) == [7]
        await cluster.stop(command)
        remove = agent_pb2.RemovePlacementGroup(
            placement_group_id="pg-5", attempt=1, ray_placement_group_id=group.ray_placement_group_id
        )
        await cluster.controller.do("n1", remove_placement_group=remove)

    async def test_pg_14_a_helper_that_asks_nothing_runs_where_its_bundle_is(self, cluster: Cluster) -> None:
        create = agent_pb2.CreatePlacementGroup(
            placement_group_id="pg-14b", attempt=1, timeout_ms=10_000, bundles=[cluster.bundle("n1", gpu_milli=1000)]
        )
        # The head has more room, and made the group.
        group = (await cluster.controller.do("n0", create_placement_group=create)).placement_group_ready
        helper = start_worker(
            "Plain", generation=1100, in_bundle=True, ray_placement_group_id=group.ray_placement_group_id
        )
        helper.allocation.Clear()
        ready = (await cluster.controller.do("n1", start_worker=helper)).worker_ready
        assert ready.pid in started_by(cluster.folder / "n1")
        assert ready.pid not in started_by(cluster.folder / "n0")
        await cluster.stop(helper)
        remove = agent_pb2.RemovePlacementGroup(
            placement_group_id="pg-14b", attempt=1, ray_placement_group_id=group.ray_placement_group_id
        )
        await cluster.controller.do("n0", remove_placement_group=remove)

    async def test_ray_forgets_every_worker_that_is_gone(self, cluster: Cluster) -> None:
        while await cluster.probe.ask("actors"):
            pass
        table = started_by(cluster.folder / "n1")
        assert all("WorkerHost" not in (Path("/proc") / str(pid) / "cmdline").read_text() for pid in table)


class TestTrouble:
    async def test_a_driver_that_dies_is_replaced_and_nothing_is_lost(self, cluster: Cluster) -> None:
        command = await cluster.start("Yielding", entry="run", generation=2000)
        os.kill(cluster.recorded("n1", "driver"), signal.SIGKILL)
        end = await cluster.stop(command, cancel_timeout_ms=8000, checkpoint=True)
        assert end.outcome == agent_pb2.STOP_OUTCOME_COOPERATIVE, end.detail

    async def test_a_stuck_driver_does_not_hold_up_a_kill(self, cluster: Cluster) -> None:
        command = await cluster.start("Busy", "gil", entry="run", generation=2001)
        driver = cluster.recorded("n1", "driver")
        os.kill(driver, signal.SIGSTOP)
        end = await cluster.stop(command, cancel_timeout_ms=500, kill_timeout_ms=1000)
        assert end.outcome == agent_pb2.STOP_OUTCOME_KILLED
        os.kill(driver, signal.SIGKILL)

    async def test_a_kill_follows_its_launch_and_no_host_is_made_beside_one_that_lives(
        self, cluster: Cluster, tmp_path: Path
    ) -> None:
        head, node = cluster.nodes["n0"], cluster.nodes["n1"]
        token = str(cluster.folder / "n0" / "ray-token")
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token}
        driver = await start_driver(RunDir(tmp_path), environment)
        await driver.ask("connect", {"address": head.gcs_address, "node_ip": node.node_ip})
        name = {"actor_name": "cb/j/plain/0/g2002"}
        how = {"node_id": node.ray_node_id, "interpreter": "", "early": {}, "placement_group_id": "", "bundle_index": 0}
        killed = asyncio.ensure_future(driver.ask("kill", {**name, "launching": True}))
        await driver.ask("ping")
        with suppress(RemoteError):  # that it died, unless it was up before
            await driver.ask("launch", {**name, **how, "again": False})
        assert await killed, "it came first, and found what was launched"
        name = {"actor_name": "cb/j/plain/0/g2003"}
        first = await driver.ask("launch", {**name, **how, "again": False})
        os.kill(first["pid"], signal.SIGSTOP)
        assert await driver.ask("kill", {**name, "launching": False})
        second = await driver.ask("launch", {**name, **how, "again": True})
        assert second["pid"] == first["pid"] or is_gone(first["pid"])
        await driver.ask("kill", {**name, "launching": False})
        with suppress(ProcessLookupError):
            os.kill(first["pid"], signal.SIGKILL)
        await until_gone(first["pid"])
        await until_gone(second["pid"])
        os.kill(driver.process.pid, signal.SIGKILL)
        driver.close()
        driver.reap()

    async def test_a_raylet_that_dies_takes_its_workers_and_comes_back(self, cluster: Cluster) -> None:
        command = start_worker("Busy", generation=3000, entry="run", args_json='["sleep"]')
        worker = (await cluster.controller.do("n1", start_worker=command)).worker_ready.pid
        ray = cluster.recorded("n1", "ray")
        (raylet,) = [
            pid
            for pid in started_by(cluster.folder / "n1")
            if (entry := read_entry(pid)) is not None
            and entry.parent == ray
            and (Path("/proc") / str(pid) / "comm").read_text() == "raylet\n"
        ]
        os.kill(raylet, signal.SIGKILL)
        exited = await cluster.controller.said("ray_node_exited")
        assert not exited.head
        dead = await cluster.exit_of(command)
        assert "the Ray node ended" in dead.message
        assert is_gone(worker)
        old = cluster.nodes["n1"].ray_node_id
        cluster.nodes["n1"] = await joined(cluster.controller, "n1", after=old)
        command = await cluster.start("Plain", generation=3001)
        await cluster.stop(command)

    async def test_r5_a_strict_worker_ends_itself_while_its_agent_is_stopped(self, cluster: Cluster) -> None:
        cluster.controller.welcome["lease_ms"] = 2_000
        agent = cluster.agents["n1"]
        sessions = len([each for each in cluster.controller.opened if each.hello.node_id == "n1"])
        agent.kill()
        await agent.wait()
        agent = cluster.agents["n1"] = await run_node(cluster.controller, cluster.folder, "n1")
        await cluster.controller.session("n1", sessions + 1)
        child_file = cluster.folder / "fenced-child"
        hiding = start_worker("Stubborn", generation=3500, strict=True, args_json=json.dumps([str(child_file)]))
        busy = start_worker("Busy", generation=3501, rank=1, strict=True, entry="run", args_json='["gil"]')
        relaxed = start_worker("Plain", generation=3502, rank=2)
        pids = [
            (await cluster.controller.do("n1", start_worker=each)).worker_ready.pid for each in (hiding, busy, relaxed)
        ]
        child = int(child_file.read_text())
        agent.send_signal(signal.SIGSTOP)
        for pid in (*pids[:2], child):
            await until_gone(pid)
        assert not is_gone(pids[2]), "a relaxed worker runs on"
        agent.send_signal(signal.SIGCONT)

        def told() -> list[agent_pb2.WorkerStopped]:
            stopped = [each.worker_stopped for each in cluster.controller.reports if each.HasField("worker_stopped")]
            return [each for each in stopped if each.generation in (3500, 3501)]

        await cluster.controller.until(lambda: len(told()) == 2)
        assert all("the lease ended" in each.detail for each in told())
        await cluster.stop(relaxed)
        # The node goes on, with its Ray node.
        cluster.controller.welcome["lease_ms"] = 15_000
        command = await cluster.start("Plain", generation=3503)
        assert await cluster.call(command, "echo", 7) == [7]
        await cluster.stop(command)

    async def test_r4_the_next_agent_of_a_node_goes_on_with_its_raylet_and_its_workers(self, cluster: Cluster) -> None:
        command = await cluster.start("Busy", "gil", entry="run", generation=4000)
        raylet = cluster.recorded("n1", "ray")
        sessions = len([each for each in cluster.controller.opened if each.hello.node_id == "n1"])
        cluster.agents["n1"].kill()
        await cluster.agents["n1"].wait()
        cluster.agents["n1"] = await run_node(cluster.controller, cluster.folder, "n1")
        session = await cluster.controller.session("n1", sessions + 1)
        assert [each.generation for each in session.hello.workers] == [4000]
        assert session.hello.ray == cluster.nodes["n1"], "a Hello without it would void its placement groups"
        assert cluster.recorded("n1", "ray") == raylet
        end = await cluster.stop(command)
        assert end.outcome == agent_pb2.STOP_OUTCOME_KILLED
        command = await cluster.start("Plain", generation=4001)
        assert await cluster.call(command, "echo", 7) == [7]
        await cluster.stop(command)
