"""The table of a stack is the same wherever it is made, holds no secret, and is what every launcher starts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from flotilla_core.config import StackConfig, dump_yaml, load, load_text
from flotilla_core.errors import FlotillaError, InvalidConfig
from flotilla_core.gangs import spread_gangs
from flotilla_launch.cluster import apart, nodes_of
from flotilla_launch.environment import presentable, resolved
from flotilla_launch.gpus import Gpus
from flotilla_launch.launcher import planned
from flotilla_launch.placement import difference
from flotilla_launch.ray.nodes import RayNodes
from flotilla_launch.ray.nodes import check as check_ray
from flotilla_launch.slurm.job import AGENT_STARTS, Job, SlurmNodes, check, script
from flotilla_launch.state import LauncherFile
from flotilla_launch.table import Endpoints, Row, ThisHost, agent_rows, table_of
from flotilla_testing.scripts import loaded

ROOT = Path(__file__).resolve().parents[3]
BIN = Path("/opt/flotilla/bin")
STACK = """
name: chat
model: /models/chat
state_dir: /shared/flotilla
bind: {host: 0.0.0.0, port: 7000}
"""


def stack(text: str = "") -> StackConfig:
    return load_text(StackConfig, STACK + text)


def local(config: StackConfig, *gpus: str) -> list[Row]:
    return table_of(config, ThisHost(Gpus(gpus)), directory=config.state_dir / config.name, executables=BIN)


def on_slurm(config: StackConfig) -> list[Row]:
    return table_of(config, SlurmNodes(config), directory=config.state_dir / config.name, executables=BIN)


def sbatch(config: StackConfig) -> str:
    table = on_slurm(config)
    return script(config, table, Job(config.name, config.state_dir / config.name, "m", BIN), nodes_of(table))


def test_a_command_is_complete_once_the_addresses_are_known() -> None:
    row = next(row for row in local(stack()) if row.name == "coordinator")
    command = row.command_at(Endpoints("tls://10.0.0.1:4222", "https://10.0.0.1:7000"))
    assert command[:5] == [
        str(BIN / "flotilla-coordinator"),
        "--name",
        "coordinator",
        "--stack",
        "/shared/flotilla/chat/stack.yaml",
    ]
    assert command[5:] == [
        *("--nats", "tls://10.0.0.1:4222", "--otlp", "https://10.0.0.1:7000", "--port", "7000")
    ]
    assert row.resources.ports == (7000,)


def test_gpus_are_named_by_node_and_index() -> None:
    config = stack("trainer: {nproc: 2}\ngenerator: {replicas: 2}\n")
    here = {row.name: row.resources.gpus for row in local(config, "0", "1", "2", "3")}
    assert here["trainer"] == ("localhost:0", "localhost:1")
    assert (here["generator-0"], here["generator-1"]) == (("localhost:2",), ("localhost:3",))
    assert here["coordinator"] == ()
    there = {
        row.name: row.resources.gpus
        for row in on_slurm(config.model_copy(update={"slurm": stack("slurm: {gpu: gpu}").slurm}))
    }
    assert there["trainer"] == ("trainer:0", "trainer:1")
    assert there["generator-1"] == ("generator-1:0",)


def test_a_gang_and_a_generator_have_a_node_of_their_own_and_the_rest_shares_the_head() -> None:
    config = stack(
        "trainer: {replicas: 2}\ncritic: {replicas: 1}\ngenerator: {replicas: 2}\nreward: {replicas: 2}\n"
    )
    nodes = {row.name: row.node for row in on_slurm(config)}
    assert {name for name, node in nodes.items() if node == "head"} == {
        "nats",
        "coordinator",
        "reward-0",
        "reward-1",
    }
    assert all(node == name for name, node in nodes.items() if node != "head")
    assert nodes_of(on_slurm(config))[0] == "head"


def test_services_that_are_placed_together_are_one_component_with_the_sum_of_their_resources() -> None:
    config = stack(
        "slurm: {nodes: {trainer: head}, head: {cpus: 2, memory_mib: 1000}, trainer: {cpus: 3, memory_mib: 500}}"
    )
    text = sbatch(config)
    assert nodes_of(on_slurm(config)) == ["head", "generator-0"]
    assert "# head: nats, trainer, coordinator, reward-0\n" in text
    assert text.count("#SBATCH hetjob\n") == 1
    assert "#SBATCH --cpus-per-task=5\n#SBATCH --mem=1500M\n" in text
    assert "srun --het-group=0 --nodes=1 --ntasks=1 --cpus-per-task=5 " in text


def test_the_components_of_the_job_are_the_nodes_of_the_table() -> None:
    """What an agent starts is the rows of its node, so the job places the whole table and nothing else."""
    config = stack("generator: {replicas: 3}\ntrainer: {replicas: 2}\n")
    table = on_slurm(config)
    lines = [line for line in sbatch(config).splitlines() if " srun --het-group=" in line]
    told = [line.partition("--node ")[2].split()[0] for line in lines]
    assert told == nodes_of(table)
    assert sorted(row.name for node in told for row in table if row.node == node) == sorted(
        r.name for r in table
    )


def test_the_node_of_a_component_is_given_back_when_its_agent_has_ended(tmp_path: Path) -> None:
    """Slurm itself would keep it until the whole job ends; the head's ends with the script."""
    wait = 'while [ "$(grep -c + calls)" -lt 2 ]; do sleep 0.05; done'
    for name, then in (("srun", f'case "$*" in *"--node head"*) {wait};; esac'), ("scancel", "")):
        (tmp_path / name).write_text(f'#!/bin/bash\ncd {tmp_path}\necho "{name} $*" >> calls\n{then}\n')
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    text = sbatch(stack())
    subprocess.run(["bash"], input=text, text=True, env=variables, timeout=20, check=True)
    ended = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("scancel")]
    assert sorted(ended) == ["scancel 7+1", "scancel 7+2"]


def test_a_stack_on_one_node_is_a_plain_job() -> None:
    text = sbatch(stack("slurm: {nodes: {trainer: head, generator-0: head}}"))
    assert "hetjob" not in text
    assert "--het-group" not in text


@pytest.mark.parametrize(
    ("fails", "tries"), [("0", 1), ("1", 1), ("137", AGENT_STARTS + 1)], ids=["told", "gave up", "killed"]
)
def test_an_agent_that_was_killed_is_started_again_and_no_other(
    fails: str, tries: int, tmp_path: Path
) -> None:
    """The script itself runs, with an `srun` that ends as told."""
    fake = tmp_path / "srun"
    fake.write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/calls\nexit {fails}\n')
    fake.chmod(0o755)
    text = sbatch(stack("slurm: {nodes: {trainer: head, generator-0: head}}"))
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash"], input=text, text=True, env=path, timeout=20, check=False)
    assert (tmp_path / "calls").read_text().count("--node head") == tries


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("bind: {host: 127.0.0.1}", "other nodes cannot reach"),
        ("bind: {host: 0.0.0.0, advertise_host: localhost}", "other nodes cannot reach"),
        ("bind: {host: 0.0.0.0, advertise_host: n1}", "all tell the same address"),
        ("generator: {attach: ['1.2.3.4:5']}", "attached, and there the launcher starts"),
        ("autoscale: {mode: act}", "cannot scale"),
        ("slurm: {nodes: {trainer-7: head}}", "places trainer-7"),
        ("slurm: {nodes: {coordinator: other}}", "coordinator is on head"),
        ("placement: colocated", "GPUs of their own"),
        ("state_dir: '/my files'", "sbatch cannot take"),
    ],
)
def test_what_cannot_run_on_several_nodes_is_refused_before_anything_is_submitted(
    text: str, what: str
) -> None:
    key = text.partition(":")[0]
    base = "".join(line for line in STACK.splitlines(keepends=True) if not line.startswith(f"{key}:"))
    with pytest.raises(InvalidConfig, match=what):
        check(load_text(StackConfig, base + text))


def test_a_cpu_share_goes_to_each_process_of_a_service() -> None:
    config = stack("trainer: {nproc: 2}\nslurm: {trainer: {cpus: 8}}\n")
    row = next(row for row in on_slurm(config) if row.name == "trainer")
    assert row.environment["OMP_NUM_THREADS"] == "4"


SECRETS = """
generator:
  environment:
    A: {file: FILE}
    B: {environment: OUTER}
    C: {command: [cat, FILE]}
    D: plain
    SOME_API_KEY: literal-secret
    URL: http://user:literal-secret@host/
"""


def with_secrets(folder: Path) -> StackConfig:
    file = folder / "secret"
    file.write_text("file-secret\n")
    file.chmod(0o600)
    return stack(SECRETS.replace("FILE", str(file)))


def test_secrets_are_read_where_the_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTER", "outer-secret")
    row = next(row for row in local(with_secrets(tmp_path)) if row.name == "generator-0")
    assert resolved(row.environment, "generator-0") == {
        "A": "file-secret",
        "B": "outer-secret",
        "C": "file-secret",
        "D": "plain",
        "SOME_API_KEY": "literal-secret",
        "URL": "http://user:literal-secret@host/",
    }


def test_no_secret_is_in_the_plan_the_job_or_the_difference_of_two_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTER", "outer-secret")
    config = with_secrets(tmp_path)
    seen = json.dumps([row.as_dict() for row in on_slurm(config)]) + sbatch(config)
    seen += dump_yaml(presentable(config))
    seen += "".join(difference(config, stack())) + "".join(difference(stack(), config))
    assert "-secret" not in seen.replace(str(tmp_path), "")
    assert '"D": "plain"' in seen
    assert f'"A": "(from file {tmp_path}/secret)"' in seen


@pytest.mark.parametrize(
    "reference",
    [
        "{file: /nowhere/secret}",
        "{environment: NOT_SET_ANYWHERE}",
        "{command: [sh, -c, 'echo the-secret; echo the-secret >&2; exit 3']}",
        "{command: ['true']}",
        "{command: [/nowhere/program]}",
    ],
)
def test_a_secret_that_cannot_be_read_is_an_error_without_what_was_read(reference: str) -> None:
    config = stack(f"reward: {{environment: {{TOKEN: {reference}}}}}")
    row = next(row for row in local(config) if row.name == "reward-0")
    with pytest.raises(FlotillaError, match="TOKEN of reward-0") as caught:
        resolved(row.environment, row.name)
    assert "the-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{A: 12345678}", "expected a text"),
        ("hunter2", "expected a mapping"),
        ("{A: {fil: /x}}", "did you mean generator.environment.A.file"),
        ("{A: {file: /x, environment: B}}", "name one of"),
        ("{A: {environment: 'hunter2!'}}", "the name of a variable"),
        ("{CUDA_VISIBLE_DEVICES: '0'}", "set by the launcher"),
        ("{'A B': x}", "no name of a variable"),
    ],
)
def test_a_wrong_environment_is_refused_and_not_repeated(value: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message) as caught:
        stack(f"generator: {{environment: {value}}}")
    assert "hunter2" not in str(caught.value)
    assert "12345678" not in str(caught.value)


async def test_the_local_launcher_starts_the_rows_of_the_table(stacks) -> None:
    config = stacks.config(
        generator={"replicas": 2, "environment": {"FROM_STACK": "yes", "SECRET": {"command": ["echo", "s"]}}}
    )
    paths = stacks.paths()
    result = await stacks.up(config)
    file = LauncherFile.read(paths.launcher_file)
    table = table_of(
        config, ThisHost(Gpus.of_host()), directory=paths.directory, executables=stacks.executables
    )
    endpoints = Endpoints(file.nats_url, file.otlp)
    running = {process.name: process.pid for process in result.processes}
    assert set(running) == {row.name for row in table}
    for row in table:
        words = Path(f"/proc/{running[row.name]}/cmdline").read_text().split("\0")[:-1]
        expected = row.command_at(endpoints)
        assert words[-len(expected) :] == expected
    environment = Path(f"/proc/{running['generator-1']}/environ").read_text().split("\0")
    assert {"FROM_STACK=yes", "SECRET=s"} <= set(environment)
    assert "SECRET=s" not in "".join(path.read_text() for path in paths.logs.glob("*.log"))


def test_the_example_of_a_job_is_fresh() -> None:
    path = ROOT / "scripts" / "generate_slurm_example.py"
    module = loaded(path)
    assert module.FILE.read_text() == module.text(), f"run python {path.relative_to(ROOT)}"


def on_ray(config: StackConfig) -> dict[str, list[Row]]:
    rows = table_of(config, RayNodes(config), directory=config.state_dir / config.name, executables=BIN)
    return {node: [row for row in rows if row.node == node] for node in nodes_of(rows)}


def test_on_ray_every_service_has_an_actor_and_nats_is_with_the_coordinator() -> None:
    nodes = on_ray(stack("trainer: {replicas: 2}\ngenerator: {replicas: 2}\nreward: {replicas: 2}\n"))
    assert [row.name for row in nodes.pop("head")] == ["nats", "coordinator"]
    assert {node: [row.name for row in rows] for node, rows in nodes.items()} == {
        name: [name]
        for name in ("generator-0", "generator-1", "trainer-0", "trainer-1", "reward-0", "reward-1")
    }


def test_on_ray_a_gang_is_one_bundle_with_a_gpu_for_each_rank() -> None:
    config = stack(
        "trainer: {nproc: 4}\ngenerator: {tensor_parallel_size: 2}\n"
        "ray: {gpus: true, trainer: {cpus: 8, memory_mib: 1000, resources: {fast: 0.5}}, generator: {cpus: 3}}\n"
    )
    nodes = on_ray(config)
    bundle = RayNodes(config).bundle
    assert bundle(nodes["trainer"]) == {"CPU": 8, "GPU": 4, "memory": 1000 << 20, "fast": 0.5}
    assert bundle(nodes["generator-0"]) == {"CPU": 3, "GPU": 2}
    assert bundle(nodes["head"]) == {"CPU": 1}
    assert nodes["trainer"][0].environment["OMP_NUM_THREADS"] == "2"
    assert nodes["trainer"][0].resources.gpus == tuple(f"trainer:{index}" for index in range(4))
    on_cpus = stack("trainer: {nproc: 4}\n")
    assert RayNodes(on_cpus).bundle(on_ray(on_cpus)["trainer"]) == {"CPU": 1}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("bind: {host: 127.0.0.1}", "other nodes cannot reach"),
        ("generator: {attach: ['1.2.3.4:5']}", "cannot run on Ray .*the launcher starts every service"),
        ("autoscale: {mode: act}", "a run cannot scale a stack there"),
        ("placement: colocated", "GPUs of their own"),
        ("ray: {trainer: {resources: {GPU: 1}}}", "GPU has a key of its own"),
        ("ray: {address: local}", "ray.address"),
    ],
)
def test_what_cannot_run_on_ray_is_refused_before_an_actor_is_asked_for(text: str, what: str) -> None:
    key = text.partition(":")[0]
    base = "".join(line for line in STACK.splitlines(keepends=True) if not line.startswith(f"{key}:"))
    with pytest.raises(InvalidConfig, match=what):
        check_ray(load_text(StackConfig, base + text))


def test_the_example_of_a_stack_on_ray_is_placed() -> None:
    config = load(StackConfig, [ROOT / "deploy" / "ray" / "stack.yaml"])
    check_ray(config)
    trainer = RayNodes(config).bundle(on_ray(config)["trainer"])
    assert trainer == {"CPU": 64, "GPU": 8, "memory": 800_000 << 20, "accelerator_type:H100": 0.001}


SPREAD = "trainer: {nproc: 3, hosts: [{name: a, ranks: 2}, {name: b, ranks: 1}], environment: {NCCL_DEBUG: WARN}}\n"


def test_the_plan_of_one_host_shows_agents_on_their_hosts_and_its_launcher_starts_none() -> None:
    config = stack(SPREAD)
    rows = agent_rows(config, directory=config.state_dir / config.name, executables=BIN)
    assert [(row.node, row.name, row.kind) for row in rows] == [("b", "trainer-at-b", "ranks")]
    command = rows[0].command_at(Endpoints("tls://10.0.0.1:4222", "https://10.0.0.1:7000"))
    assert command[:3] == [str(BIN / "flotilla-ranks"), "--name", "trainer-at-b"]
    assert rows[0].environment == {"NCCL_DEBUG": "WARN"}
    here = local(config, "0", "1", "2", "3")
    assert "trainer-at-b" not in [row.name for row in here]
    assert next(row for row in here if row.name == "trainer").resources.gpus == ("localhost:0", "localhost:1")


PLACED = (
    SPREAD + "slurm: {gpu: gpu, trainer: {cpus: 8}}\nray: {gpus: true, trainer: {cpus: 8, memory_mib: 100}}\n"
)


def test_on_slurm_each_host_of_a_gang_is_a_component_with_what_its_ranks_take() -> None:
    config = stack(PLACED)
    check(config)
    rows = {row.name: row for row in on_slurm(config)}
    assert [rows[name].node for name in ("trainer", "trainer-at-b")] == ["trainer", "trainer-at-b"]
    assert rows["trainer"].resources.gpus == ("trainer:0", "trainer:1")
    assert rows["trainer-at-b"].resources.gpus == ("trainer-at-b:0",)
    shares = {name: rows[name].environment["OMP_NUM_THREADS"] for name in ("trainer", "trainer-at-b")}
    assert shares == {"trainer": "4", "trainer-at-b": "8"}
    assert rows["trainer-at-b"].environment["NCCL_DEBUG"] == "WARN"
    text = sbatch(config)
    component = text[text.index(".trainer-at-b\n") :]
    assert (
        "#SBATCH --nodes=1\n#SBATCH --ntasks=1\n#SBATCH --cpus-per-task=8\n#SBATCH --gres=gpu:1\n"
        in component
    )
    assert "--node trainer-at-b " in text


def test_on_slurm_hosts_of_a_gang_may_share_nodes_with_others_and_not_with_each_other() -> None:
    check(stack(SPREAD).model_copy(update=with_nodes("{trainer-at-b: head}")))
    for nodes in ("{trainer-at-b: trainer}", "{trainer: head, trainer-at-b: head}"):
        with pytest.raises(InvalidConfig, match=r"hosts of trainer are on one node"):
            check(stack(SPREAD).model_copy(update=with_nodes(nodes)))


def with_nodes(nodes: str) -> dict[str, object]:
    return {"slurm": stack(f"slurm: {{nodes: {nodes}}}").slurm}


def test_on_ray_a_gang_on_several_hosts_is_one_group_with_a_bundle_for_each() -> None:
    config = stack(PLACED)
    check_ray(config)
    nodes, known = on_ray(config), RayNodes(config)
    assert known.gang("trainer") == known.gang("trainer-at-b") == ["trainer", "trainer-at-b"]
    assert known.gang("generator-0") == ["generator-0"]
    assert known.bundle(nodes["trainer"]) == {"CPU": 8, "GPU": 2, "memory": 100 << 20}
    assert known.bundle(nodes["trainer-at-b"]) == {"CPU": 8, "GPU": 1, "memory": 100 << 20}
    on_gloo = stack(PLACED.replace("nproc: 3", "nproc: 3, backend: gloo"))
    assert "GPU" not in RayNodes(on_gloo).bundle(on_ray(on_gloo)["trainer-at-b"])


@pytest.mark.parametrize("launcher", ["slurm", "ray"])
def test_the_plan_of_a_cluster_has_each_agent_once(launcher: str) -> None:
    rows = planned(stack(SPREAD), launcher, BIN)
    assert [row.name for row in rows if row.kind == "ranks"] == ["trainer-at-b"]
    assert rows[-1].command[:3] == (str(BIN / "flotilla-ranks"), "--name", "trainer-at-b")


def test_lost_nodes_of_a_gang_are_asked_for_together_and_others_apart() -> None:
    config = stack(SPREAD + "generator: {replicas: 2}\n")
    table = on_slurm(config)
    lost = ["generator-1", "trainer-at-b", "generator-0", "trainer"]
    gangs = spread_gangs(config)
    assert apart(table, gangs, lost) == [["trainer", "trainer-at-b"], ["generator-0"], ["generator-1"]]
    assert apart(table, gangs, ["trainer-at-b"]) == [["trainer-at-b"]]
    assert apart(table, gangs, []) == []
