"""A headless Chromium, driven by Debian's chromedriver."""

import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

# Without the flags after the first four it tries to reach its maker.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextmanager
def chromium():
    """A browser of one's own."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield chrome
    finally:
        chrome.quit()


@pytest.fixture(scope="session")
def open_page():
    """A context manager that opens a file and waits until its script has drawn it."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        if os.environ.get("CI"):
            pytest.fail("CI needs Debian's chromium and chromium-driver")
        pytest.skip("no chromium and chromedriver here")

    @contextmanager
    def opened(path: Path, media=()):
        with chromium() as chrome:
            chrome.set_window_size(1400, 1000)
            features = [{"name": name, "value": value} for name, value in media]
            chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            chrome.get(path.as_uri())
            until(lambda: chrome.execute_script("return document.documentElement.dataset.ready"))
            yield chrome
            errors = [entry for entry in chrome.get_log("browser") if entry["level"] == "SEVERE"]
            assert errors == []

    return opened


def until(holds, seconds=30.0):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.02)
