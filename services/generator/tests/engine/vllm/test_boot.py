"""Claims about how the vLLM engine is started; the engine itself is not."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from flotilla_core.config.generators import GeneratorConfig
from flotilla_core.errors import InvalidConfig
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.vllm.boot import (
    booted,
    check_options,
    engine_arguments,
    engine_share,
    graph_sizes,
    prepare_environment,
    require_quantization,
)


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    return bool(request.param)


def test_an_engine_compiles_on_gpus_unless_the_stack_says_otherwise(gpu: bool) -> None:
    assert booted(lambda eager: eager, GeneratorConfig()) is not gpu
    for asked in (True, False):
        assert booted(lambda eager: eager, GeneratorConfig(enforce_eager=asked)) is asked


def test_an_engine_that_cannot_compile_starts_without_and_names_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def boot(eager: bool) -> str:
        if not eager:
            raise RuntimeError("no C compiler")
        return "started"

    with capture_logs() as lines:
        assert booted(boot, GeneratorConfig()) == "started"
    (line,) = lines
    assert "no C compiler" in line["why"] and "generator.enforce_eager" in line["next_step"]
    with pytest.raises(RuntimeError, match="no C compiler"):
        booted(boot, GeneratorConfig(enforce_eager=False))


def test_graphs_reach_as_far_as_the_samples_that_run_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config, checkpoint = GeneratorConfig(max_running_samples=700), Checkpoint(tmp_path, {})
    arguments = engine_arguments(config, checkpoint, eager=False)
    (sizes,) = arguments["compilation_config"].values()
    assert sizes[-1] == 700 and sizes == sorted(set(sizes))
    assert "compilation_config" not in engine_arguments(config, checkpoint)


def test_only_a_stack_that_asks_for_it_gets_an_allocator_that_can_sleep(gpu: bool, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, {})
    config = GeneratorConfig(max_model_tokens=64)
    assert "enable_sleep_mode" not in engine_arguments(config, checkpoint)
    asked = engine_arguments(config.model_copy(update={"sleep_while_training": True}), checkpoint)
    assert asked.get("enable_sleep_mode", False) is gpu, "a CPU has no such allocator"
    with pytest.raises(InvalidConfig, match=r"set generator\.sleep_while_training instead"):
        check_options(["enable_sleep_mode"], ["enable_sleep_mode"])


@pytest.mark.parametrize("most", [1, 3, 8, 100, 1024, 5000])
def test_a_step_is_never_filled_up_by_more_than_an_eighth_above_64_samples(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes[0] == 1 and sizes[-1] == most and sizes == sorted(set(sizes))
    for before, size in pairwise(sizes):
        assert size - before <= max(8, before / 8)


def test_quantized_matrices_need_a_gpu_that_multiplies_them(
    gpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    config = GeneratorConfig(quantization="fp8")
    with pytest.raises(InvalidConfig, match=r"A100 has 8\.0" if gpu else "needs a GPU") as caught:
        require_quantization(config)
    assert "generator.quantization" in str(caught.value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    if gpu:
        require_quantization(config)
        assert engine_arguments(config, Checkpoint(tmp_path, {}))["quantization"] == "fp8_per_channel"
    require_quantization(GeneratorConfig())


@pytest.mark.parametrize("gib", [None, 2.5])
def test_a_kv_cache_has_the_size_that_the_stack_says_on_gpus_and_cpus(
    gpu: bool, gib: float | None, tmp_path: Path
) -> None:
    config = GeneratorConfig(kv_cache_gib=gib, max_model_tokens=64)
    arguments = engine_arguments(config, Checkpoint(tmp_path, {}))
    default = None if gpu else 1 << 30
    assert arguments.get("kv_cache_memory_bytes") == (default if gib is None else int(gib * (1 << 30)))


@pytest.mark.parametrize(
    ("said", "share"),
    [({}, 0.81), ({"memory_fraction": 0.9}, 0.9), ({"kv_cache_gib": 2.0}, 0.9), ({"dtype": "float32"}, 0.69)],
)
def test_an_engine_leaves_room_for_a_second_copy_of_its_weights_where_the_stack_says_nothing(
    said: dict[str, Any], share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    checkpoint = Checkpoint(tmp_path, {})
    vars(checkpoint)["tensors"] = {f"w{index}": (2, 10**8) for index in range(30)}
    config = GeneratorConfig(**{"dtype": "bfloat16", "max_model_tokens": 64} | said)
    found = engine_share(config, checkpoint, 100 * 10**9)
    assert found == pytest.approx(share, abs=0.04)
    assert engine_arguments(config, checkpoint, share=found)["gpu_memory_utilization"] == found


def test_an_engine_whose_weights_arrive_in_place_leaves_no_room_for_a_second_copy(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, {})
    vars(checkpoint)["tensors"] = {f"w{index}": (2, 10**8) for index in range(30)}
    shares = [
        engine_share(GeneratorConfig(dtype="bfloat16", apply_weights=how), checkpoint, 100 * 10**9)
        for how in ("prefetch", "direct")
    ]
    assert shares[0] < 0.82 and shares[1] == 0.9


def test_a_second_copy_without_room_beside_the_weights_takes_nothing_from_the_engine(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, {})
    vars(checkpoint)["tensors"] = {"w": (22, 10**9)}
    assert engine_share(GeneratorConfig(dtype="bfloat16"), checkpoint, 80 * 10**9) == 0.9


def test_all_that_a_start_compiles_is_kept_unless_the_user_has_a_place_for_it(
    gpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment = {"TRITON_CACHE_DIR": "/mine"}
    monkeypatch.setattr(os, "environ", environment)
    prepare_environment(GeneratorConfig(), tmp_path)
    assert environment["VLLM_CACHE_ROOT"] == environment["FLASHINFER_WORKSPACE_BASE"] == str(tmp_path)
    assert environment["TRITON_CACHE_DIR"] == "/mine"


def test_logits_of_a_gpu_are_never_rounded_unless_the_user_says_so(gpu: bool, tmp_path: Path) -> None:
    def overrides(**said: Any) -> Any:
        config = GeneratorConfig(**{"dtype": "bfloat16", "max_model_tokens": 64} | said)
        return engine_arguments(config, Checkpoint(tmp_path, {})).get("hf_overrides", {})

    whole = {"head_dtype": "float32"} if gpu else {}
    theirs = {"rope_theta": 1e6}
    assert overrides() == whole
    assert overrides(engine_options={"hf_overrides": theirs}) == whole | theirs
    rounded = {"hf_overrides": {"head_dtype": "model"}}
    assert overrides(engine_options=rounded) == rounded["hf_overrides"]
    assert overrides(dtype="float32") == overrides(quantization="fp8") == {}


def test_options_of_the_stack_reach_vllm_and_win(gpu: bool, tmp_path: Path) -> None:
    options = {"block_size": 32, "max_num_batched_tokens": 4096}
    config = GeneratorConfig(max_model_tokens=64, engine_options=options)
    assert options.items() <= engine_arguments(config, Checkpoint(tmp_path, {})).items()
    check_options(options, {"block_size", "max_num_batched_tokens"})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("blok_size", r"engine_options\.blok_size is no engine argument .*; did you mean block_size\?"),
        ("max_num_seqs", r"a key of its own.* set generator\.max_running_samples instead"),
        ("logprobs_mode", r"logprobs_mode cannot be set: log-probabilities are those"),
    ],
)
def test_an_option_that_vllm_must_not_get_is_refused_by_name(option: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        check_options([option], {"block_size", "max_num_seqs", "logprobs_mode"})
