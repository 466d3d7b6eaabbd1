"""The start of a child process, as far as it needs no model."""

from pathlib import Path

import pytest

from oaiserve.config import Config
from oaiserve.errors import StartupError
from oaiserve.scale.address import Address
from oaiserve.scale.children.process import start_on


async def test_socket_with_too_long_a_path_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="too long a path. Set TMPDIR"):
        await start_on(Config("demo"), Address.of_socket(tmp_path / ("x" * 100)))
