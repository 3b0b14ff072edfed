"""Fixtures for tests of the page: synthetic results, and a browser."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))  # for made_records

#: Possible names of the executable.
_BROWSERS = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")
#: No window, no sandbox (containers run as root), and no network requests of the browser itself.
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    found = [path for path in _BROWSERS if Path(path).exists()]
    if not found:
        pytest.skip("needs a browser: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found[0], args=list(_FLAGS))
        yield running
        running.close()


@pytest.fixture
def open_page(browser):
    """Open an address and wait for the visible charts; console messages and requests are recorded."""
    pages = []

    def settle(page):
        page.wait_for_selector("body[data-drawn=yes]", timeout=60_000)

    def open_(address, **options):
        page = browser.new_page(**options)
        pages.append(page)
        page.complaints, page.requests_made = [], []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda request: page.requests_made.append(request.url))
        page.settle = lambda: settle(page)
        page.goto(address)
        page.settle()
        return page

    yield open_
    for page in pages:
        page.close()
