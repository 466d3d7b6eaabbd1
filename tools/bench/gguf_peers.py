"""Measures this server against llama.cpp's on the same GGUF files, in turns: python -m tools.bench.gguf_peers"""

from __future__ import annotations

import argparse
from pathlib import Path

from oaiserve.files import demo
from tools.bench import gguf_files, prepare
from tools.bench.servers import ServerSpec
from tools.bench.turns import CACHE_TOKENS, CLIENTS, measure_turns, report
from tools.markdown import add_publishing, publish, results_of
from tools.server_process import exit_on_sigterm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        default=[demo.NAME, gguf_files.LLAMA],
        choices=list(gguf_files.MODELS),
        help="default: the demo model and the 1B",
    )
    add("--formats", nargs="+", default=list(gguf_files.FORMATS), help="as llama.cpp's program names them")
    add("--repeats", type=int, default=3, help="rounds (default 3)")
    add("--no-repack", action="store_true", help="llama.cpp leaves the weights as they are in the file")
    add_publishing(parser, "gguf-peers")
    arguments = parser.parse_args()
    exit_on_sigterm()
    files = gguf_files.chosen(arguments.models, arguments.formats)

    def peer(path: Path) -> ServerSpec:
        return llama_cpp(path, *(["--no-repack"] if arguments.no_repack else []))

    results = results_of(arguments, lambda arguments: measure_turns(files, peer, arguments.repeats))
    publish(arguments, "gguf-peers", results, report(results))


def llama_cpp(path: Path, *flags: str) -> ServerSpec:
    program = str(prepare.llama_cpp() / "llama-server")
    sizes = ("--parallel", str(CLIENTS), "--ctx-size", str(CACHE_TOKENS))
    return ServerSpec("llama.cpp", "", (program, "--model", str(path), "--alias", demo.NAME, *sizes, *flags), (path,))


if __name__ == "__main__":
    main()
