"""What does a new field of a component need? Its declaration and the proto, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass

from callboard.controller.journal import codec
from callboard.model.describe import MASK, described
from callboard.model.faults import InvalidInput
from callboard.model.inputs import read_yaml
from callboard.model.inputs.component import ComponentInput
from callboard.model.inputs.compounds import Env, Total
from callboard.model.inputs.reading import read, reader_of
from callboard.model.inputs.scalars import DAY_MS, choice, duration
from callboard.model.policy import PolicyOverrides, PreemptionPolicy
from callboard.model.quantities import NOTHING, Resources
from callboard.model.schema import Written, declared_in
from callboard.model.specs import (
    ComponentSpec,
    JobSpec,
    PgPoolSpec,
    PoolSpec,
    RestartPolicy,
    ScalingRule,
    Strategy,
    WorkerPlace,
)
from callboard.v1 import common_pb2, job_pb2, policy_pb2, pool_pb2
from callboard.wire.schema import Reader, written


@dataclass(frozen=True, slots=True, kw_only=True)
class Wider(ComponentSpec):
    """A copy of the schema of a component with further fields, one of each kind that differs from a plain one."""

    patience_ms: Annotated[int, duration(1, DAY_MS)] | None = None
    spread: Annotated[Strategy, choice(Strategy)] = Strategy.PACK
    spare: Total = NOTHING
    tools: Annotated[Env, Written("tooling.env")] = ()


class WiderInput(ComponentInput, of=Wider):
    """The copy's reader; nothing in it."""


@pytest.fixture(scope="module")
def message_class() -> Any:
    """The copy's message: that of a component with the fields added as they would be in the proto."""
    file = descriptor_pb2.FileDescriptorProto(name="tests/wider.proto", package="tests", syntax="proto3")
    file.dependency.extend(["callboard/v1/common.proto", "callboard/v1/job.proto"])
    wider = file.message_type.add()
    job_pb2.ComponentSpec.DESCRIPTOR.CopyToProto(wider)
    for nested in wider.nested_type:  # maps are messages of their own
        for field in wider.field:
            if field.type_name.endswith(f".{nested.name}"):
                field.type_name = f".tests.Wider.{nested.name}"
    wider.name = "Wider"
    kinds = descriptor_pb2.FieldDescriptorProto
    wider.oneof_decl.add(name="_patience_ms")
    index = len(wider.oneof_decl) - 1
    wider.field.add(
        name="patience_ms", number=901, type=kinds.TYPE_INT64, label=1, proto3_optional=True, oneof_index=index
    )
    wider.field.add(
        name="spread", number=902, type=kinds.TYPE_ENUM, label=1, type_name=".callboard.v1.PlacementStrategy"
    )
    wider.field.add(name="spare", number=903, type=kinds.TYPE_MESSAGE, label=1, type_name=".callboard.v1.Resources")
    entry = wider.nested_type.add(name="ToolsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=kinds.TYPE_STRING, label=1)
    wider.field.add(name="tools", number=904, type=kinds.TYPE_MESSAGE, label=3, type_name=".tests.Wider.ToolsEntry")
    pool = descriptor_pool.Default()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("tests.Wider"))


SPEC = Wider(
    name="a",
    actor="m:A",
    patience_ms=1500,
    spread=Strategy.SPREAD,
    spare=Resources.of(cpu_milli=500),
    tools=(("X_TOKEN", "s3"), ("Y", "z")),
)
WRITTEN = """\
name: a
actor: m:A
patience: 1500ms
spread: spread
spare: {cpu: 0.5}
tooling: {env: {Y: z, X_TOKEN: s3}}
"""


class TestAFieldAddedToTheSchema:
    """Shown on a copy with a duration, a word, an amount and variables that may be secret."""

    def test_is_read_from_a_file(self) -> None:
        assert read(WiderInput, read_yaml(WRITTEN)).spec() == SPEC
        assert read(WiderInput, read_yaml("{name: a, actor: m:A}")).spec() == Wider(name="a", actor="m:A")

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            ("patience: 0s", "3:1: patience: 0s is out of bounds; 1ms to 1d is allowed"),
            ("spread: FAR", "3:1: spread: 'FAR' is unknown; use PACK or SPREAD or STRICT_PACK or STRICT_SPREAD"),
            ("spare: {cpu: -1}", "3:9: spare.cpu: "),
            ("tooling: {env: {RANK: '1'}}", "3:17: tooling.env.RANK: RANK is refused: the scheduler sets"),
            ("tooling: {envs: {}}", "3:11: tooling.envs: unknown key 'envs'; did you mean env?"),
            ("patiense: 3s", "3:1: patiense: unknown key 'patiense'; did you mean patience?"),
        ],
    )
    def test_its_faults_are_located(self, wrong: str, says: str) -> None:
        with pytest.raises(InvalidInput) as caught:
            read(WiderInput, read_yaml(f"name: a\nactor: m:A\n{wrong}\n"))
        (fault,) = caught.value.faults
        assert str(fault).startswith(says)

    def test_travels_in_messages_both_ways(self, message_class: Any) -> None:
        sent = message_class.FromString(written(SPEC, message_class).SerializeToString())
        assert (sent.patience_ms, sent.spread, sent.spare.cpu_milli) == (1500, job_pb2.PLACEMENT_STRATEGY_SPREAD, 500)
        reader = Reader("spec")
        assert reader.validated(WiderInput, reader.mapping(WiderInput, sent)).spec() == SPEC
        assert written(SPEC, message_class, mask=True).tools["X_TOKEN"] == MASK
        assert not written(Wider(name="a", actor="m:A"), message_class).HasField("patience_ms")

    def test_faults_of_its_message_name_the_messages_field(self, message_class: Any) -> None:
        wrong = message_class(name="a", actor="m:A", patience_ms=0, spread=99, tools={"RANK": "1"})
        wrong.spare.cpu_milli = -1
        reader = Reader("spec")
        with pytest.raises(InvalidInput) as caught:
            reader.validated(WiderInput, reader.mapping(WiderInput, wrong))
        fields = {fault.field for fault in caught.value.faults}
        assert fields == {"spec.patience_ms", "spec.spread", "spec.spare.cpu_milli", "spec.tools.RANK"}

    def test_is_described_as_people_write_it(self) -> None:
        shown = described(SPEC, secrets=True)
        assert shown == {
            "name": "a",
            "actor": "m:A",
            "patience": "1500ms",
            "spread": "SPREAD",
            "spare": {"cpu": 0.5},
            "tooling": {"env": {"X_TOKEN": "s3", "Y": "z"}},
        }
        assert described(SPEC)["tooling"]["env"]["X_TOKEN"] == MASK
        assert described(Wider(name="a", actor="m:A")) == {"name": "a", "actor": "m:A"}

    def test_is_in_the_journal_and_takes_its_default_in_an_older_one(self) -> None:
        adapter = codec._adapter(Wider)
        assert adapter.validate_json(adapter.dump_json(SPEC)) == SPEC
        older = codec._adapter(ComponentSpec).dump_json(ComponentSpec(name="a", actor="m:A"))
        assert adapter.validate_json(older) == Wider(name="a", actor="m:A")


SPECS = (
    (ComponentSpec, job_pb2.ComponentSpec),
    (JobSpec, job_pb2.JobSpec),
    (RestartPolicy, job_pb2.RestartPolicy),
    (ScalingRule, job_pb2.ScalingRule),
    (WorkerPlace, common_pb2.WorkerPlace),
    (PoolSpec, pool_pb2.PoolSpec),
    (PgPoolSpec, pool_pb2.PlacementGroupPool),
    (PreemptionPolicy, policy_pb2.PreemptionPolicy),
    (PolicyOverrides, policy_pb2.PreemptionPolicy),
)


@pytest.mark.parametrize(("spec", "message"), SPECS, ids=lambda each: getattr(each, "__name__", ""))
def test_every_field_of_a_message_is_declared_and_every_declared_one_is_in_the_message(
    spec: type, message: Any
) -> None:
    declared = {field.field for field in declared_in(spec)} | {field.written.limited for field in declared_in(spec)}
    known = set(message.DESCRIPTOR.fields_by_name)
    # Said by several fields of the spec together, and the name of a pool, which travels beside it.
    together = {"workers", "command", "ray", "tty", "ray_options", "zero_resources"} if spec is ComponentSpec else set()
    assert known - declared == together
    assert declared - known - {""} == ({"name"} if spec is PoolSpec else set())


def test_every_spec_that_is_declared_has_one_reader() -> None:
    for spec, _ in SPECS:
        if spec is not PreemptionPolicy:  # read as overrides of its defaults
            assert reader_of(spec).of is spec
