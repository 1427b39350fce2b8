"""The program: where it listens, how it starts, and that it ends in time and leaves nothing behind (R9)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from callboard.client.client import Client
from callboard.controller.journal.state_dir import StoreFailed
from callboard.controller.options import ControllerOptions
from callboard.controller.server import Controller, PortTaken
from callboard.model.options import OptionError
from callboard.security.dialing import open_channel
from callboard.v1 import event_pb2, pool_pb2, scheduler_pb2
from callboard.wire.errors import parse_error
from callboard.wire.refusals import ErrorReason
from tests.controller.support import Api, api_at, options_for, pool, running
from tests.support.controller_process import ControllerProcess
from tests.support.fake_agent import FakeAgent


class TestOptions:
    @pytest.mark.parametrize("listen", ["0.0.0.0:7700", "10.0.0.1:7700", "[::]:7700", "example.org:7700"])
    def test_se_01_others_may_reach_it_only_if_that_is_said(self, listen: str, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match=r"--insecure"):
            ControllerOptions(listen=listen, state_dir=tmp_path)
        ControllerOptions(listen=listen, state_dir=tmp_path, insecure=True)

    @pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.9.9.9:7700", "localhost:7700", "[::1]:7700"])
    def test_this_machine_may(self, listen: str, tmp_path: Path) -> None:
        ControllerOptions(listen=listen, state_dir=tmp_path)

    @pytest.mark.parametrize(
        "listen", ["", "7700", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000", "::1:7"]
    )
    def test_what_is_no_address_is_refused(self, listen: str, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match="write host:port"):
            ControllerOptions(listen=listen, state_dir=tmp_path)

    @pytest.mark.parametrize(
        "fields", [{"lease_ms": 0}, {"heartbeat_ms": 10_000}, {"orphan_grace_ms": -1}, {"progress_ms": 0}]
    )
    def test_times_that_make_no_sense_are_refused(self, fields: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(OptionError):
            ControllerOptions(state_dir=tmp_path, **fields)


class TestStart:
    async def test_se_01_an_insecure_start_says_so(self, tmp_path: Path) -> None:
        async with ControllerProcess(tmp_path, "--insecure", listen="0.0.0.0:0") as process:
            warning = next(line for line in process.lines if line["event"].startswith("INSECURE"))
            assert warning["level"] == "warning"

    @pytest.mark.parametrize("holder", ["a plain socket", "another controller"])
    async def test_nj_04_a_port_in_use_is_named(self, tmp_path: Path, holder: str) -> None:
        if holder == "a plain socket":
            listening = socket.create_server(("127.0.0.1", 0))
            address = f"127.0.0.1:{listening.getsockname()[1]}"
            with listening, pytest.raises(PortTaken, match=address):
                await Controller(options_for(tmp_path, listen=address)).start()
        else:
            async with running(options_for(tmp_path / "first")) as first:
                second = Controller(options_for(tmp_path / "second", listen=first.address))
                with pytest.raises(PortTaken, match=first.address):
                    await second.start()
                async with api_at(first.address) as api:
                    await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())

    async def test_nj_04_the_program_exits_with_1(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            address = f"127.0.0.1:{listening.getsockname()[1]}"
            process = ControllerProcess(tmp_path, listen=address)
            await process.spawn()
            assert await process.ended() == 1
            assert any(address in line for line in process.other)

    async def test_two_controllers_never_share_a_state(self, controller: Controller) -> None:
        second = Controller(ControllerOptions(listen="127.0.0.1:0", state_dir=controller.options.state_dir))
        with pytest.raises(StoreFailed, match=f"held by another controller .pid {os.getpid()}"):
            await second.start()

    async def test_a_state_that_cant_be_used_ends_the_program_with_words(self, tmp_path: Path) -> None:
        (tmp_path / "journal.sqlite").write_text("no database" * 1000)
        process = ControllerProcess(tmp_path)
        await process.spawn()
        assert await process.ended() == 1
        assert any("damaged" in line and "backup" in line for line in process.other)

    async def test_it_can_be_found(self, tmp_path: Path) -> None:
        options = options_for(tmp_path, run_dir=tmp_path / "run")
        async with running(options) as controller:
            record = json.loads((tmp_path / "run" / "controller.json").read_text())
            assert record == {
                "address": controller.address,
                "pid": os.getpid(),
                "started_ms": controller.driver.started_ms,
                "term": 1,
            }
        assert not (tmp_path / "run" / "controller.json").exists()

    async def test_every_file_is_private(self, controller: Controller) -> None:
        directory = controller.options.state_dir
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for path in directory.iterdir():
            if path.name != "controller.json":
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


class TestHealthAndReflection:
    async def test_it_says_that_it_serves(self, controller: Controller, api: Api) -> None:
        stub: Any = health_pb2_grpc.HealthStub(api.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        async for response in watch:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                break
        watch.cancel()

    async def test_its_services_can_be_listed(self, api: Api) -> None:
        channel: Any = api.channel
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        messages: Any = reflection_pb2
        request = messages.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        response = await call.read()
        names = {service.name for service in response.list_services_response.service}
        assert {
            "callboard.v1.AgentService",
            "callboard.v1.JobService",
            "callboard.v1.PoolService",
            "callboard.v1.NodeService",
            "callboard.v1.PlacementGroupService",
            "callboard.v1.SchedulerService",
            "callboard.v1.EventService",
            "grpc.health.v1.Health",
        } <= names
        call.cancel()


class TestTheEnd:
    async def test_gc_02_watches_and_sessions_hold_nothing_up(self, tmp_path: Path) -> None:
        """Its grace is longer than a test may take, so it did not wait for them."""
        async with (
            ControllerProcess(tmp_path, "--stop-grace-ms", "300000") as process,
            api_at(process.address) as api,
            FakeAgent(process.address) as agent,
        ):
            watches = [api.events.Watch(event_pb2.WatchRequest()) for _ in range(5)]
            for watch in watches:
                await watch.read()
            for watch in watches[:3]:
                watch.cancel()
            process.signal(signal.SIGTERM)
            for watch in watches[3:]:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await watch.read()
                assert parse_error(caught.value).reason is ErrorReason.STOPPING
            assert await agent.over() is grpc.StatusCode.UNAVAILABLE
            assert await process.ended() == 0

    async def test_the_port_is_free_and_the_state_released_at_once(self, tmp_path: Path) -> None:
        async with running(options_for(tmp_path)) as first:
            address = first.address
        async with running(options_for(tmp_path, listen=address)) as second:
            assert second.driver.state.meta.term == 2

    async def test_a_second_signal_hurries(self, tmp_path: Path) -> None:
        # A grace nobody would wait for: only the second signal can end it in time.
        async with (
            ControllerProcess(tmp_path, "--stop-grace-ms", "600000") as process,
            open_channel(process.address) as channel,
        ):
            stub: Any = health_pb2_grpc.HealthStub(channel)
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
            process.signal(signal.SIGINT)
            await process.said("stopping")
            process.signal(signal.SIGINT)
            assert await process.ended() == 0

    async def test_it_ends_with_the_program_that_started_it(self, tmp_path: Path) -> None:
        program = (
            "import subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-m', 'callboard.controller', '--listen', '127.0.0.1:0',\n"
            f"    '--state-dir', {str(tmp_path)!r}, '--exit-with-parent', '--log-format', 'json'],\n"
            "    stderr=subprocess.PIPE, text=True)\n"
            "for line in child.stderr:\n"
            "    if 'listening' in line:\n"
            "        print(child.pid, flush=True)\n"
            "        sys.stdin.read()\n"
        )
        parent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert parent.stdout is not None
        child = os.pidfd_open(int(await parent.stdout.readline()))
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(child, ended.set)
        parent.kill()
        await parent.wait()
        await ended.wait()
        loop.remove_reader(child)
        os.close(child)


class TestChannels:
    async def test_gc_05_pings_on_a_quiet_stream_are_no_attack(self, tmp_path: Path) -> None:
        async with running(options_for(tmp_path, progress_ms=60_000)) as controller:
            options = (
                ("grpc.keepalive_time_ms", 600),
                ("grpc.keepalive_timeout_ms", 1000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.enable_http_proxy", 0),
            )
            async with open_channel(controller.address, options=options) as channel:
                from callboard.v1 import event_pb2_grpc, pool_pb2_grpc

                watch = event_pb2_grpc.EventServiceStub(channel).Watch(event_pb2.WatchRequest())
                await watch.read()
                reading: Any = asyncio.ensure_future(watch.read())
                done, _ = await asyncio.wait({reading}, timeout=4)  # a server with defaults cuts it off before
                assert not done
                await pool_pb2_grpc.PoolServiceStub(channel).CreatePool(pool())
                woken: event_pb2.WatchResponse = await reading
                assert woken.events[0].type == "pool.created"
                watch.cancel()

    async def test_gc_10_proxy_variables_are_for_the_web(
        self, controller: Controller, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "grpc_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.delenv("no_proxy", raising=False)
        async with Client(controller.address, timeout=5) as client:
            assert (await client.stats()).term == 1
        async with FakeAgent(controller.address) as agent:
            await agent.heartbeat()

    async def test_gc_09_thousands_of_objects_are_read_page_by_page(self, controller: Controller, api: Api) -> None:
        for number in range(0, 1200, 100):
            await asyncio.gather(*[api.pools.CreatePool(pool(f"p{number + place}")) for place in range(100)])
        found = 0
        token = ""
        while True:
            page = await api.pools.ListPools(pool_pb2.ListPoolsRequest(page_size=1000, page_token=token))
            found += len(page.pools)
            assert page.ByteSize() < 4 << 20
            token = page.next_page_token
            if not token:
                break
        assert found == 1200
