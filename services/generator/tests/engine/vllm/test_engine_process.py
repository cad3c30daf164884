"""The server of forks, below a process like the service; a small module takes the place of vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SERVICE = """
import colorsys, os, socket, sys, time
from pathlib import Path
from flotilla_core.config.generators import GeneratorConfig
from flotilla_generator.engine.vllm import engine_process as it

def engine(taken):
    held = Path(f"/proc/{os.getppid()}/fd")
    print(colorsys.imported_by == os.getpid(), colorsys.imported_by, os.environ["LATER"], flush=True)
    print("held:", taken in {os.readlink(one) for one in held.iterdir()}, flush=True)

if __name__ == "__main__":
    colorsys.imported_by = os.getpid()
    it._modules = lambda: ["colorsys"]
    it.import_once(GeneratorConfig(), Path(sys.argv[1]))
    taken, os.environ["LATER"] = socket.socket(), "as it is now"
    for _ in range(2):
        fork = it.EngineContext().Process(target=engine, args=(os.readlink(f"/proc/self/fd/{taken.fileno()}"),))
        fork.start()
        fork.join()
    print("ended", fork.exitcode, flush=True)
    time.sleep(60)
"""


def test_the_server_is_a_fork_of_the_service_that_holds_nothing_of_it_and_ends_with_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "service.py").write_text(SERVICE)
    command = [sys.executable, str(tmp_path / "service.py"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        logged, *lines = iter(service.stdout.readline, "ended 0\n")
        service.kill()
        assert service.stdout.read() == ""  # the pipe closes when the server is gone, too
    assert "importing vLLM" in logged
    assert lines == [f"False {service.pid} as it is now\n", "held: False\n"] * 2
