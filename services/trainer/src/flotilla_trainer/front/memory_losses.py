"""Remember which runs lost their gang because a rank ran out of memory, so that the same cause does not end it again.

Invariants: after the first such loss a run gets micro-batches of half the tokens; after the second its session is
refused with the key to change, until the run asks for smaller micro-batches than those that were lost.
"""

from __future__ import annotations

from flotilla_core.errors import Exhausted, FlotillaError

OUT_OF_MEMORY = "OutOfMemoryError"
"""The name of torch's error, which is in the last line of the log of a rank that ended by it."""
SECOND = 2


class MemoryLosses:
    """The losses of one trainer, by run."""

    def __init__(self) -> None:
        self._budgets: dict[str, list[int]] = {}
        """The tokens of a micro-batch at each loss."""

    def note(self, run_id: str, budget: int, error: FlotillaError) -> None:
        """Count the loss of a gang, if it was one of memory."""
        if OUT_OF_MEMORY in error.why:
            self._budgets.setdefault(run_id, []).append(budget)

    def allowed(self, run_id: str, asked: int) -> int:
        """Return the tokens that a micro-batch of a new session may have; raise if there is no use in another one."""
        budgets = self._budgets.get(run_id, [])
        if not budgets or asked < budgets[-1]:
            return asked
        if len(budgets) >= SECOND:
            raise Exhausted(
                f"the ranks ran out of memory {len(budgets)} times",
                where="batching.tokens_per_microbatch",
                why=f"the last time with {budgets[-1]} tokens in a micro-batch",
                next_step=f"set it below {budgets[-1]}, or set batching.activation_checkpointing to true",
            )
        return budgets[-1] // 2
