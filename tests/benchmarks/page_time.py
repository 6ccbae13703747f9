"""Report pages: seconds to write, megabytes, seconds until a browser has drawn them.

``python tests/benchmarks/page_time.py`` needs Chromium and chromedriver. A page is opened three
times; the median counts.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser.chromium import chromium, until

from axonn_tune.cli.main import main

PAGES = {
    "251 grids": ["--gpus", "1024", "--model", "80b"],
    "5,000 candidates": [
        *("--gpus", "1024", "--model", "80b", "--order", "all", "--every-configuration")
    ],
    "5,000 of all strategies, 405B": [
        *("--gpus", "16384", "--model", "llama3-405b", "--machine", "dgx-h100"),
        *("--strategy", "all", "--every-configuration"),
    ],
}
OPENED = 3


def drawn_seconds(page):
    """Return the time from the start of the load until the page's script has drawn everything."""
    with chromium() as chrome:
        chrome.get(page.as_uri())
        until(lambda: chrome.execute_script("return document.documentElement.dataset.ready"))
        return chrome.execute_script("return window.readyAfter") / 1e3


if __name__ == "__main__":
    print(f"{'page':<32}{'written s':>10}{'MB':>7}{'drawn s':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for name, options in PAGES.items():
            page, start = Path(folder) / "page.html", time.perf_counter()
            main(["report", *options, "--quiet", "--output", str(page)])
            written = time.perf_counter() - start
            drawn = median(drawn_seconds(page) for _ in range(OPENED))
            print(f"{name:<32}{written:>10.1f}{page.stat().st_size / 1e6:>7.2f}{drawn:>9.2f}")
