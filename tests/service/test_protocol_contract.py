"""What clients of `pykv.v1` are built against stays: names, numbers, types.

To change it on purpose: a field, method or value that is added gets its lines in `pykv_v1.txt`, and nothing else there
changes. What is there is never renamed, renumbered, retyped or taken away, since clients that are out would misread it:
that needs a package `pykv.v2` beside this one. A removed field's number and name are `reserved`.
"""

from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor

from pykv.service.protocol import engine_pb2 as pb

CONTRACT = Path(__file__).with_name("pykv_v1.txt")
TYPES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}


def contract(definition) -> Iterator[str]:
    """A line for each thing that is seen on the wire or in generated code."""
    for service in definition.services_by_name.values():
        for method in service.methods:
            takes = "stream " * method.client_streaming + method.input_type.full_name
            gives = "stream " * method.server_streaming + method.output_type.full_name
            yield f"{method.full_name}: {takes} -> {gives}"
    for enum in definition.enum_types_by_name.values():
        yield from (f"{enum.full_name}.{value.name} = {value.number}" for value in enum.values)
    for message in definition.message_types_by_name.values():
        yield f"{message.full_name}"
        yield from map(field_line, message.fields)


def field_line(field) -> str:
    kind = field.message_type or field.enum_type
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        name = f"map of {TYPES[key.type]} to {TYPES[value.type]}"
    else:
        name = ("repeated " * field.is_repeated) + (TYPES[field.type] if kind is None else kind.full_name)
    group = field.containing_oneof
    choice = "" if group is None or group.name.startswith("_") else f" in {group.name}"  # "_": `optional`
    presence = " with presence" * field.has_presence
    return f"{field.full_name} = {field.number}: {name}{choice}{presence}"


def test_the_protocol_is_what_clients_are_built_against():
    stored = CONTRACT.read_text().splitlines()
    now = list(contract(pb.DESCRIPTOR))
    assert len(stored) > 100
    broken = sorted(set(stored) - set(now))
    assert not broken, f"clients that are out would break; see the top of this file: {broken}"
    added = sorted(set(now) - set(stored))
    assert not added, f"new in the protocol; add to {CONTRACT.name}, if it is on purpose: {added}"
