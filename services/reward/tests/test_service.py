"""The service over gRPC, as its host serves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flotilla.common.v1.finding_pb2 import SEVERITY_INFO
from flotilla.common.v1.registration_pb2 import Registration
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1 import reward_pb2_grpc
from flotilla_core import rpc
from flotilla_core.config import BindConfig, RewardServiceConfig
from flotilla_core.errors import InvalidConfig
from flotilla_reward.judges.judge import Judges
from flotilla_reward.service import RewardHostService
from flotilla_testing.credentials import credential
from flotilla_testing.files import files_in


async def test_a_group_is_scored_over_grpc_and_errors_keep_their_class(tmp_path: Path) -> None:
    service = RewardHostService(RewardServiceConfig(workers=1), files_in(tmp_path), Judges({}))
    trusted = credential(tmp_path)
    server = rpc.RpcServer(BindConfig(), credential=trusted)
    service.add_to(server)
    address = await server.start()
    await service.start()
    try:
        async with rpc.connect(address, credential=trusted) as channel:
            stub = reward_pb2_grpc.RewardServiceStub(channel)
            items = [
                pb.ScoreItem(sample_id=f"run/0/0/{index}", response=str(index), answer="3")
                for index in range(8)
            ]
            request = pb.ScoreRequest(items=items, rewards=[pb.RewardSpec(reward="exact")])
            values = {
                outcome.sample_id: outcome.value.components[0].value
                async for response in rpc.server_stream(stub.Score, request, idle_timeout_s=10)
                for outcome in response.outcomes
            }
            assert values == {f"run/0/0/{index}": float(index == 3) for index in range(8)}

            unknown = pb.ScoreRequest(items=items, rewards=[pb.RewardSpec(reward="exakt")])
            with pytest.raises(InvalidConfig, match="did you mean exact"):
                _ = [r async for r in rpc.server_stream(stub.Score, unknown, idle_timeout_s=10)]

        registration = Registration()
        service.describe(registration)
        assert registration.capacity["workers"] == 1
        assert {check.severity for check in await service.check()} == {SEVERITY_INFO}
        assert [stacks.process for stacks in await service.dump_stacks()] == ["worker 0 (unused)"]
    finally:
        await server.stop(0)
        await service.stop()
