"""vLLM's engine process is a fork of a server, which is itself a fork of the service: vLLM is imported once.

The import takes longer than all else that a start does on a CPU. The server also gives vLLM the process in which it
looks at a model's class when it first meets it.

Invariants: the service forks the server while it has one thread, no CUDA, and nothing open of its own, and never forks
again; the server computes nothing and touches no GPU, so that its forks may; a fork takes the environment and the
number of threads from the service as they are when it starts; the server ends with the service. Where a server has
died, or none was forked, a new interpreter that imports vLLM itself takes its place.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

from flotilla_core.config.generators import GeneratorConfig
from flotilla_core.logger import get_logger
from flotilla_generator.engine.vllm.boot import prepare_environment

IMPORTED = ("vllm.v1.engine.core", "flotilla_generator.engine.vllm.worker")
"""Modules that every engine process needs."""
GPU_WORKER = "vllm.v1.worker.gpu_worker"
CPU_WORKER = "vllm.v1.worker.cpu_worker"
PR_SET_NAME = 15

logger = get_logger()


class EngineProcess(ForkServerProcess):
    """A fork of the server that goes on like a process which the service started itself."""

    def start(self) -> None:
        """Ask the server for a fork; it gets the object with the environment of now."""
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """Take over the environment; torch has read the number of threads when the server imported it."""
        import torch

        _call_this_process("engine")
        os.environ.clear()
        os.environ.update(self._environment)
        if (threads := os.environ.get("OMP_NUM_THREADS")) is not None:
            torch.set_num_threads(int(threads))
        super().run()


class EngineContext(ForkServerContext):
    """Gives vLLM its processes and queues."""

    Process = EngineProcess


def import_once(config: GeneratorConfig, cache: Path) -> None:
    """Import vLLM into the service, which has one thread yet, and fork the server off."""
    logger.info("importing vLLM")
    prepare_environment(config, cache)
    gc.disable()  # looks for garbage would take a quarter of the import, which makes little of it
    for name in _modules():
        importlib.import_module(name)
    gc.enable()
    gc.freeze()  # a look at what was imported would copy its pages, which both processes share
    opened = _descriptors()
    resource_tracker.ensure_running()
    launching: Any = util  # Python knows no option for it either

    def fork(_: str, __: list[str], passed: Sequence[int]) -> int:
        """Do in a fork what Python would let a new interpreter do."""
        sys.stdout.flush()
        if (pid := os.fork()) != 0:
            return pid
        _serve(passed, _descriptors() - opened)

    interpreter, launching.spawnv_passfds = launching.spawnv_passfds, fork
    try:
        start_server()
    finally:
        launching.spawnv_passfds = interpreter


def start_server() -> None:
    """Start the server where none runs; vLLM need not be imported here, but its environment has to be prepared."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_modules())
    forkserver.ensure_running()


def _modules() -> list[str]:
    import torch

    return [*IMPORTED, GPU_WORKER if torch.cuda.is_available() else CPU_WORKER]


def _descriptors() -> set[int]:
    # The one by which they are listed is closed by then.
    return {int(one) for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}")}


def _serve(passed: Sequence[int], opened: set[int]) -> NoReturn:
    """Be the server until the service and all forks have closed their ends of the pipe that is among `passed`."""
    try:
        _call_this_process("fork server")
        for descriptor in opened.difference(passed):
            os.close(descriptor)
        serving: Any = forkserver
        serving._forkserver = forkserver.ForkServer()  # as a new interpreter has it: this one's lock is taken
        serving.main(*passed, preload=[])
    finally:  # also of its end, which is a SystemExit: what the service has to do at its own is not done here
        if failed := not isinstance(sys.exc_info()[1], SystemExit):
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(failed)


def _call_this_process(name: str) -> None:
    """Set what `ps` and `top` call it: its command line is that of the service."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


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
