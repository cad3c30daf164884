"""The tree stays as easy to enter as it is: these numbers only fall."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL_WITH_ONE_IMPORTER = 4
FRAGMENTS = 0
LARGEST_IMPORT_SHARE = {"services/coordinator": 0.09, "services/trainer": 0.09}
MOST_MODULES = {"services/coordinator": 108, "services/trainer": 85}
CONFIG = ROOT / "libs" / "core" / "src" / "flotilla_core" / "config"
MOST_CONFIG_MODULES = 12


@pytest.fixture(scope="module")
def tree_figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tree_figures", ROOT / "scripts" / "tree_figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def modules(tree_figures: ModuleType) -> list[Any]:
    return list(tree_figures.read_tree(ROOT))


def test_a_small_module_with_one_importer_belongs_to_its_importer(
    tree_figures: ModuleType, modules: list[Any]
) -> None:
    small = tree_figures.small_with_one_importer(modules)
    names = "\n".join(str(module.path) for module in small)
    assert len(small) == SMALL_WITH_ONE_IMPORTER, f"put it into its importer, or lower the number:\n{names}"


def test_docstrings_become_sentences(modules: list[Any]) -> None:
    count = sum(len(module.fragments) for module in modules)
    assert count == FRAGMENTS, "write a sentence (scripts/tree_figures.py --fragments), or lower the number"


def test_no_packages_import_each_other_in_a_circle(tree_figures: ModuleType, modules: list[Any]) -> None:
    assert tree_figures.circle_of_packages(modules) == []


@pytest.mark.parametrize("package", sorted(MOST_MODULES))
def test_a_service_is_spread_over_no_more_modules(
    tree_figures: ModuleType, modules: list[Any], package: str
) -> None:
    small = tree_figures.small_with_one_importer(modules)
    now = tree_figures.figures([module for module in modules if module.package == package], small)
    assert now.modules <= MOST_MODULES[package]
    assert now.import_share <= LARGEST_IMPORT_SHARE[package]


def test_the_configuration_is_read_in_few_modules() -> None:
    assert len([path for path in CONFIG.glob("*.py") if path.stem != "__init__"]) <= MOST_CONFIG_MODULES
