"""The generated parts of the reference are those of the code."""

from __future__ import annotations

import pytest

from oaiserve.config import ServerOptions
from oaiserve.routes.bodies import ChatBody, CompletionBody
from oaiserve.telemetry import names
from tools import reference


@pytest.mark.parametrize(("page", "name"), reference.tables(), ids=lambda part: part)
def test_the_pages_have_the_tables_of_the_code(page: str, name: str) -> None:
    """If this fails, `python -m tools.reference` writes the tables again."""
    text = reference.tables()[page, name].strip()
    assert f"<!-- {name} -->\n\n{text}\n\n<!-- end of {name} -->" in (reference.FOLDER / page).read_text()


def test_every_flag_has_its_default_and_its_choices() -> None:
    table = reference.flags()
    assert f"| `--port` | `{ServerOptions().port}` | TCP port" in table
    assert "| `--prefix-cache`, `--no-prefix-cache` | `on` |" in table
    assert "| `--max-model-len` |  | Most tokens" in table
    assert "One of `none`, `int8`, `int4`. |" in table
    assert "--empty" not in table


def test_parameters_have_the_types_of_each_route() -> None:
    table = reference.parameters({"chat": ChatBody, "completions": CompletionBody})
    assert "| `logprobs` | boolean | boolean or integer |" in table
    assert "| `stop` | string or list of strings | string or list of strings |" in table
    assert "| `messages` | list of objects |  |" in table
    assert "| `echo` |  | boolean |" in table


def test_metrics_have_type_labels_and_help() -> None:
    table = reference.metrics([names.QUEUE_WAIT_SECONDS])
    assert table.splitlines()[2].startswith("| `oaiserve_queue_wait_seconds_total` | counter | `reason` | Time that")
