"""The lowest and newest versions of packages: which are chosen, and that pyproject.toml has a range of each."""

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tools.ranges import PACKAGES, Choice, by_end, chosen, pinned_version, requirement
from tools.server_process import ROOT


def choose(wanted: str, versions: str, tested: str, build: str | None = None) -> Choice:
    return chosen(Requirement(wanted), [Version(text) for text in versions.split()], Version(tested), build)


def test_the_lowest_and_the_newest_are_chosen_but_for_the_tested_one() -> None:
    assert choose("x>=1.1,<3", "3.0 2.5 2.0 1.1.0 1.0", "2.0") == Choice((Version("1.1.0"), Version("2.5")))
    assert choose("x>=1.1,<3", "3.0 2.5 1.1.0", "2.5") == Choice((Version("1.1.0"),))


def test_only_the_wanted_build_counts_and_what_it_lacks_is_noted() -> None:
    found = choose("x>=1.1", "2.1 2.0+cpu 2.0 1.1", "2.0", "cpu")
    assert found == Choice(
        (),
        (
            "x 1.1 is left out: pip's indexes don't have it as a build for 'cpu'",
            "x 2.1 is left out: pip's indexes don't have it as a build for 'cpu'",
        ),
    )
    found = choose("x>=1.1", "2.1+cpu 2.1 2.0+cpu 2.0 1.1.0+cpu 1.1.0", "2.0", "cpu")
    assert found == Choice((Version("1.1.0+cpu"), Version("2.1+cpu")))


def test_the_versions_of_one_end_are_tested_together() -> None:
    pinned = {"x": Version("2.0"), "y": Version("1.5")}
    versions = {"x": [Version("1.1"), Version("2.5")], "y": [Version("1.0")]}
    assert by_end(versions, pinned) == [{"x": Version("1.1"), "y": Version("1.0")}, {"x": Version("2.5")}]
    assert by_end({"x": []}, pinned) == []


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_have_a_range_with_the_pinned_version_and_tests(name: str) -> None:
    assert pinned_version(name) in requirement(name).specifier
    paths = [path for path in PACKAGES[name].tests if not path.startswith("tests/plugins/")]
    assert all((ROOT / path).exists() for path in paths)
