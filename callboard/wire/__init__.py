"""Messages: frozen specs ↔ protobuf, and errors ↔ gRPC statuses.

Every ``…_from_proto`` validates in full, through the models of :mod:`callboard.model.inputs`, and names faults by
the path of the message (``spec.components[0].resources.gpu_milli``). Import from the submodules:

- :mod:`callboard.wire.amounts`: ``resources_to_proto``, ``resources_from_proto``, ``labels_from_proto``
- :mod:`callboard.wire.specs`: ``job_spec_to_proto``, ``job_spec_from_proto``, and the same for pools, policies and
  overrides
- :mod:`callboard.wire.schema`: how it follows from the declarations of the specs
- :mod:`callboard.wire.enums`: ``to_wire``, ``from_wire``
- :mod:`callboard.wire.errors`: the exceptions, ``ErrorReason``,
  ``status_of``, ``parse_error``, ``error_from_rpc``
"""
