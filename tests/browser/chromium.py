"""A headless Chromium, driven by Debian's chromedriver."""

import os
import shutil
import time
from contextlib import contextmanager

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


def texts(chrome, selector):
    """The texts of all elements of a page that a selector finds."""
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    return chrome.execute_script(script, selector)


@pytest.fixture(scope="session")
def browser():
    """One browser for all tests; in CI it must be there."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        if os.environ.get("CI"):
            pytest.fail("CI needs Debian's chromium and chromium-driver")
        pytest.skip("no chromium and chromedriver here")
    with chromium() as chrome:
        yield chrome


@pytest.fixture(scope="session")
def open_page(browser):
    """A context manager that opens an address in a tab and waits until its script has drawn it."""

    @contextmanager
    def opened(address, media=()):
        with new_tab(browser):
            browser.set_window_size(1400, 1000)
            features = [{"name": name, "value": value} for name, value in media]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            browser.get(address)
            until(lambda: browser.execute_script("return document.documentElement.dataset.ready"))
            yield browser
            errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
            assert errors == []

    return opened


@contextmanager
def new_tab(chrome):
    """Open a tab, which has settings and a history of its own, and close it afterwards."""
    first = chrome.current_window_handle
    chrome.switch_to.new_window("tab")
    chrome.get_log("browser")  # What an earlier page said is read and forgotten.
    try:
        yield
    finally:
        chrome.close()
        chrome.switch_to.window(first)


def until(holds, seconds=30.0):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.02)
