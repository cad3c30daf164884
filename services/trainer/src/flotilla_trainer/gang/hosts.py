"""The hosts of a gang: the front's own, and others, where an agent runs ranks for the front.

Invariants: a command names files of the front's host, and each rank is told where its own host has them; what the ranks
of another host write is beside what the front's own wrote before the front calls it complete. An agent is found by its
name in the registry, and counts as there when it answers. A gang on one host asks nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from flotilla.common.v1 import registration_pb2 as reg
from flotilla.trainer.v1 import ranks_pb2 as pb
from flotilla.trainer.v1 import ranks_pb2_grpc
from flotilla_core import rpc
from flotilla_core.activities import Activities
from flotilla_core.config.model import file_of_function
from flotilla_core.errors import FlotillaError, Unavailable
from flotilla_core.gangs import agent_name
from flotilla_core.logger import get_logger
from flotilla_core.protocol import refusal
from flotilla_core.transfer import Files
from flotilla_trainer.gang.fork_server import RankForkServer
from flotilla_trainer.gang.local_rank import LocalRank
from flotilla_trainer.gang.plan import GangPlan
from flotilla_trainer.gang.remote_rank import RemoteRank
from flotilla_trainer.wire.settings import SHARDS, HostSettings

if TYPE_CHECKING:
    from flotilla.trainer.v1.ranks_pb2_grpc import RankServiceAsyncStub

ANSWER_TIMEOUT_S = 10.0
FETCH_IDLE_S = 900.0
"""The longest wait without progress: an agent waits for bytes less long, so that its error says who sent none."""
LOOK_EVERY_S = 0.5

logger = get_logger()

Views = Callable[[], AsyncGenerator[dict[str, reg.Registration]]]


class FrontHost:
    """The host of the front."""

    name = ""

    def __init__(self, plan: GangPlan, fork_server: RankForkServer) -> None:
        self._plan = plan
        self._fork_server = fork_server
        self.ranks = plan.ranks_here

    async def settings(self) -> HostSettings:
        """Return what the front's own plan says."""
        plan = self._plan
        return HostSettings(model=str(plan.model), otlp=plan.otlp, credential_file=plan.credential_file)

    async def start(self, rank: int) -> LocalRank:
        """Fork a rank."""
        return await LocalRank.start(self._plan, rank, self._fork_server)

    async def told(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Return nothing: all commands name files of this host."""
        return {}

    async def collect(self, folder: Path) -> None:
        """Do nothing: the ranks of this host wrote into the folder itself."""


class AgentHost:
    """Another host, by the agent on it."""

    def __init__(self, plan: GangPlan, name: str, ranks: range, files: Files, activities: Activities) -> None:
        self.name = name
        self.ranks = ranks
        self._plan = plan
        self._files = files
        self._activities = activities
        self._address = ""
        self._channel: grpc.aio.Channel | None = None
        self._stub: RankServiceAsyncStub

    async def reach(self, address: str, connect: Callable[[str], grpc.aio.Channel]) -> None:
        """Use the agent at this address; raise where it does not answer."""
        if address != self._address or self._channel is None:
            await self.close()
            self._channel, self._address = connect(address), address
            self._stub = ranks_pb2_grpc.RankServiceStub(self._channel)
        await self._described()

    async def close(self) -> None:
        """Let the connection go."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def settings(self) -> HostSettings:
        """Return where this host has what a rank reads at its start; the model is brought there."""
        here = await self._described()
        return HostSettings(
            model=await self.bring(self._plan.model),
            otlp=tuple(here.otlp),
            credential_file=here.credential_file or None,
        )

    async def start(self, rank: int) -> RemoteRank:
        """Let the agent fork a rank."""
        return await RemoteRank.start(
            self._stub,
            self.name,
            rank,
            silence_s=self._plan.rank_timeout_s,
            limit_s=self._plan.slow_timeout_s,
        )

    async def told(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a command that name files, as files of this host."""
        if kind == "load":
            return {"model": await self.bring(Path(fields["model"]))}
        if kind == "load_checkpoint":
            return {"folder": await self.bring(Path(fields["folder"]), sealed=True)}
        if kind == "snapshot":
            request = pb.MakePartRequest(name=_part_of(Path(fields["folder"])))
            made = await rpc.unary(self._stub.MakePart, request, timeout_s=ANSWER_TIMEOUT_S)
            return {"folder": made.path}
        if kind in ("open_session", "forward_backward"):
            objective = fields["objective"]
            section = await _with_functions_here(objective["section"], self.bring)
            return {"objective": {**objective, "section": section}}
        return {}

    async def collect(self, folder: Path) -> None:
        """Bring the shards of this host's ranks beside those that are in the folder."""
        request = pb.OfferPartRequest(name=_part_of(folder))
        offered = await rpc.unary(self._stub.OfferPart, request, timeout_s=ANSWER_TIMEOUT_S)
        if not offered.HasField("folder"):
            return
        place = folder / f"part-{self.name}"
        await self._files.fetch_into(offered.folder, place)
        await asyncio.to_thread(_move_into, place, folder / SHARDS)

    async def _described(self) -> pb.DescribeHostResponse:
        request = pb.DescribeHostRequest()
        return await rpc.unary(self._stub.DescribeHost, request, timeout_s=ANSWER_TIMEOUT_S, attempts=1)

    async def bring(self, path: Path, *, sealed: bool = False, run_id: str = "") -> str:
        """Return where this host has a folder of the front's host; it is fetched where it is missing."""
        offered = await asyncio.to_thread(self._files.offer, path, sealed=sealed)
        offered.address = self._files.address
        request = pb.BringFolderRequest(folder=offered, sealed=sealed)
        title = f"bringing {path} to host {self.name}"
        with self._activities.doing(title, run_id=run_id) as activity:

            def tell(doing: str) -> None:
                activity.what = f"{title}: {doing}" if doing else title

            call = rpc.unary(self._stub.BringFolder, request, timeout_s=rpc.UNLIMITED_S)
            patience = rpc.Patience(self._channel, tell=tell)
            brought = await patience.answer(call, idle_timeout_s=FETCH_IDLE_S, where=f"host {self.name}")
        return brought.path


RankHost = FrontHost | AgentHost


class GangHosts:
    """All hosts of a gang, that of the front first."""

    def __init__(
        self,
        plan: GangPlan,
        fork_server: RankForkServer,
        others: Sequence[AgentHost] = (),
        views: Views | None = None,
        connect: Callable[[str], grpc.aio.Channel] | None = None,
    ) -> None:
        self._plan = plan
        self._others = others
        self._views = views
        self._connect = connect
        self._seen: dict[str, reg.Registration] = {}
        self._following: asyncio.Task[None] | None = None
        self.all: tuple[RankHost, ...] = (FrontHost(plan, fork_server), *others)

    @property
    def several(self) -> bool:
        """Return whether ranks are on further hosts than the front's."""
        return bool(self._others)

    async def reached(self, limit_s: float | None = None) -> None:
        """Wait until the agent of each further host answers; raise after `limit_s`, if there is such a limit."""
        started, told = time.monotonic(), ""
        while missing := await self._missing():
            if missing != told:
                logger.warning("the gang waits for its agents", missing=missing)
                told = missing
            if limit_s is not None and time.monotonic() - started > limit_s:
                raise Unavailable(
                    "hosts of the gang have no agent that answers",
                    where=self._plan.name,
                    why=f"waited {limit_s:g} s for {missing}",
                    next_step="start it on that host: flotilla-ranks --name "
                    f"{agent_name(self._plan.name, self._others[0].name)} --stack FILE",
                )
            await asyncio.sleep(LOOK_EVERY_S)

    async def collect(self, folder: Path) -> None:
        """Bring into a checkpoint what the ranks of further hosts wrote of it."""
        for host in self.all:
            await host.collect(folder)

    async def bring(self, path: Path, *, sealed: bool, run_id: str) -> None:
        """Bring a folder of the front's host to each further one, so that a command which names it need not wait."""
        for host in self._others:
            await host.bring(path, sealed=sealed, run_id=run_id)

    async def close(self) -> None:
        """Let all connections go."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        for host in self._others:
            await host.close()

    async def _missing(self) -> str:
        """Return which hosts have no agent that answers, and why; empty where all have."""
        if not self._others:
            return ""
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow(), name="agents of the gang")
        reasons = await asyncio.gather(*map(self._why_missing, self._others))
        pairs = zip(self._others, reasons, strict=True)
        return "; ".join(f"host {host.name}: {why}" for host, why in pairs if why)

    async def _why_missing(self, host: AgentHost) -> str:
        assert self._connect is not None, "a gang on several hosts can call agents"
        name = agent_name(self._plan.name, host.name)
        found = [
            one
            for one in self._seen.values()
            if (one.kind, one.name, one.state) == (reg.SERVICE_KIND_RANKS, name, reg.INSTANCE_STATE_READY)
        ]
        if not found:
            return f"no {name} is in the registry"
        newest = max(found, key=lambda one: one.started_at.ToNanoseconds())
        if why := refusal(newest):
            return why
        try:
            await host.reach(newest.address, self._connect)
        except FlotillaError as error:
            return error.why or error.what
        return ""

    async def _follow(self) -> None:
        assert self._views is not None, "a gang on several hosts sees the registry"
        async with aclosing(self._views()) as views:
            async for view in views:
                self._seen = view


def _part_of(folder: Path) -> str:
    """Return the name of a checkpoint that is written in this folder; a hidden one is refused as a name."""
    return folder.name.strip(".")


def _move_into(place: Path, shards: Path) -> None:
    shards.mkdir(exist_ok=True)
    for file in place.iterdir():
        file.rename(shards / file.name)
    place.rmdir()


async def _with_functions_here(
    section: dict[str, Any], bring: Callable[[Path], Awaitable[str]]
) -> dict[str, Any]:
    """Return the section of an objective with the user's functions that it names in files of another host."""
    moved = dict(section)
    for part in ("loss", "advantage"):
        chosen = section.get(part)
        # The loss of a preference algorithm is a word, and names no file.
        if not isinstance(chosen, dict):
            continue
        name = chosen.get("type", "")
        if (file := file_of_function(name)) is not None:
            moved[part] = {**chosen, "type": f"{await bring(file)}:{name.rpartition(':')[2]}"}
    return moved
