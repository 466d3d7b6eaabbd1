"""The plug-ins of the documentation, and the example of a package."""

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from oaiserve.engine.text.chat_template import ChatTemplate
from oaiserve.plugin_loading import dialects_of, load, rules_of
from oaiserve.routes.dialects.dialect import dialect_of
from tests.engine.doubles import TOKENIZER
from tests.plugin_door.imports import private_imports
from tests.plugin_door.modules import names_of_others
from tests.plugin_pages import plugins_of_page
from tests.records import record_at
from tests.routes.dialects.reading import TOOLS, Read, read, segments_of

ROOT = Path(__file__).parents[2]


def test_the_example_imports_public_modules() -> None:
    """import-linter checks the plug-ins of oaiserve."""
    (path,) = (ROOT / "examples").rglob("*.py")
    assert not private_imports(path)


def test_the_plugins_of_the_page_have_at_most_forty_lines_and_import_public_modules(tmp_path: Path) -> None:
    files = plugins_of_page(tmp_path)
    assert [file.name for file in files] == ["complete.py", "ends.py", "owl.py", "no_digits.py", "finch.py"]
    for file in files:
        assert file.read_text().count("\n") <= 40
        assert not private_imports(file)


def test_the_dialect_of_the_page_reads_and_writes_calls(tmp_path: Path, packages: Path) -> None:
    _, _, owl, *_ = plugins_of_page(tmp_path)
    (plugin,) = (each.plugin for each in load([str(owl)]) if each.plugin.name == "owl")
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}{# <owl> <tool_call> #}", {})
    family = dialect_of("auto", "auto", template, {}, partial(dialects_of, [plugin])).calls
    assert family is not None
    assert family.name == "owl"
    calls = [("get_time", '{"zone": "utc"}')] * 2
    written = family.written(calls)
    assert read(segments_of(family.parser(TOOLS), list(f"It is late.{written}"))) == Read("It is late.", "", calls)


def test_the_rule_of_the_page_forbids_digits(tmp_path: Path, packages: Path) -> None:
    *_, no_digits, _ = plugins_of_page(tmp_path)
    plugins = [each.plugin for each in load([str(no_digits)])]
    rules = rules_of(plugins, TOKENIZER)
    assert [rule.plugin for rule in rules] == ["no-digits"]
    ids = [
        number
        for number, text in enumerate(TOKENIZER.lone_texts(range(TOKENIZER.vocab_size)))
        if any(map(str.isdigit, text))
    ]
    logits = torch.zeros(TOKENIZER.vocab_size)
    rules[0].edit(logits, [])
    assert torch.isinf(logits).nonzero().flatten().tolist() == ids
    assert ids


def test_the_example_is_installed_by_pip_and_removed(packages: Path, tmp_path: Path) -> None:
    flags = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target", str(packages)]
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, str(ROOT / "examples/plugin")], check=True)
    settings = {"ledger": {"file": str(tmp_path / "ledger.csv")}}
    (ledger,) = (each for each in load(settings=settings) if each.plugin.name == "ledger")
    assert ledger.source == "oaiserve-ledger 1.0"
    assert ledger.plugin.observe is not None
    ledger.plugin.observe(record_at(0, 1, client="alice", prompt_tokens=5, completion_tokens=2))
    assert (tmp_path / "ledger.csv").read_text() == "alice,demo,finished,5,2\n"
    shutil.rmtree(packages / "oaiserve_ledger-1.0.dist-info")
    assert names_of_others() == {}
