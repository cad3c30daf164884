"""A generator whose deliveries come twice, out of order, and late: for the tests of this folder.

What it decodes is what any other replica with a simulated engine decodes. Run like `flotilla-generator`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_GENERATOR
from flotilla.generator.v1 import generator_pb2 as pb
from flotilla_core.service import run_service
from flotilla_generator import service
from flotilla_generator.servicer import GeneratorServicer


class UnrulyServicer(GeneratorServicer):
    """Every sample twice, the last one first, behind one of the call before."""

    _late: pb.GenerateResponse | None = None

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        samples = [sample async for sample in super().Generate(request, context)]
        late, self._late = self._late, samples[-1] if samples else None
        if late is not None:
            yield late
        for sample in reversed(samples):
            yield sample
            yield sample

    async def GenerateMany(
        self, request_iterator: AsyncIterator[pb.GenerateManyRequest], context: Any
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        async for message in super().GenerateMany(request_iterator, context):
            message.answers.sort(key=lambda answer: answer.request_id, reverse=True)
            yield message
            yield message


if __name__ == "__main__":
    service.GeneratorServicer = UnrulyServicer  # type: ignore[misc]
    sys.exit(run_service(SERVICE_KIND_GENERATOR, service.GeneratorHostService))
