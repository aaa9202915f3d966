"""A page in a real browser without a window, watched for requests and for what it says on its console."""

import shutil
from contextlib import contextmanager

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")
WIDTHS = (360, 1600)  # a phone, and a wide screen


def needs_browser(test):
    """Skip a test where there is no browser; the one there is talks to its driver over a socket."""
    return pytest.mark.enable_socket(MISSING(test))


@contextmanager
def opened(file):
    """Yield the page of a file, all charts drawn; nothing may be asked for but the file, nor anything be said."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text) if message.type in {"error", "warning"} else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        count = "document.querySelectorAll('{}').length"
        page.wait_for_function(f"{count.format('[data-drawn]')} === {count.format('[data-chart]')}")
        try:
            yield page
        except BaseException:
            browser.close()
            raise
        for width in WIDTHS:  # nothing but tables and charts scrolls sideways
            page.set_viewport_size({"width": width, "height": 800})
            page.wait_for_timeout(300)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert said == []
        assert asked == [file.as_uri()]
        browser.close()
