"""Tools of an MCP server, of which this service is a client by wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flotilla_environment.builtin.answers import is_right
from flotilla_environment.environment import Begun, Call, Reply, Task
from flotilla_environment.hosted import HostedTools
from flotilla_workers.functions import Refusal

if TYPE_CHECKING:
    from flotilla_environment.wire.mcp import McpServer, Transport

BEGIN_S = 25.0


class Mcp(HostedTools):
    """Tools of an MCP server to answer the prompt with: reward `correct` where the answer is that of the data."""

    def __init__(
        self,
        *,
        command: list[str] | None = None,
        url: str = "",
        environment: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        tools: list[str] | None = None,
        limit_s: float = 20.0,
    ) -> None:
        """`command` starts a server for each episode, `url` names one; `tools` are those that the policy may call."""
        super().__init__(limit_s=limit_s)
        if bool(command) == bool(url):
            raise ValueError("give either command, a list of words, or url")
        if isinstance(command, str) or (url and not url.startswith(("http://", "https://"))):
            raise ValueError("command is a list of words, and url begins with http:// or https://")
        self._command, self._url = command or [], url
        self._environment, self._headers = environment or {}, headers or {}
        self._asked = tools
        self._names: list[str] = []
        self._server: McpServer | None = None
        self._task = Task([])

    async def begin(self, task: Task) -> Begun:  # type: ignore[override]
        from flotilla_environment.wire.http import Lost
        from flotilla_environment.wire.mcp import McpServer, ServerError

        self._task = task
        self._server = McpServer(self._transport())
        try:
            found = await self._server.tools(BEGIN_S)
        except (Lost, ServerError) as error:
            raise Refusal(f"the MCP server gives no tools: {error}") from None
        except TimeoutError:
            raise Refusal(f"the MCP server gave no tools within {BEGIN_S:g} s") from None
        known = [tool["name"] for tool in found]
        self._names = known if self._asked is None else self._asked
        if missing := [name for name in self._names if name not in known]:
            raise Refusal(f"the MCP server has no tool {', '.join(missing)}; it has {', '.join(known)}")
        return Begun(task.messages, [tool for tool in found if tool["name"] in self._names])

    def _transport(self) -> Transport:
        from flotilla_environment.rooms import variables_of
        from flotilla_environment.wire.http import Address
        from flotilla_environment.wire.mcp_http import StreamableHttp
        from flotilla_environment.wire.mcp_stdio import Stdio

        if self._command:
            return Stdio(self.place, self._command, self._environment)
        return StreamableHttp(Address(self._url, variables_of(self.place.jail, self._headers)))

    async def call(self, call: Call, limit_s: float) -> tuple[str, bool]:
        from flotilla_environment.wire.http import Lost

        if call.name not in self._names:
            return f"error: there is no tool {call.name!r}; there is {', '.join(self._names)}", False
        assert self._server is not None
        try:
            return await self._server.call(call.name, call.arguments, limit_s)
        except Lost as error:
            raise Refusal(f"the MCP server was lost twice in a call of {call.name}: {error}") from None

    async def answered(self, answer: str) -> Reply:
        return Reply(
            done=True, rewards={"correct": float(is_right(answer, self._task.answer))}, metrics=self.count
        )

    async def close(self) -> None:  # type: ignore[override]
        if self._server is not None:
            await self._server.close()
