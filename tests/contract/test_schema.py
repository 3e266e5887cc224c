"""The schema against what serves it, so that a new operation cannot be forgotten on one side."""

import pytest
from google.protobuf import descriptor, message_factory
from kvstored_proto.v1 import admin_pb2
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.rpc import roles
from kvstored.rpc.named import NAMES as SESSION_NAMES
from kvstored.rpc.operations import OPERATIONS, number_of
from kvstored.rpc.servicers import SPECIAL

SERVICES = [pb.DESCRIPTOR.services_by_name["KVStore"], admin_pb2.DESCRIPTOR.services_by_name["Admin"]]
METHODS = {method.name: method for service in SERVICES for method in service.methods}
# Numbers that are no requests of the services, and who sends them.
ONLY_ON_THE_SESSION_SOCKET = {"SEGMENTS_DROPPED", "SEGMENTS", "SEGMENTS_RETIRED", "OFFER_DESCRIPTORS"}


def request_of(method):
    return message_factory.GetMessageClass(method.input_type)


def test_every_method_is_an_operation_or_special():
    served = {operation.name for operation in OPERATIONS.values()}
    assert served | SPECIAL == set(METHODS)
    assert not served & SPECIAL


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda o: o.name)
def test_an_operation_takes_the_request_of_its_method(operation):
    assert operation.request is request_of(METHODS[operation.name])


def test_every_number_belongs_to_a_method_or_to_the_session_socket_alone():
    numbers = {name.removeprefix("OPERATION_"): number for name, number in pb.Operation.items() if number}
    inline = {"PutInline", "GetInline"}
    assert set(numbers.values()) == {number_of(name) for name in METHODS if name not in inline} | {
        numbers[name] for name in ONLY_ON_THE_SESSION_SOCKET
    }


def test_only_inline_bytes_are_not_served_on_the_session_socket():
    assert set(METHODS) - set(SESSION_NAMES.values()) == {"PutInline", "GetInline"}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_reply_carries_the_boot_id(method):
    field = method.output_type.fields_by_name["boot_id"]
    assert (field.number, field.type) == (15, descriptor.FieldDescriptor.TYPE_FIXED64)


def test_hashes_always_come_with_their_size():
    for method in METHODS.values():
        fields = method.input_type.fields_by_name
        assert ("hashes" in fields) == ("hash_bytes" in fields), method.name


def test_every_method_says_which_role_it_needs():
    assert set(roles.NEEDED) == set(METHODS)
    assert set(roles.NEEDED.values()) == {roles.NOBODY, roles.READER, roles.TENANT, roles.ADMIN}
