"""A blocked event loop is reported while it is blocked."""

from __future__ import annotations

import threading

from structlog.testing import capture_logs

from flotilla_core.service.process import LoopWatch


async def test_a_blocked_loop_is_reported_with_the_stack_that_blocks_it() -> None:
    released = threading.Event()
    with capture_logs() as lines:
        watch = LoopWatch(blocked_after_s=0.05)

        def release_when_reported() -> None:
            while not lines:
                threading.Event().wait(0.01)
            released.set()

        threading.Thread(target=release_when_reported, daemon=True).start()
        assert released.wait(10), "nothing was reported"  # blocking the loop is the point
        watch.stop()
    assert lines[0]["event"] == "the event loop is blocked"
    assert "released.wait" in lines[0]["stack"]
