"""The locks hold all that pyproject.toml asks for, with hashes, for any index."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[1]


def test_the_lock_holds_every_dependency_with_its_hashes() -> None:
    lock = (PROJECT / "requirements.lock").read_text()
    entries = re.findall(
        r"^([a-z0-9-]+)==([^\s;]+).*\\\n((?:    --hash=sha256:[0-9a-f]{64}.*\n)+)", lock, re.M
    )
    assert len(entries) == len(re.findall(r"^[^\s#]", lock, re.M))
    versions = {name: version for name, version, _hashes in entries}
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[requirement.name.replace("_", "-")]), text


@pytest.mark.parametrize("name", ["requirements.lock", "scripts/uv-requirements.txt"])
def test_a_lock_names_no_host_that_a_user_may_not_reach(name: str) -> None:
    lock = (PROJECT / name).read_text()
    assert "--hash=" in lock
    assert not re.search(r"://|--index-url|--find-links", lock)
