"""The real command refuses a model's own code without a question, with and without a terminal, and stops at once."""

import json
import re
import shutil
from pathlib import Path

from tests.commands.terminal import terminal

# Nothing is ever typed. The last line is this sentence, and there is neither a question nor a traceback before it.
REASON = "it needs code that comes with the model (auto_map), and oaiserve never runs such code"
REFUSED = rf"(?s)\A(?!.*(\[y/N\]|Traceback))(.*\n)?oaiserve: [^\n]*{re.escape(REASON)}\n\Z"


def test_a_model_with_its_own_code_is_refused_without_a_question(small_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small_model, tmp_path / "model")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    with terminal("serve", str(folder), "--port", "0", "--log-level", "error") as screen:
        screen.shows(REFUSED)
    assert screen.process.returncode == 2
    assert not (tmp_path / "ran").exists()
