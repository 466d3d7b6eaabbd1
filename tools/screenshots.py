"""Takes the pictures of the live page in docs/images: python -m tools.screenshots

Serves the demo model, sends requests for two minutes, and opens the page in Chromium. Look at the pictures before you
commit them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from tools.server_process import exit_on_sigterm, running_oaiserve

FOLDER = Path(__file__).parent.parent / "docs" / "images"
DESK, PHONE = {"width": 1280, "height": 1100}, {"width": 390, "height": 844}
TALL = {"width": 1280, "height": 1800}  # for a request with all that is known of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=120, help="seconds of load before the first picture (default 120)"
    )
    parser.add_argument("--users", type=int, default=8, help="requests at a time (default 8)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pictures (default docs/images)")
    arguments = parser.parse_args()
    exit_on_sigterm()
    flags = ("--max-running", "5", "--kv-cache-memory", "64MiB")  # so small that some requests wait
    with running_oaiserve(*flags) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        load = ["--concurrency", str(arguments.users), "--num-requests", "100000", "--max-new-tokens", "30"]
        bench = subprocess.Popen(
            [sys.executable, "-m", "loadtest", "run", "--url", server.url, *load], stderr=subprocess.DEVNULL
        )
        try:
            time.sleep(arguments.seconds)
            take_all(browser, server.url, arguments.out)
        finally:
            bench.terminate()
        browser.close()


def take_all(browser: Browser, url: str, folder: Path) -> None:
    for scheme in ("light", "dark"):
        page = open_page(browser, url, DESK, scheme)
        page.locator("#requests button").nth(4).hover()
        page.screenshot(path=folder / f"dashboard-{scheme}.png")
    page = open_page(browser, url, TALL, "light")
    page.click("#by-duration")
    page.locator("#requests button").first.click()
    page.wait_for_selector("dialog[open] tr[data-phase]")
    page.locator("dialog[open]").screenshot(path=folder / "request.png")
    page = open_page(browser, url, PHONE, "light")
    page.screenshot(path=folder / "dashboard-phone.png")
    page.locator("#recent-title").evaluate("title => title.closest('section').scrollIntoView()")
    page.screenshot(path=folder / "dashboard-phone-requests.png")
    page = open_page(browser, url, DESK, "dark")
    page.click("#tab-playground")
    page.check("[name=kind][value=tools]")
    page.click("#send")
    page.wait_for_selector("#chat-detail:visible", timeout=120_000)
    page.screenshot(path=folder / "dashboard-playground.png", full_page=True)


def open_page(browser: Browser, url: str, viewport: Any, scheme: Any) -> Page:
    page = browser.new_context(viewport=viewport, color_scheme=scheme).new_page()
    page.goto(f"{url}/dashboard")
    page.wait_for_selector("#status[data-state=live]")
    page.wait_for_selector("#requests button")
    return page


if __name__ == "__main__":
    main()
