"""The trainer as a service: a front that can always answer, and the ranks behind it.

Invariants: READY means that every rank holds the model; this process never imports torch, so no rank can block its
answers. `flotilla doctor` does not mention the compiler of a gang that shall not compile. A gang that should compile
and cannot still trains, so this is a warning and no failure.
"""

from __future__ import annotations

import asyncio
from typing import Any

from flotilla.common.v1 import operate_pb2
from flotilla.common.v1.finding_pb2 import Finding
from flotilla.common.v1.registration_pb2 import Registration
from flotilla.trainer.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from flotilla_core import rpc, telemetry
from flotilla_core.errors import FlotillaError
from flotilla_core.findings import failed, passed, warned
from flotilla_core.gangs import model_of
from flotilla_core.kinds import EPISODES
from flotilla_core.logger import get_logger
from flotilla_core.model_folder import model_folder, tokenizer_digest
from flotilla_core.roles import role_of_process
from flotilla_core.service import Host
from flotilla_trainer.front.model_shape import model_digest, model_shape
from flotilla_trainer.front.servicer import TrainerServicer
from flotilla_trainer.front.session_files import SessionFiles
from flotilla_trainer.front.session_manager import SessionManager
from flotilla_trainer.gang.fork_server import RankForkServer
from flotilla_trainer.gang.hosts import AgentHost, GangHosts
from flotilla_trainer.gang.plan import GangPlan
from flotilla_trainer.gang.ranks import Gang

SERVICE_NAME = "flotilla.trainer.v1.TrainerService"

logger = get_logger()

INSTALL_COMPILER = "Install a C++ compiler (g++) and Python's headers, or set compile to off for this gang."


class TrainerService:
    """The service of one gang with one role, one session and one port."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._plan = GangPlan.of_stack(
            host.stack,
            host.name,
            host.instance_id,
            model_folder(model_of(host.stack, role_of_process(host.name))),
            host.state_dir / "logs",
            telemetry.endpoints(),
            str(host.credential.path),
        )
        self._fork_server = RankForkServer(self._plan.environment(), self._plan.log_path(0))
        others = [
            AgentHost(self._plan, name, ranks, host.files, host.activities)
            for name, ranks in self._plan.places.items()
            if name
        ]
        hosts = GangHosts(self._plan, self._fork_server, others, host.registry.watch, host.connect)
        self._gang = Gang(
            self._plan,
            self._fork_server,
            lost=self._lost,
            beyond_help=host.failed,
            hosts=hosts,
        )
        self._manager = SessionManager(
            self._gang,
            self._plan,
            host.stack,
            host.activities,
            SessionFiles(host.files, host.state_dir / "remote-runs" / host.name, hosts.bring),
        )

    def add_to(self, server: rpc.RpcServer) -> None:
        """Add TrainerService to the server."""
        server.add(add_TrainerServiceServicer_to_server, TrainerServicer(self._manager), SERVICE_NAME)

    async def start(self) -> None:
        """Start the ranks and load the model."""
        model_shape(self._plan.model)
        with self._host.activities.doing(f"starting {self._plan.nproc} ranks"):
            await self._gang.start()
        if refusal := self._gang.facts["compile_refusal"]:
            logger.warning("layers are not compiled", why=refusal, next_step=INSTALL_COMPILER)

    def describe(self, registration: Registration) -> None:
        """Write the facts of this trainer into its registration."""
        facts = self._gang.facts
        registration.versions["torch"] = facts["torch"]
        registration.tokenizer_digest = tokenizer_digest(self._plan.model)
        registration.model_digest = model_digest(self._plan.model)
        registration.capacity["nproc"] = self._plan.nproc
        registration.capacity["gpus"] = (
            len(self._plan.ranks_here) if facts["device"].startswith("cuda") else 0
        )
        registration.capacity["parameters"] = facts["parameters"]
        registration.capacity["max_sequence_tokens"] = facts["max_sequence_tokens"]
        registration.capacity[EPISODES] = 1

    async def check(self) -> list[Finding]:
        """Check that the ranks are ready, and their layers compiled where they should be."""
        phases = "; ".join(self._gang.phases())
        if not self._gang.ready:
            return [failed("ranks", phases or "not started", f"See {self._plan.log_path(0)}.")]
        found = f"{self._plan.nproc} on {self._gang.facts['device']} over {self._plan.backend}; {phases}"
        return [passed("ranks", found), *compiler_check(self._gang.facts)]

    async def dump_stacks(self) -> list[operate_pb2.ProcessStacks]:
        """Return the stacks of the ranks, also of one that hangs."""
        return await self._gang.stacks()

    async def drain(self, grace_s: float) -> None:
        """Wait until the running command has ended, at most `grace_s`."""
        try:
            await asyncio.wait_for(self._gang.idle(), grace_s)
        except TimeoutError:
            return  # `stop` ends the command; the coordinator sees that its call failed.

    async def stop(self) -> None:
        """End the ranks."""
        await self._gang.stop()
        self._fork_server.close()

    def _lost(self, error: FlotillaError) -> None:
        self._manager.gang_lost(error)


def compiler_check(facts: dict[str, Any]) -> list[Finding]:
    """Return one finding or none, from the facts that the ranks reported."""
    if refusal := facts["compile_refusal"]:
        return [warned("compiler", f"layers are not compiled: {refusal}", INSTALL_COMPILER)]
    if not facts["compile_s"]:
        return []
    return [passed("compiler", f"layers compiled in {facts['compile_s']:.0f} s")]
