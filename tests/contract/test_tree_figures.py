"""The tree stays as easy to enter as it is: these numbers only fall."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flotilla_testing.scripts import loaded

ROOT = Path(__file__).resolve().parents[2]
SMALL_WITH_ONE_IMPORTER = 3
FRAGMENTS = 0
LARGEST_SHARE_OF_ATTRIBUTE_FRAGMENTS = 0.05
CIRCLES_OF_MODULES: list[list[str]] = []
LEAST_MEDIAN, MOST_MEDIAN = 110, 260
P90_LINES = 400
LONGEST = 600
LARGEST_IMPORT_SHARE = 0.09
CONFIG = ROOT / "libs" / "core" / "src" / "flotilla_core" / "config"
MOST_CONFIG_MODULES = 15


@pytest.fixture(scope="module")
def tree_figures() -> ModuleType:
    return loaded(ROOT / "scripts" / "tree_figures.py")


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


def test_no_further_modules_import_each_other_in_a_circle(
    tree_figures: ModuleType, modules: list[Any]
) -> None:
    assert tree_figures.circles_of_modules(modules) == CIRCLES_OF_MODULES


def test_a_circle_is_found_where_only_functions_import(tree_figures: ModuleType, tmp_path: Path) -> None:
    sources = {
        "one": "def act():\n    from a.two import x\n",
        "two": "import a.three\n",
        "three": "from a import one\n",
    }
    for name, text in (sources | {"four": "from a import one\n"}).items():
        file = tmp_path / "libs" / "a" / "src" / "a" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert tree_figures.circles_of_modules(tree_figures.read_tree(tmp_path)) == [
        ["a.one", "a.three", "a.two"]
    ]


def test_modules_are_ideas_that_a_person_can_hold(tree_figures: ModuleType, modules: list[Any]) -> None:
    """However many there are: a new capability gets modules of its own."""
    now = tree_figures.figures(modules, tree_figures.small_with_one_importer(modules))
    assert LEAST_MEDIAN <= now.median_lines <= MOST_MEDIAN
    assert now.p90_lines <= P90_LINES and now.longest <= LONGEST
    assert now.import_share <= LARGEST_IMPORT_SHARE


def test_the_configuration_is_read_in_few_modules() -> None:
    assert len([path for path in CONFIG.glob("*.py") if path.stem != "__init__"]) <= MOST_CONFIG_MODULES


def test_docstrings_of_attributes_stand_alone(tree_figures: ModuleType, modules: list[Any]) -> None:
    names = {module.package for module in modules if module.counts}
    packages = {name: [module for module in modules if module.package == name] for name in names}
    shares = {name: tree_figures.figures(own, []).attribute_share for name, own in packages.items()}
    above = sorted(name for name, share in shares.items() if share > LARGEST_SHARE_OF_ATTRIBUTE_FRAGMENTS)
    assert above == [], "say what each attribute is (scripts/tree_figures.py --fragments)"
