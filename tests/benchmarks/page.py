"""How long the page takes from a control to the bar, in a real browser.

    python tests/benchmarks/page.py [--steps 40]

A slider that is dragged asks ahead for its next values, so that most are known when they are reached; a value that is
typed is not. The time is the browser's own: from the event of the control to the bar in the document.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
from typing import Any

from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
JOB = "model=llama-2-7b&gpu=a100-40g&gpus=8&seq-len=4096&zero=3&recompute=full"
TAKE = """() => {
    const all = performance.getEntriesByName("memcalc-bar").map(item => item.duration);
    performance.clearMeasures("memcalc-bar");
    return all;
}"""
SHOWN = "document.body.dataset.shows === location.hash.slice(1)"
PAUSE = 700
"""Between two movements [ms]: what a hand needs to look at the bar."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    command = [sys.executable, "-m", "memcalc", "ui", "--no-open", "--port", "18965"]
    path = next(found for name in BROWSERS if (found := shutil.which(name)))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as api:
        try:
            address = re.findall(r"http://127\.0\.0\.1:\d+/", server.stdout.readline() if server.stdout else "")[0]
            browser = api.chromium.launch(executable_path=path, args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(f"{address}#{JOB}")
            page.locator(f'body[data-shows="{JOB}"]').wait_for(timeout=60_000)
            told("a slider, one key after the other", slid(page, steps))
            told("a value that is typed", typed(page, steps))
            browser.close()
        finally:
            server.terminate()


def slid(page: Any, steps: int) -> list[float]:
    """Move sliders by the keyboard."""
    page.evaluate(TAKE)
    for index in range(steps):
        page.locator("[data-slides]").nth(index % 3).focus()
        page.wait_for_timeout(PAUSE)
        page.keyboard.press("ArrowLeft" if index % 6 > 2 else "ArrowRight")
        settled(page)
    return list(page.evaluate(TAKE))


def typed(page: Any, steps: int) -> list[float]:
    """Type lengths that no control leads to."""
    page.evaluate(TAKE)
    for index in range(steps):
        page.fill("#o-seq-len", str(2000 + 128 * index))
        page.wait_for_timeout(PAUSE)
        settled(page)
    return list(page.evaluate(TAKE))


def settled(page: Any) -> None:
    """Wait until the answer to the job in the address is on the screen; the page's policy allows no function for it."""
    while not page.evaluate(SHOWN):
        page.wait_for_timeout(50)


def told(name: str, times: list[float]) -> None:
    if not times:
        print(f"{name}: no answer was in time")
        return
    times.sort()
    nine = times[int(0.9 * (len(times) - 1))]
    print(f"{name}: {len(times)} times, median {statistics.median(times):.0f} ms, 90% below {nine:.0f} ms")


if __name__ == "__main__":
    main()
