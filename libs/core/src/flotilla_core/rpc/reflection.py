"""Server reflection for our servers, under both of its names.

Tools ask for `grpc.reflection.v1` first, and older ones know `v1alpha` alone; grpcio brings the latter. Invariant: the
two have the same messages under other names, so one servicer answers for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

SERVICE_NAMES = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Let tools list `services` and read their contracts."""
    _add_contract()
    servicer = reflection.aio.ReflectionServicer([*services, *SERVICE_NAMES])
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
            for name in SERVICE_NAMES
        ]
    )


def _add_contract() -> None:
    """Add the contract of v1 to the pool that the servicer answers from."""
    contract = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(contract)
    text = (
        text_format.MessageToString(contract)
        .replace("v1alpha", "v1")
        .replace("grpc_reflection", "grpc/reflection")
    )
    descriptor_pool.Default().Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))
