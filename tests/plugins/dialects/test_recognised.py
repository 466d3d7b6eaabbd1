"""Tests that a server chooses the dialects that ship by name, and imports them only for models that may call tools."""

import subprocess
import sys

import pytest

from oaiserve.config import OptionError
from oaiserve.plugins.dialects import families
from oaiserve.routes.dialects.dialect import check_name
from tests.plugins.dialects.known import FAMILIES


@pytest.mark.parametrize("name", ["auto", "none", *sorted({family.name for family in FAMILIES})])
def test_each_dialect_can_be_chosen_by_its_name(name: str) -> None:
    check_name(name, [families()])


def test_unknown_dialect_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="--tool-call-parser is 'hermis', but must be one of auto, none, apertus, .*"):
        check_name("hermis", [families()])


@pytest.mark.parametrize("reads_calls", [True, False])
def test_no_dialect_is_imported_where_no_calls_are_read(*, reads_calls: bool) -> None:
    code = (
        "import sys, oaiserve.app; from oaiserve.plugin_loading import import_early, own_plugins; "
        f"import_early(own_plugins(), reads_calls={reads_calls}); "
        "print(any(name.startswith('oaiserve.plugins.dialects.') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == f"{reads_calls}\n"
