"""Serves a gRPC service from its descriptor: no generated stubs."""

from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpclib.const import Cardinality, Handler

__all__ = ["DescribedService", "cardinality_of", "path_of"]


class DescribedService:
    """The methods of a service, each the method of the same name of `implementation`."""

    def __init__(self, descriptor: ServiceDescriptor, implementation: object) -> None:
        self._handlers = {path_of(method): _handler(method, implementation) for method in descriptor.methods}

    def __mapping__(self) -> dict[str, Handler]:
        return self._handlers


def path_of(method: MethodDescriptor) -> str:
    """The path by which a client names the method."""
    return f"/{method.containing_service.full_name}/{method.name}"


def cardinality_of(method: MethodDescriptor) -> Cardinality:
    """Which sides of the method are streams."""
    sides = (bool(method.client_streaming), bool(method.server_streaming))
    return next(cardinality for cardinality in Cardinality if _sides_of(cardinality) == sides)


def _sides_of(cardinality: Cardinality) -> tuple[bool, bool]:
    return cardinality.client_streaming, cardinality.server_streaming


def _handler(method: MethodDescriptor, implementation: object) -> Handler:
    function: Any = getattr(implementation, method.name)
    request_type, reply_type = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    return Handler(function, cardinality_of(method), request_type, reply_type)
