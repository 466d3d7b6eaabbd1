"""The plug-ins that docs/plugins.md shows, as files."""

from pathlib import Path

from tests.pages import snippets

PAGE = Path(__file__).parent.parent / "docs/plugins.md"


def plugins_of_page(folder: Path) -> list[Path]:
    """Write the files of docs/plugins.md, whose first lines have their names, and return their paths."""
    files = []
    for snippet in snippets(PAGE.read_text(), "docs/plugins.md"):
        if snippet.language == "python":
            file = folder / snippet.text.partition("\n")[0].removeprefix("# ")
            file.write_text(snippet.text)
            files.append(file)
    return files
