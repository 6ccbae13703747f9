"""Renew the picture of the report page: ``python tests/browser/screenshot.py``."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser.chromium import chromium, until

from axonn_tune.cli.main import main

PICTURE = Path(__file__).parents[2] / "docs" / "report-page.png"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        main(["report", "--gpus", "1024", "--model", "80b", "--output", str(page)])
        with chromium() as chrome:
            chrome.set_window_size(1280, 1900)
            chrome.get(page.as_uri() + "#candidate=6")
            until(lambda: chrome.execute_script("return document.documentElement.dataset.ready"))
            chrome.save_screenshot(str(PICTURE))
