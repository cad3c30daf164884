"""`flotilla-launcher`: the supervisor process of one stack.

Usually `flotilla up` starts it detached. By hand it stays in the foreground: flotilla-launcher --stack
stack.yaml. With `--node` it is the agent of one node of a stack that an engine placed.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path


def main() -> None:
    """Bring the stack up, serve `LauncherService` until it is stopped, leave nothing behind."""
    from flotilla_core.files import keep_private, speak_utf8

    speak_utf8()
    gc.set_threshold(50_000)  # Nothing of an import is garbage.
    parser = argparse.ArgumentParser(
        prog="flotilla-launcher", description="Supervises the processes of one stack."
    )
    parser.add_argument("--stack", type=Path, required=True, help="stack file")
    parser.add_argument("--report-fd", type=int, help="gets one JSON line when the stack is up or has failed")
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="take over the processes that a launcher left when it died",
    )
    parser.add_argument(
        "--node", help="tend only the services of this node, where an engine placed the stack"
    )
    parser.add_argument("--mark", default="", help="placement that the node belongs to")
    arguments = parser.parse_args()

    import asyncio

    from flotilla_core.config import StackConfig, load
    from flotilla_core.disk import names_full_disk
    from flotilla_core.errors import FlotillaError
    from flotilla_launch.report import Report
    from flotilla_launch.serve import serve

    keep_private()
    report = Report(arguments.report_fd)
    try:
        stack = load(StackConfig, [arguments.stack], resolve_paths=True)
        executables = Path(sys.argv[0]).absolute().parent
        with names_full_disk("the launcher cannot write its files", stack.state_dir):
            if arguments.node:
                from flotilla_launch.agent import run_agent
                from flotilla_launch.slurm.job import SlurmNodes

                nodes = SlurmNodes(stack)
                sys.exit(run_agent(stack, nodes, arguments.node, arguments.mark, executables=executables))
            asyncio.run(serve(stack, report, executables=executables, take_over=arguments.take_over))
    except FlotillaError as error:
        report.failed(error)
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
