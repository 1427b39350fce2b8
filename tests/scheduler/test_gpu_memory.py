"""Is memory of GPUs given out per device, shared, charged, refused and explained? And which GPU, where they differ?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest

from callboard.model.quantities import Number, Resources
from callboard.model.specs import NO_PG_POOL, ComponentSpec, JobSpec, PgPoolSpec, WorkerPlace
from callboard.scheduler import Refusal
from callboard.scheduler.handlers.orders import must_have_its_devices
from callboard.scheduler.records.node_record import DeviceInfo
from callboard.scheduler.records.states import JobState
from tests.scheduler.world import World, pool_spec

GIB = 1 << 30


def cards(*sizes: int, model: str = "NVIDIA H200") -> tuple[DeviceInfo, ...]:
    return tuple(DeviceInfo(id=str(i), model=model, memory_bytes=size * GIB) for i, size in enumerate(sizes))


def world_of(*nodes: Sequence[int], pool: PgPoolSpec = NO_PG_POOL, **quota: Number) -> World:
    """Nodes with GPUs of so many GiB, and a pool that may have all of it."""
    world = World()
    for n, sizes in enumerate(nodes):
        amounts: dict[str, Number] = {"cpu": 64, "memory": "64GiB", "gpu": len(sizes)}
        if any(sizes):
            amounts["gpu_memory"] = f"{sum(sizes)}GiB"
        world.join(f"n{n}", amounts, devices=cards(*sizes))
    world.pool(pool_spec("p", pg_pool=pool, **quota))
    return world


def asking(name: str, gpu: float, memory: str, workers: int = 1, **fields: object) -> JobSpec:
    component = ComponentSpec(
        name="w",
        actor="m:A",
        min_workers=workers,
        max_workers=workers,
        resources=Resources.parse({"gpu": gpu, "gpu_memory": memory} if memory else {"gpu": gpu}),
    )
    return JobSpec(name=name, pool="p", components=(component,), **fields)  # type: ignore[arg-type]


def explained(world: World, name: str) -> str:
    return " | ".join(reason.message for reason in world.explain(name).reasons)


class TestSharing:
    def test_several_workers_share_a_card_by_memory_until_none_is_left(self) -> None:
        world = world_of([140])
        for name in ("a", "b", "c"):
            world.submit(asking(name, 0.1, "40GiB"))
            assert world.devices(name) == ["n0:0"]
        world.submit(asking("d", 0.1, "40GiB"))
        assert world.status("d") is JobState.PENDING, "0.7 of the GPU is free, but only 20 GiB of its memory"
        assert "n0 lacks 20GiB gpu_memory" in explained(world, "d")
        assert "GPU 0 (NVIDIA H200) has 20GiB of 140GiB and 0.7 of the GPU free" in explained(world, "d")
        world.submit(asking("e", 0.1, "20GiB"))
        assert world.devices("e") == ["n0:0"]
        world.cancel("a")
        assert world.devices("d") == ["n0:0"]

    def test_a_part_never_straddles_two_cards(self) -> None:
        world = world_of([30, 30])
        world.submit(asking("a", 0.5, "20GiB"))
        world.submit(asking("b", 0.5, "20GiB"))
        assert world.devices("a") != world.devices("b")
        world.submit(asking("c", 0.5, "20GiB"))
        assert world.status("c") is JobState.PENDING, "20 GiB are free, 10 on each"

    def test_whole_cards_have_an_equal_part_each(self) -> None:
        world = world_of([40, 80, 80])
        world.submit(asking("a", 2, "160GiB"))
        assert world.devices("a") == ["n0:1,2"]

    def test_the_smallest_card_that_is_large_enough_is_taken(self) -> None:
        world = world_of([80, 24, 40])
        world.submit(asking("a", 1, "30GiB"))
        assert world.devices("a") == ["n0:2"]

    def test_who_states_none_is_charged_none_and_keeps_nobody_out(self) -> None:
        world = world_of([40])
        world.submit(asking("a", 0.5, "40GiB"))
        world.submit(asking("b", 0.5, ""))
        assert world.devices("b") == ["n0:0"]


class TestTheAccount:
    def test_what_is_used_and_free_adds_up_and_a_full_card_has_nothing_free(self) -> None:
        world = world_of([140, 140])
        world.submit(asking("a", 0.5, "40GiB"))
        use = world.state.node_use("n0")
        assert (use.used.gpu_memory_bytes, use.free.gpu_memory_bytes) == (40 * GIB, 240 * GIB)
        world.submit(asking("b", 0.5, ""))
        use = world.state.node_use("n0")
        assert use.free.gpu_memory_bytes == 140 * GIB, "nobody can get at the other 100 GiB of the first card"
        assert use.used + use.held + use.free + use.quarantined == world.state.nodes["n0"].capacity

    def test_a_pool_may_limit_it(self) -> None:
        world = world_of([140, 140], gpu_memory="100GiB")
        world.submit(asking("a", 0.5, "60GiB"))
        world.submit(asking("b", 0.5, "60GiB"))
        assert world.status("b") is JobState.PENDING
        assert "60GiB of 100GiB gpu_memory used, asks 60GiB" in explained(world, "b")

    def test_a_kept_group_takes_whom_it_has_enough_for(self) -> None:
        shape = Resources.parse({"gpu": 0.5, "gpu_memory": "40GiB"})
        world = world_of([140], pool=PgPoolSpec(reserved=(shape,), dynamic=False, reserved_min_priority_milli=0))
        world.submit(asking("a", 0.5, "60GiB", wait_for_nodes_ms=10**7))
        assert world.status("a") is JobState.PENDING
        world.submit(asking("b", 0.5, "40GiB"))
        assert world.devices("b") == ["n0:0"]

    def test_ray_may_not_give_other_cards_where_they_differ(self) -> None:
        world = world_of([80, 24])
        world.submit(asking("a", 1, "60GiB"))
        (group,) = world.state.groups.values()
        assert must_have_its_devices(world.state, group)

    def test_preemption_frees_memory_too(self) -> None:
        world = world_of([140])
        world.submit(asking("low", 0.2, "100GiB", priority_milli=1000))
        world.submit(asking("high", 0.2, "100GiB", priority_milli=9000))
        assert world.devices("high") == ["n0:0"]
        assert world.status("low") is JobState.PENDING


class TestRefusals:
    def refusal(self, world: World, spec: JobSpec) -> tuple[str, tuple[str, ...]]:
        """Why it is refused at once; and what would help, as one that waits for nodes is told."""
        with pytest.raises(Refusal) as raised:
            world.submit(spec)
        world.submit(replace(spec, name=f"{spec.name}-waits", wait_for_nodes_ms=10**7))
        assert world.status(f"{spec.name}-waits") is JobState.PENDING
        return str(raised.value), world.explain(f"{spec.name}-waits").unblock

    def test_more_than_any_card_has_is_refused_with_what_there_is(self) -> None:
        text, unblock = self.refusal(world_of([140], [80]), asking("a", 1, "200GiB"))
        assert "GPU 0 (NVIDIA H200) has 140GiB" in text
        assert unblock == ("ask for at most 140GiB of gpu_memory on each GPU, or add a node whose GPUs have 200GiB",)

    def test_a_node_that_does_not_report_is_named(self) -> None:
        text, unblock = self.refusal(world_of([0, 0]), asking("a", 1, "10GiB"))
        assert "n0 does not report how much memory its GPUs have (10GiB asked)" in text
        assert unblock == ("leave gpu_memory out, or add a node whose GPUs report 10GiB",)

    def test_memory_of_no_gpu_is_refused(self) -> None:
        text, unblock = self.refusal(world_of([140]), asking("a", 0, "10GiB"))
        assert "asks 10GiB gpu_memory and no GPU" in text
        assert unblock == ("state gpu beside gpu_memory: `gpu: 0.5` for a part of one, `gpu: 1` for a whole one",)

    def test_many_workers_that_can_never_fit_are_refused_by_counting(self) -> None:
        text, _ = self.refusal(world_of([140], [140]), asking("a", 0.1, "60GiB", workers=5))
        assert "room for 4 of 5 workers" in text

    def test_what_is_short_now_is_named_as_the_smallest_change(self) -> None:
        world = world_of([140])
        world.submit(asking("a", 0.1, "120GiB"))
        world.submit(asking("b", 0.1, "60GiB"))
        assert world.explain("b").unblock == ("40GiB more gpu_memory on n0",)


H200, A100, A100_40 = ("NVIDIA H200", 141), ("NVIDIA A100-SXM4-80GB", 80), ("NVIDIA A100-SXM4-40GB", 40)


def mixed(*nodes: Sequence[tuple[str, int]], pool: PgPoolSpec = NO_PG_POOL) -> World:
    """Nodes with GPUs of these models and GiB."""
    world = World()
    for n, models in enumerate(nodes):
        devices = tuple(
            DeviceInfo(str(i), model=model, memory_bytes=gib * GIB) for i, (model, gib) in enumerate(models)
        )
        memory = sum(device.memory_bytes for device in devices)
        world.join(f"n{n}", {"cpu": 64, "memory": "64GiB", "gpu": len(models), "gpu_memory": memory}, devices=devices)
    world.pool(pool_spec("p", pg_pool=pool))
    return world


def choosing(name: str, gpu: float = 1, model: str = "", least: int = 0, **fields: object) -> JobSpec:
    spec = asking(name, gpu, "", **fields)  # type: ignore[arg-type]
    (component,) = spec.components
    asked = replace(component.resources, gpu_model=model, gpu_memory_min_bytes=least * GIB)
    return replace(spec, components=(replace(component, resources=asked),))


class TestWhichGpu:
    @pytest.mark.parametrize(
        ("model", "least", "devices"),
        [
            ("H200", 0, ["n0:1"]),
            ("nvidia h200", 0, ["n0:1"]),
            ("A100", 0, ["n1:0"]),
            ("A100 40GB", 0, ["n0:0"]),
            ("A100 80GB", 0, ["n1:0"]),
            ("A100-SXM4-80GB", 0, ["n1:0"]),
            ("", 100, ["n0:1"]),
            ("A100", 60, ["n1:0"]),
        ],
    )
    def test_a_gpu_of_that_model_or_size_is_found_on_nodes_that_have_several(
        self, model: str, least: int, devices: list[str]
    ) -> None:
        world = mixed([A100_40, H200], [A100])
        world.submit(choosing("a", model=model, least=least))
        assert world.devices("a") == devices

    def test_a_word_of_a_model_is_a_whole_word(self) -> None:
        with pytest.raises(Refusal, match="only A10 will do"):
            mixed([A100]).submit(choosing("a", model="A10"))

    def test_a_share_of_one_is_taken_where_others_are_and_a_gang_gets_only_such(self) -> None:
        world = mixed([H200, A100, H200], [H200])
        world.submit(choosing("a", 0.5, "H200"))
        world.submit(choosing("b", 0.5, "H200"))
        world.submit(choosing("c", 1, "H200", workers=2))
        assert world.devices("a") == world.devices("b")
        assert not {"n0:1"} & {*world.devices("a"), *world.devices("c")}

    def test_all_gpus_of_a_worker_are_such(self) -> None:
        world = mixed([H200, A100, H200])
        world.submit(choosing("a", 2, "H200"))
        assert world.devices("a") == ["n0:0,2"]
        with pytest.raises(Refusal, match="only H200 will do; its GPUs: 2 × NVIDIA H200 with 141GiB and 1 × NVIDIA"):
            world.submit(choosing("b", 3, "H200"))

    def test_who_takes_any_leaves_what_another_of_its_job_must_have(self) -> None:
        world = mixed([H200, A100])
        any_one = ComponentSpec(name="any", actor="m:A", resources=Resources(gpu_milli=1000))
        certain = replace(any_one, name="certain", resources=Resources(gpu_milli=1000, gpu_model="H200"))
        world.submit(JobSpec(name="a", pool="p", components=(any_one, certain)))
        assert world.devices("a") == ["n0:1", "n0:0"], "of `any`, then of `certain`"

    def test_what_is_taken_is_waited_for_and_said(self) -> None:
        world = mixed([H200, A100])
        world.submit(choosing("a", model="H200"))
        world.submit(choosing("b", model="H200"))
        assert world.status("b") is JobState.PENDING
        assert "n0 lacks 1 GPU (only H200 will do" in explained(world, "b")
        assert world.explain("b").unblock == ("1 more GPU on n0",)
        world.cancel("a")
        assert world.devices("b") == ["n0:0"]

    def test_a_preemptor_takes_it_from_who_has_it(self) -> None:
        world = mixed([A100, H200])
        world.submit(choosing("on-a100", model="A100", priority_milli=1000))
        world.submit(choosing("on-h200", priority_milli=1000))
        world.submit(choosing("boss", least=100, priority_milli=9000))
        assert world.devices("boss") == ["n0:1"]
        assert world.preempted() == [("on-h200", "boss")]

    def test_what_no_node_has_is_refused_with_what_there_is(self) -> None:
        world = mixed([A100], [A100_40])
        with pytest.raises(Refusal) as raised:
            world.submit(choosing("a", model="H200", least=100))
        assert "only H200 with 100GiB or more will do; its GPUs: 1 × NVIDIA A100-SXM4-80GB with 80GiB" in str(
            raised.value
        )
        world.submit(choosing("b", model="H200", wait_for_nodes_ms=10**7))
        assert world.explain("b").unblock == (
            "ask for other GPUs (NVIDIA A100-SXM4-80GB), or add a node with 1 of H200",
        )
        world.join("n2", {"cpu": 64, "gpu": 1, "memory": "64GiB", "gpu_memory": 141 * GIB}, devices=cards(141))
        assert world.devices("b") == ["n2:0"]

    def test_a_kept_group_is_used_by_who_may_have_its_gpus(self) -> None:
        world = mixed([H200, A100], pool=PgPoolSpec(max_dynamic=4))
        world.submit(choosing("a", model="A100"))
        world.complete("a")
        world.submit(choosing("b", model="H200"))
        world.submit(choosing("c"))
        assert (world.devices("b"), world.devices("c")) == (["n0:0"], ["n0:1"])
        assert world.job("c").groups == world.job("a").groups or len(world.state.groups) == 2

    def test_reserved_groups_may_be_of_certain_gpus(self) -> None:
        shape = Resources(gpu_milli=1000, gpu_model="A100")
        world = mixed([H200, A100], pool=PgPoolSpec(reserved=(shape,), dynamic=False, reserved_min_priority_milli=0))
        world.submit(choosing("a"))
        assert world.devices("a") == ["n0:1"]

    def test_a_place_on_another_gpu_is_refused_with_both(self) -> None:
        world = mixed([H200, A100])
        spec = choosing("a", model="H200")
        place = WorkerPlace(node_id="n0", devices=((1, 1000),))
        component = replace(spec.components[0], places=(place,))
        with pytest.raises(
            Refusal, match="device 1 of n0, NVIDIA A100-SXM4-80GB with 80GiB, and asks for a GPU of H200"
        ):
            world.submit(replace(spec, components=(component,)))

    def test_ray_may_not_give_other_cards_where_they_differ(self) -> None:
        world = mixed([H200, A100])
        world.submit(choosing("a", model="H200"))
        (group,) = world.state.groups.values()
        assert must_have_its_devices(world.state, group)

    def test_what_no_gpu_is_asked_beside_is_said(self) -> None:
        with pytest.raises(Refusal, match="only H200 will do"):
            mixed([H200]).submit(choosing("a", 0, "H200"))


def could_be_placed(cards: Sequence[DeviceInfo], asks: Sequence[Resources]) -> bool:
    """Whether some choice of cards for each worker leaves none with less than nothing."""
    choices = []
    for ask in asks:
        suiting = [
            index
            for index, card in enumerate(cards)
            if card.memory_bytes >= ask.gpu_memory_min_bytes and ask.gpu_model in card.model
        ]
        choices.append(list(combinations(suiting, max(1, ask.gpu_milli // 1000))))
    for chosen in product(*choices):
        left = [[1000, card.memory_bytes] for card in cards]
        for ask, indexes in zip(asks, chosen, strict=True):
            for index in indexes:
                left[index][0] -= min(1000, ask.gpu_milli)
                left[index][1] -= ask.gpu_memory_bytes // len(indexes)
        if all(milli >= 0 and amount >= 0 for milli, amount in left):
            return True
    return False


@pytest.mark.parametrize("seed", range(60))
def test_workers_are_placed_together_exactly_when_they_could_be(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [
        (model, chance.choice([24, 40, 80])) for model in chance.choices(["L4", "H200"], k=chance.choice([1, 2, 3]))
    ]
    asks = [
        Resources(
            gpu_milli=chance.choice([200, 500, 600, 1000, 2000] if seed % 2 else [200, 500, 600]),
            gpu_memory_bytes=chance.choice([0, 8, 16, 24, 40] if seed % 2 else [8, 16, 24, 40]) * GIB,
            gpu_model=chance.choice(["", "", "L4", "H200"]) if seed % 2 else "",
            gpu_memory_min_bytes=chance.choice([0, 0, 40]) * GIB if seed % 2 else 0,
        )
        for _ in range(chance.choice([2, 3, 4]))
    ]
    world = mixed(sizes)
    components = tuple(ComponentSpec(name=f"c{n}", actor="m:A", resources=ask) for n, ask in enumerate(asks))
    try:
        world.submit(JobSpec(name="a", pool="p", components=components))
        placed = world.status("a") is not JobState.PENDING
    except Refusal:
        placed = False
    assert placed == could_be_placed(world.state.nodes["n0"].devices, asks)
