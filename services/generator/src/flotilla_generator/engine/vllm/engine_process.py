"""vLLM's engine process is a fork of a server that imports vLLM while the service does the same.

A process of its own would import vLLM again, after the service has: that is half of a second start on a GPU. The same
goes for the process in which vLLM looks at a model's class when it first meets it.

Invariants: the server computes nothing and touches no GPU, so that its forks may; a fork takes the environment and the
number of threads from the service as they are when it starts; the server ends with the service.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

IMPORTED = ("vllm.v1.engine.core", "flotilla_generator.engine.vllm.worker")
"""Modules that every engine process needs."""
GPU_WORKER = "vllm.v1.worker.gpu_worker"
CPU_WORKER = "vllm.v1.worker.cpu_worker"


class EngineProcess(ForkServerProcess):
    """A fork of the server that goes on like a process which the service started itself."""

    def start(self) -> None:
        """Ask the server for a fork; it gets the object with the environment of now."""
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """Take over the environment; torch has read the number of threads when the server imported it."""
        import torch

        os.environ.clear()
        os.environ.update(self._environment)
        if (threads := os.environ.get("OMP_NUM_THREADS")) is not None:
            torch.set_num_threads(int(threads))
        super().run()


class EngineContext(ForkServerContext):
    """Gives vLLM its processes and queues."""

    Process = EngineProcess


def import_ahead() -> None:
    """Start the server; vLLM need not be imported here yet, but its environment has to be prepared."""
    import torch

    worker = GPU_WORKER if torch.cuda.is_available() else CPU_WORKER
    multiprocessing.get_context("forkserver").set_forkserver_preload([*IMPORTED, worker])
    forkserver.ensure_running()


def use_forks() -> None:
    """Let vLLM take its engine process from the server. Workers of a larger replica are spawned by that process."""
    from vllm.v1.engine import utils

    launching: Any = utils  # the function is an import of its own, which is no part of its interface
    # vLLM asks it for each engine, and knows no option for it but spawn and fork.
    launching.get_mp_context = EngineContext


def look_at_classes(architectures: Sequence[str]) -> None:
    """Let a fork find out what a model's classes can do, and keep that in vLLM's cache, where vLLM looks first."""
    fork = EngineContext().Process(target=_look_at_classes, args=(tuple(architectures),))
    fork.start()
    fork.join()


def _look_at_classes(architectures: Sequence[str]) -> None:
    from vllm.model_executor.models import registry

    inspecting: Any = registry
    inspecting._run_in_subprocess = lambda inspect: inspect()  # this is a process of its own already
    with suppress(Exception):  # vLLM, which then looks itself, says what is wrong with the model
        for name in architectures:
            if (model := registry.ModelRegistry.models.get(name)) is not None:
                model.inspect_model_cls()
