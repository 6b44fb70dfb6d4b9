"""The pages as a site: built without dead links, complete, and with a search that finds words."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("zensical") is None, reason="needs scripts/install docs"
    ),
]


def build(folder: Path, *, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / "docs"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    built = build(folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_site_has_every_page_and_no_dead_link(site: Path) -> None:
    pages = {page.name: page.read_text() for page in site.glob("*.html")}
    names = {f"{page.stem}.html" for page in (ROOT / "axonlaunch" / "docs").glob("*.md")}
    assert names | {"index.html", "contributing.html", "changelog.html"} <= pages.keys()
    anchors = {name: set(re.findall(r'\bid="?([^"\s>]+)', text)) for name, text in pages.items()}
    dead = []
    for name, text in pages.items():
        for link in re.findall(r'<a [^>]*href="?([^"\s>]+)', text):
            path, _, part = unquote(link).partition("#")
            if ":" in path or name == "404.html":
                continue
            target = name if path in ("", ".") else path.removeprefix("./")
            if not (site / target).is_file() or (part and part not in anchors.get(target, ())):
                dead.append((name, link))
    assert dead == []


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    for page in site.glob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=[\"']?([^\"'\s>]+)", page.read_text()
        )
        assert not [each for each in loaded if each.startswith(("http:", "https:", "//"))]


def test_dead_link_and_dead_anchor_fail_the_build(tmp_path: Path) -> None:
    for name in ("axonlaunch/docs", "scripts/benches", "tests/parity"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "scripts/docs"):
        shutil.copy(ROOT / name, tmp_path / name)
    page = tmp_path / "axonlaunch/docs/glossary.md"
    page.write_text(f"{page.read_text()}\n[a](nothing.md) [b](data.md#nowhere)\n")
    built = build(tmp_path / "site", root=tmp_path)
    assert built.returncode != 0
    assert "2 issues found" in built.stdout + built.stderr
    assert not (tmp_path / "site").exists()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    if not (BROWSER and DRIVER):
        pytest.skip("chromium and chromedriver are not there")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    profile = tmp_path_factory.mktemp("profile")
    for argument in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={profile}")
    driver = webdriver.Chrome(options=options, service=Service(executable_path=DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


SHOWN = """
return [...document.querySelectorAll("*")].map(each => each.shadowRoot?.textContent ?? "").join("")
"""
"""Text of the search, whose elements are in a shadow tree."""


def test_search_of_the_site_finds_words_and_opens_their_page(browser: Any, served: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    wait = WebDriverWait(browser, 30)
    browser.get(f"{served}/index.html")
    wait.until(lambda page: page.find_elements("css selector", ".md-search__button"))
    keys = ActionChains(browser)
    keys.key_down(Keys.CONTROL).send_keys("k").key_up(Keys.CONTROL).perform()
    wait.until(lambda page: page.execute_script("return !!document.activeElement.shadowRoot"))
    ActionChains(browser).send_keys("ring attention").perform()
    wait.until(lambda page: "ring attention" in page.execute_script(SHOWN).lower())
    ActionChains(browser).send_keys(Keys.ENTER).perform()
    wait.until(lambda page: "index.html" not in page.current_url)
    assert "ring attention" in browser.find_element("tag name", "article").text.lower()
