"""A weight group listens at the right address and advertises the right name to its members."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.common.v1 import weights_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.config.stack import BindConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_core.service import Activities
from flotilla_trainer.front.weight_groups import WeightGroups
from flotilla_trainer.gang import plan
from flotilla_weights.group import Receiver, Sender
from flotilla_weights.manifest import Manifest

MANIFEST = Manifest.from_named([("w", "float32", (2, 2))], 1 << 20)
SOMEBODY_ELSES = "203.0.113.7"
LIMIT_S = 10.0


class Ranks:
    """A gang whose rank 0 opens a real sender."""

    async def command(self, kind: str, fields: dict[str, Any]) -> list[Any]:
        assert kind == "open_group"
        self.sender = sender = Sender.listen(
            fields["host"],
            fields["epoch"],
            fields["world_size"],
            fields["backend"],
            fields["timeout_s"],
            secret=bytes.fromhex(fields["secret"]),
        )
        manifest = MANIFEST.to_proto().SerializeToString().hex()
        opened = {"host": sender.host, "port": sender.port, "manifest": manifest}
        return [SimpleNamespace(fields=opened)]


async def opened(ranks: Ranks, bind: BindConfig) -> weights_pb2.WeightGroup:
    groups = WeightGroups(ranks, bind, LIMIT_S, Activities())  # type: ignore[arg-type]
    request = pb.OpenWeightGroupRequest(
        run_id="run", epoch=1, backend=weights_pb2.WEIGHT_BACKEND_GLOO, world_size=2, bucket_bytes=1 << 20
    )
    request.timeout.FromNanoseconds(int(LIMIT_S * 1e9))
    return (await groups.open(request)).group


async def test_members_reach_the_address_that_is_bound_under_the_name_that_is_advertised() -> None:
    ranks = Ranks()
    group = await opened(ranks, BindConfig(host="127.0.0.1", advertise_host="localhost"))
    assert (ranks.sender.host, group.host) == ("127.0.0.1", "localhost")
    receiver = Receiver(group, 1, MANIFEST)
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(
            asyncio.to_thread(ranks.sender.connect, MANIFEST), asyncio.to_thread(receiver.connect)
        )
    receiver.close()
    ranks.sender.close()


@pytest.mark.parametrize(
    ("bound", "advertised", "listening"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("127.0.0.1", SOMEBODY_ELSES, "127.0.0.1"),
        ("0.0.0.0", None, "127.0.0.2"),
        ("0.0.0.0", "127.0.0.3", "127.0.0.3"),
        ("0.0.0.0", SOMEBODY_ELSES, "127.0.0.2"),
    ],
)
async def test_the_sender_listens_on_an_address_of_its_host_whatever_is_advertised(
    bound: str, advertised: str | None, listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "dialable", lambda _: "127.0.0.2")
    ranks = Ranks()
    group = await opened(ranks, BindConfig(host=bound, advertise_host=advertised))
    assert (ranks.sender.host, group.host) == (listening, advertised or listening)
    ranks.sender.close()


async def test_an_address_that_cannot_be_bound_is_refused_with_a_next_step() -> None:
    with pytest.raises(FailedPrecondition, match=r"bind\.advertise_host"):
        await opened(Ranks(), BindConfig(host=SOMEBODY_ELSES))
