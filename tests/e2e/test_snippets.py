"""Every snippet of the docs runs, page by page and in order, against one server with the demo model."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from oaiserve.checkpoints import demo
from oaiserve.storage.private import cache_folder
from tests import forking
from tests.deploy import promql
from tests.e2e.live import clean_environment, serve_process
from tests.e2e.snippets import REASONS, Session, check_commands, programs, typed
from tests.missing_plugins import plugins_of_commands
from tests.pages import PAGES, ROOT, Snippet, name_of, snippets

BY_PAGE = {name_of(page): snippets(page.read_text(), name_of(page)) for page in PAGES}
SNIPPETS = [snippet for page in BY_PAGE.values() for snippet in page]
# Pages that need a plug-in without naming a command of it. The gateway's folder also serves several models.
PLUGINS = {"docs/several-models.md": {"gateway"}, "docs/responses.md": {"responses"}}
COMMENT = re.compile(r"^\s*<!-- not run", re.MULTILINE)
FILE = re.compile(r"# (\w+\.py)\n")  # the first line of a snippet that readers are to save
LONGEST_SLEEP_SECONDS = 0.05


@pytest.fixture(scope="module")
def start_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Session]]:
    """Serve the demo model, and give a function that starts the session of a reader in a folder.

    The cache of readers has the models of this machine, and no server but theirs.
    """
    demo.fetched()
    home = tmp_path_factory.mktemp("home")
    cache = home / "cache"
    adapters = home / "adapters"
    cache.mkdir(mode=0o700)
    adapters.mkdir()
    for entry in cache_folder().iterdir():
        if entry.name != "servers":
            (cache / entry.name).symlink_to(entry)
    (home / ".curlrc").write_text("silent\nshow-error\nfail-with-body\n")
    environment = clean_environment() | {"HOME": str(home), "PYTHONPATH": str(ROOT), "OAISERVE_CACHE": str(cache)}
    fork_server = forking.ForkServer(environment) if forking.CAN_FORK else None
    environment["PATH"] = programs(home / "bin", fork_server and fork_server.address)
    # A short context ends answers that find no end of their own.
    flags = ("--max-model-len", "1024", "--kv-cache-memory", "256MiB", "--lora-dir", str(adapters))
    start = partial(forking.start, server=fork_server)
    with serve_process("demo", home / "log", *flags, env=environment, start=start) as server:
        address = urlsplit(server.url).netloc
        yield lambda folder: Session(folder, adapters, address, environment)


def needed_plugins(page: str) -> frozenset[str]:
    """Return the plug-ins that the snippets of a page need."""
    shell = [typed(snippet) for snippet in BY_PAGE[page] if snippet.language in ("sh", "console")]
    return plugins_of_commands("\n".join(shell)).union(PLUGINS.get(page, ()))


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.plugin(*needed_plugins(page))) for page, found in BY_PAGE.items() if found],
)
def test_snippets_of_page_run(
    page: str, start_session: Callable[[Path], Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, LONGEST_SLEEP_SECONDS)))
    for snippet in BY_PAGE[page]:
        if (file := FILE.match(snippet.text)) is not None:
            (tmp_path / file[1]).write_text(snippet.text)  # A command above it may name it.
    with start_session(tmp_path) as session:
        for snippet in BY_PAGE[page]:
            try:
                session.check(snippet)
            except Exception as error:
                pytest.fail(f"{snippet} does not run: {type(error).__name__}: {error}\n{snippet.text}", pytrace=False)


def test_snippets_that_are_not_run_have_a_known_reason() -> None:
    """Every such comment belongs to a fence, and every reason is in use. Most snippets that are commands do run."""
    reasons = [snippet.reason for snippet in SNIPPETS if snippet.reason is not None]
    assert set(reasons) == REASONS
    assert len(reasons) == sum(len(COMMENT.findall(page.read_text())) for page in PAGES)
    programs = [snippet for snippet in SNIPPETS if snippet.language in ("sh", "console", "python")]
    left_out = [snippet for snippet in programs if snippet.reason not in (None, "`make clients`")]
    assert 2 * len(left_out) < len(programs), f"{len(left_out)} of {len(programs)} are not run"


def test_python_snippets_know_their_names(tmp_path: Path) -> None:
    """Even a snippet that is not run defines every name that it uses."""
    for page, page_snippets in BY_PAGE.items():
        lines = "\n".join(snippet.text for snippet in page_snippets if snippet.language == "python")
        (tmp_path / f"{page.replace('/', '-')}.py").write_text(lines)
    command = [Path(sys.executable).parent / "ruff", "check", "--isolated", "--no-cache", "--select", "F821", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_queries_name_metrics_that_exist() -> None:
    queries = [snippet for snippet in SNIPPETS if snippet.language == "promql"]
    assert {str(query): promql.unknown_names(query.text) for query in queries} == {str(query): [] for query in queries}


@pytest.mark.prometheus
def test_promtool_reads_queries(tmp_path: Path) -> None:
    queries = [snippet.text for snippet in SNIPPETS if snippet.language == "promql"]
    rules = [{"record": f"docs:query_{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "docs", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "commands",
    ["oaiserve serve demo --no-such-flag", "python -m tools.kills --no-such-flag", "make no-such-target", "if true"],
)
def test_wrong_command_is_found_without_running_it(commands: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check_commands(commands, tmp_path)


def test_snippet_has_the_reason_above_it() -> None:
    page = "# T\n\n<!-- not run: needs a GPU -->\n```sh\na\n```\n\n- b:\n\n  ```json\n  {}\n  ```\n"
    assert snippets(page, "p") == [Snippet("p", 4, "sh", "a\n", "needs a GPU"), Snippet("p", 10, "json", "{}\n", None)]


def test_pages_need_the_plugins_of_their_commands() -> None:
    """Without the folder of the gateway, `oaiserve route` is unknown, and its pages are skipped."""
    assert needed_plugins("docs/gateway.md") == {"gateway"}
    assert needed_plugins("docs/several-models.md") == {"gateway"}
    assert needed_plugins("docs/start.md") == frozenset()
    assert BY_PAGE.keys() >= PLUGINS.keys()
    assert plugins_of_commands("KEY=a oaiserve route --port 1 & oaiserve serve demo; oaiserve keys") == {
        "gateway",
        "keys",
    }
    assert plugins_of_commands("oaiserve serve demo --served-model-name route") == frozenset()


def test_failing_snippet_is_found(start_session: Callable[[Path], Session], tmp_path: Path) -> None:
    session = start_session(tmp_path)
    session.check(Snippet("p", 1, "sh", "curl http://127.0.0.1:8000/v1/models > file", None))
    session.check(Snippet("p", 2, "python", "from pathlib import Path\nfound = Path('file').read_text()", None))
    session.check(Snippet("p", 3, "python", "assert 'demo' in found", None))
    session.check(Snippet("p", 4, "sh", "nvidia-smi > file", "needs a GPU"))
    for language, text in {
        "sh": "curl http://127.0.0.1:8000/nothing",
        "console": "$ cat nothing\nsomething",
        "python": "nothing",
        "json": "{]",
        "yaml": "a: [",
        "toml": "no-such-setting = 1",
        "nginx": "location",
    }.items():
        with pytest.raises(Exception, match=r"."):
            session.check(Snippet("p", 5, language, text, None))
