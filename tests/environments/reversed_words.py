"""Words to write backwards: a taskset of verifiers, by its public interface alone."""

from __future__ import annotations

import verifiers.v1 as vf

WORDS = ("cat", "dog", "sun", "map", "tea", "ink", "owl", "bus")


class ReversedData(vf.TaskData):
    answer: str


class ReversedTask(vf.Task[ReversedData]):
    @vf.reward(weight=1.0)
    async def reversed(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.01)
    async def length(self, trace: vf.Trace) -> float:
        """What samples of an untrained model differ in."""
        return float(len(trace.last_reply) % 7)


class ReversedConfig(vf.TasksetConfig):
    words: int = len(WORDS)


class ReversedTaskset(vf.Taskset[ReversedTask, ReversedConfig]):
    def load(self) -> list[ReversedTask]:
        words = WORDS[: self.config.words]
        return [ReversedTask(ReversedData(prompt=f"Reverse {word}.", answer=word[::-1])) for word in words]


__all__ = ["ReversedTaskset"]
