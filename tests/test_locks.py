"""The locks hold all that pyproject.toml asks for, with hashes, for any index."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[1]
DEV, ENGINE = "requirements-dev.lock", "scripts/llama-cpp-requirements.txt"
LOCKS = ["requirements.lock", DEV, ENGINE]
METADATA = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
EXTRAS = METADATA["optional-dependencies"]


def versions(name: str) -> dict[str, set[str]]:
    """The versions of every package that a lock names; all of its entries have hashes."""
    lock = (PROJECT / name).read_text()
    entries = re.findall(r"^([a-z0-9-]+)==([^\s;]+).*\\\n(?:    --hash=sha256:[0-9a-f]{64}.*\n)+", lock, re.M)
    assert len(entries) == len(re.findall(r"^[^\s#]", lock, re.M))
    return {package: {version for other, version in entries if other == package} for package, _ in entries}


def packages(requirements: list[str]) -> list[Requirement]:
    """The packages that are asked for, those of Outrider's own extras among them."""
    found = []
    for requirement in map(Requirement, requirements):
        own = requirement.extras if requirement.name == METADATA["name"] else set()
        found += [part for extra in own for part in packages(EXTRAS[extra])] or [requirement]
    return found


@pytest.mark.parametrize(
    ("name", "requirements"),
    [
        ("requirements.lock", METADATA["dependencies"] + EXTRAS["all"] + ["hatchling"]),
        (DEV, METADATA["dependencies"] + EXTRAS["dev"]),
        (ENGINE, EXTRAS["llama-cpp"]),
    ],
)
def test_a_lock_holds_every_dependency_with_its_hashes(name: str, requirements: list[str]) -> None:
    locked = versions(name)
    for requirement in packages(requirements):
        for version in locked[requirement.name.replace("_", "-")]:
            assert requirement.specifier.contains(version), requirement


def test_what_has_to_be_compiled_is_in_a_lock_of_its_own() -> None:
    assert "llama-cpp-python" in versions(ENGINE)
    assert "llama-cpp-python" not in versions("requirements.lock") | versions(DEV)


@pytest.mark.parametrize("name", [*LOCKS, "scripts/uv-requirements.txt"])
def test_a_lock_names_no_host_that_a_user_may_not_reach(name: str) -> None:
    lock = (PROJECT / name).read_text()
    assert "--hash=" in lock
    assert not re.search(r"://|--index-url|--find-links", lock)
