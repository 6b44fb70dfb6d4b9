"""The page in a real browser: it opens without an error, and shows the logged values of the run."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.run_folders import run_folder, write_lines

from axonlaunch.diagnostics.report.live_page_data import LivePageData
from axonlaunch.diagnostics.report.page import page_of
from axonlaunch.diagnostics.report.page_data import page_data
from axonlaunch.diagnostics.report.record.run_record import read_run
from axonlaunch.diagnostics.report.server import RunServer
from axonlaunch.system.storage.run_files import events_of_rank

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="chromium and chromedriver are not there"),
    pytest.mark.processes,
]
HOSTILE = "</script><img src=x onerror=alert(1)>"
OVER = 'document.querySelector("[data-curve={}] .u-over")'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    profile = tmp_path_factory.mktemp("profile")
    for argument in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=DRIVER))
    yield driver
    driver.quit()


def opened(browser: Any, folders: list[Path], *, width: int = 1280) -> None:
    """Open the page of runs in a window of a width."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    page = folders[0] / "report.html"
    page.write_text(page_of(page_data([read_run(folder) for folder in folders]), title="runs"))
    browser.get(page.as_uri())


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def finished(folder: Path) -> Path:
    return run_folder(folder, ranks=8, experts=4)


def crashed(folder: Path) -> Path:
    run = run_folder(folder, status="failed")
    crash = {"rank": 1, "world_size": 2, "reason": "boom", "traceback": "Traceback ...", "step": 3}
    (run / "crash.json").write_text(json.dumps(crash))
    return run


def resumed_on_other_nodes(folder: Path) -> Path:
    run = run_folder(folder)
    events: list[dict[str, Any]] = []
    for attempt, ranks in enumerate((4, 2, 8)):
        start = {"step": 10 * attempt, "world_size": ranks, "layout": f"fsdp {ranks}"}
        events += [
            {"time": 100 * attempt, "event": "launched", "host": f"node-{attempt}"},
            {"time": 100 * attempt + 1, "event": "started", **start},
            {"time": 100 * attempt + 90, "event": "ended", "status": "interrupted"},
        ]
    write_lines(run / "events.jsonl", events)
    return run


def sampled(folder: Path) -> Path:
    run = run_folder(folder)
    file = run / "events.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    use = {"host": "node-0", "memory_bytes": 2**30, "memory_total_bytes": 2**32}
    samples = [
        {"time": 1001.0 + n, "event": "system", "cpu": n / 10, "gpu_use": [0.5, 0.9], **use}
        for n in range(1, 5)
    ]
    write_lines(file, [*events, *samples])
    return run


def elastic(folder: Path) -> Path:
    run = run_folder(folder)
    events: list[dict[str, Any]] = [{"time": 0, "event": "launched", "host": "node-0"}]
    nodes = ["node-0", "node-1", "node-2"]
    for attempt, present in enumerate((nodes[:2], nodes, nodes[:1])):
        ranks = 4 * len(present)
        start = {"step": 10 * attempt, "world_size": ranks, "layout": f"fsdp {ranks}"}
        events += [
            {"time": 100 * attempt + 1, "event": "nodes", "hosts": present},
            {"time": 100 * attempt + 2, "event": "started", **start},
            {"time": 100 * attempt + 90, "event": "failed", "rank": 1, "reason": "node was lost"},
        ]
    write_lines(run / "events.jsonl", events[:-1])
    return run


def half_written(folder: Path) -> Path:
    run = run_folder(folder, steps=1, status=None)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 2, "l')
    return run


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(
    "make", [finished, crashed, resumed_on_other_nodes, elastic, half_written, sampled]
)
def test_a_page_opens_without_a_complaint_and_fits_the_window(
    make: Callable[[Path], Path], width: int, browser: Any, tmp_path: Path
) -> None:
    folder = make(tmp_path / "demo")
    opened(browser, [folder], width=width)
    assert browser.find_element("tag name", "h1").text == "demo"
    assert browser.find_elements("css selector", "[data-curve=loss] canvas")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert complaints(browser) == []


def test_map_of_experts_shows_the_fullest_block(browser: Any, tmp_path: Path) -> None:
    opened(browser, [finished(tmp_path / "demo")])
    value = browser.execute_script("""
        const over = document.querySelector("[data-curve=experts] .u-over");
        const box = over.getBoundingClientRect();
        over.dispatchEvent(new MouseEvent("mousemove", {
            bubbles: true, clientX: box.left + box.width / 2, clientY: box.top + 5 }));
        const values = [...document.querySelectorAll("[data-curve=experts] .u-value")];
        return values.map((value) => value.innerText);
    """)
    assert value[1:] == ["1.94", "block 3: 2.50"]


def test_hovering_shows_the_value_that_was_logged(browser: Any, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=50, loss=lambda step: step / 7)
    opened(browser, [folder])
    shown = browser.execute_script(
        f"""
        const over = {OVER.format("loss")}, box = over.getBoundingClientRect();
        const at = {{clientX: box.left + box.width, clientY: box.top + 50, bubbles: true}};
        over.dispatchEvent(new MouseEvent("mouseenter", at));
        over.dispatchEvent(new MouseEvent("mousemove", at));
        return [...document.querySelectorAll("[data-curve=loss] .u-value")].map((e) => e.innerText);
        """
    )
    assert shown[:2] == ["50", f"{50 / 7:.7g}"]


def test_zooming_one_chart_zooms_all_and_resets(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver import ActionChains

    opened(browser, [run_folder(tmp_path / "demo", steps=100)])
    hover = """
        const over = document.querySelector("[data-curve=lr] .u-over");
        const box = over.getBoundingClientRect();
        const at = {clientX: box.left + 1, clientY: box.top + 50, bubbles: true};
        over.dispatchEvent(new MouseEvent("mouseenter", at));
        over.dispatchEvent(new MouseEvent("mousemove", at));
        return Number(document.querySelector("[data-curve=lr] .u-value").innerText);
    """
    initial = browser.execute_script(hover)
    over = browser.execute_script(f"return {OVER.format('loss')}")
    quarter = over.size["width"] // 4
    chain = ActionChains(browser).move_to_element_with_offset(over, -quarter, 0).click_and_hold()
    chain.move_by_offset(2 * quarter, 0).release().perform()
    zoomed = browser.execute_script(hover)
    browser.find_element("id", "reset").click()
    after = browser.execute_script(hover)
    assert (initial, after) == (1, 1)
    assert 20 < zoomed < 30
    assert complaints(browser) == []


def test_the_axis_and_the_scale_can_be_changed(browser: Any, tmp_path: Path) -> None:
    opened(browser, [run_folder(tmp_path / "demo", steps=20)])
    browser.execute_script(
        """
        const axis = document.getElementById("axis");
        axis.value = "tokens";
        axis.dispatchEvent(new Event("change"));
        """
    )
    browser.find_element("id", "log").click()
    [label, *_] = browser.find_elements("css selector", "[data-curve=loss] .u-label")
    assert label.text.rstrip(":") == "tokens"
    labels = browser.execute_script("return [0, 2e-5, 1.5e-5, -5e-6, 0.0005, 2.5, 1500].map(ticks)")
    assert labels == ["0", "2e-5", "1.5e-5", "-5e-6", "0.0005", "2.5", "1.5k"]
    assert complaints(browser) == []


def test_a_run_in_dark_mode_is_dark(browser: Any, tmp_path: Path) -> None:
    def ground(scheme: str) -> str:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        color: str = browser.execute_script(
            "return getComputedStyle(document.body).backgroundColor"
        )
        return color

    opened(browser, [run_folder(tmp_path / "demo")])
    assert (ground("light"), ground("dark")) == ("rgb(255, 255, 255)", "rgb(18, 22, 27)")
    assert complaints(browser) == []


def test_the_life_of_an_elastic_run_names_the_nodes_that_joined_and_left(
    browser: Any, tmp_path: Path
) -> None:
    opened(browser, [elastic(tmp_path / "demo")])
    titles = [e.get_attribute("title") for e in browser.find_elements("css selector", ".node")]
    assert titles == ["00:01:41 node-2 joined", "00:03:21 node-1 left", "00:03:21 node-2 left"]
    facts = dict(
        zip(*(browser.find_elements("tag name", tag) for tag in ("dt", "dd")), strict=True)
    )
    assert {name.text: value.text for name, value in facts.items()}["nodes"] == "node-0"


def test_timeline_has_an_axis_of_time(browser: Any, tmp_path: Path) -> None:
    opened(browser, [resumed_on_other_nodes(tmp_path / "demo")], width=390)  # 290 seconds
    times = [e.text for e in browser.find_elements("css selector", ".times span")]
    assert times == ["00:00:00", "00:02:00", "00:04:00"]


def test_use_of_the_node_is_shown_with_a_curve_for_each_gpu(browser: Any, tmp_path: Path) -> None:
    opened(browser, [sampled(tmp_path / "demo")])
    headings = [e.text for e in browser.find_elements("css selector", "[data-system] h3")]
    assert headings == ["processor", "memory, of 4 GiB", "GPU use"]
    labels = browser.find_elements("css selector", "[data-system='GPU use'] .u-label")
    assert [e.text.rstrip(":") for e in labels] == ["time", "GPU 0", "GPU 1"]
    shown = browser.execute_script(
        f"""
        const over = {OVER.format("loss").replace("data-curve=loss", "data-system=processor")};
        const box = over.getBoundingClientRect();
        const at = {{clientX: box.left + box.width, clientY: box.top + 5, bubbles: true}};
        over.dispatchEvent(new MouseEvent("mouseenter", at));
        over.dispatchEvent(new MouseEvent("mousemove", at));
        const values = document.querySelectorAll("[data-system=processor] .u-value");
        return [...values].map((e) => e.innerText);
        """
    )
    assert shown == ["00:00:05", "40%"]
    assert complaints(browser) == []


@pytest.mark.parametrize("nodes", [3, 20])
def test_nodes_are_compared_and_one_of_few_can_be_chosen(
    browser: Any, tmp_path: Path, nodes: int
) -> None:
    folder = run_folder(tmp_path / "demo")
    for node in range(nodes):
        lines = [
            {"time": 1000.0 + at, "event": "system", "host": f"node-{node}", "cpu": node / 100}
            for at in range(0, 60, 5)
        ]
        write_lines(folder / events_of_rank(node), lines)
    opened(browser, [folder], width=390)
    shown = browser.execute_script(
        f"""
        const over = {OVER.format("loss").replace("data-curve=loss", "data-system=processor")};
        const box = over.getBoundingClientRect();
        const at = {{clientX: box.left + box.width / 2, clientY: box.top + 5, bubbles: true}};
        over.dispatchEvent(new MouseEvent("mouseenter", at));
        over.dispatchEvent(new MouseEvent("mousemove", at));
        const values = document.querySelectorAll("[data-system=processor] .u-value");
        return [...values].slice(1).map((e) => e.innerText);
        """
    )
    choices = [e.text for e in browser.find_elements("css selector", "[data-nodes] option")]
    if nodes == 20:
        assert shown == ["0% node-0", "10%", "19% node-19"]  # the median is 9.5%
        assert choices == []
    else:
        assert shown == ["0%", "1%", "2%"]
        assert choices == ["all nodes", "node-0", "node-1", "node-2"]
        browser.find_elements("css selector", "[data-nodes] option")[2].click()
        labels = browser.find_elements("css selector", "[data-system=processor] .u-label")
        assert [e.text.rstrip(":") for e in labels] == ["time", "share of all cores"]
    assert complaints(browser) == []


def test_it_prints_dark_on_white_whatever_the_screen_shows(browser: Any, tmp_path: Path) -> None:
    opened(browser, [run_folder(tmp_path / "demo", ranks=2)])
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    for media, colors in (
        ("screen", ["rgb(18, 22, 27)", "rgb(230, 233, 236)"]),
        ("print", ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]),
    ):
        emulated = {"media": media, "features": [dark]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
        shown = browser.execute_script(
            "const style = getComputedStyle(document.body);"
            "return [style.backgroundColor, style.color, "
            "getComputedStyle(document.querySelector('.tools')).display];"
        )
        assert shown == [*colors, "none" if media == "print" else "flex"]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    assert base64.b64decode(browser.print_page()).startswith(b"%PDF")
    assert complaints(browser) == []


def test_a_step_is_shown_as_predicted_and_as_measured_with_the_round_of_its_pipeline(
    browser: Any, tmp_path: Path
) -> None:
    folder = run_folder(tmp_path / "demo")
    actions = [[0, 0.0, 0.01, "0F0"], [1, 0.01, 0.02, "1F0"], [1, 0.02, 0.04, "1B0"]]
    step = {"hardware": "h200", "step_s": 0.08, "parts": {"attention": 0.08}, "pipeline": actions}
    (folder / "step_time.json").write_text(json.dumps(step))
    opened(browser, [folder], width=390)
    text = browser.find_element("tag name", "main").text
    assert "predicted for h200: 80 ms a step" in text
    assert "measured, median of the logged steps: 100 ms" in text
    drawn = [e.get_attribute("title") for e in browser.find_elements("css selector", ".lane i")]
    assert drawn == ["0F0: 10 ms", "1F0: 10 ms", "1B0: 20 ms"]
    assert complaints(browser) == []


def test_no_text_of_a_run_is_run(browser: Any, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", name=HOSTILE, extra_config=f"seed: {HOSTILE!r}\n")
    with (folder / "events.jsonl").open("a") as stream:
        event = {"time": 2000, "event": "noted", "text": HOSTILE}
        stream.write(json.dumps(event) + "\n")
    opened(browser, [folder])
    assert browser.find_element("tag name", "h1").text == HOSTILE
    assert browser.find_elements("tag name", "img") == []
    assert HOSTILE in [element.text for element in browser.find_elements("tag name", "p")]
    assert complaints(browser) == []


def test_compare_page_overlays_runs_and_lists_differences(browser: Any, tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / name, steps=n) for name, n in (("a", 10), ("b", 20))]
    opened(browser, folders)
    labels = [e.text for e in browser.find_elements("css selector", "[data-curve=lr] .u-label")]
    assert [label.rstrip(":") for label in labels] == ["step", "a", "b"]
    cells = [e.text for e in browser.find_elements("tag name", "td")]
    assert cells[cells.index("train.steps") :][:3] == ["train.steps", "10", "20"]
    assert complaints(browser) == []


def test_page_of_twenty_runs_fits_a_narrow_window_and_breaks_no_number(
    browser: Any, tmp_path: Path
) -> None:
    names = [HOSTILE.replace("/", ""), "a" * 60, *(f"run-{n}" for n in range(18))]
    folders = [
        run_folder(tmp_path / name, steps=9, loss=lambda step, n=n: (n + 1) / step / 7)
        for n, name in enumerate(names)
    ]
    opened(browser, folders, width=390)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    rows = browser.find_elements("xpath", "//h2[.='Results']/..//tr")
    assert [row.text.split()[0] for row in rows[-18:]] == names[2:]
    assert max(row.size["height"] for row in rows[-18:]) < 30
    assert complaints(browser) == []


def test_page_of_several_runs_begins_with_a_table_that_switches_their_curves(
    browser: Any, tmp_path: Path
) -> None:
    folders = [
        run_folder(tmp_path / name, steps=10, loss=lambda step, scale=scale: scale / step)
        for name, scale in ((HOSTILE.replace("/", ""), 3.0), ("b", 1.0), ("c", 2.0))
    ]
    for metrics in (folder / "metrics.jsonl" for folder in folders):
        lines = metrics.read_text().splitlines(keepends=True)
        metrics.write_text("".join(line for line in lines if "eval_loss" not in line))
    opened(browser, folders)
    names = [e.text for e in browser.find_elements("css selector", "#runs td:nth-child(2)")]
    assert names == ["b (best)", "c", HOSTILE.replace("/", "")]
    first, second = (
        e.location["y"]
        for e in (
            browser.find_element("id", "runs"),
            browser.find_element("css selector", "[data-curve=loss]"),
        )
    )
    assert first < second
    browser.find_elements("css selector", "#runs input")[1].click()
    labels = [e.text for e in browser.find_elements("css selector", "[data-curve=lr] .u-label")]
    assert [label.rstrip(":") for label in labels[1:]] == [names[2], "b"]
    for box in browser.find_elements("css selector", "#runs input"):
        if box.is_selected():
            box.click()
    assert browser.find_elements("css selector", "[data-curve]") == []
    assert complaints(browser) == []


def test_runs_are_lines_over_their_settings_and_can_be_switched_off(
    browser: Any, tmp_path: Path
) -> None:
    folders = [
        run_folder(
            tmp_path / name,
            extra_config=f"optimizer:\n  lr: {rate}\n  name: {name}\n",
            loss=lambda step, rate=rate: 10 * rate,
        )
        for name, rate in (("a", 0.001), ("b", 0.01), (HOSTILE.replace("/", ""), 0.1))
    ]
    opened(browser, folders, width=390)
    heads = [e.text for e in browser.find_elements("css selector", "#coordinates .name")]
    assert heads == ["optimizer.lr", "optimizer.name", "evaluation loss"]

    def runs() -> list[str]:
        lines = browser.find_elements("css selector", "#coordinates .run")
        return [line.get_attribute("data-run") for line in lines]

    assert runs() == ["a", "b", HOSTILE.replace("/", "")]
    browser.find_elements("css selector", "#runs input")[1].click()
    assert runs() == ["a", HOSTILE.replace("/", "")]
    browser.execute_script(
        "document.querySelector('#coordinates .run').dispatchEvent(new MouseEvent('mouseenter'))"
    )
    caption = browser.find_element("css selector", ".caption").text
    assert caption.startswith("a: optimizer.lr 0.001, optimizer.name a, ")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    assert complaints(browser) == []


@pytest.mark.slow
def test_report_page_of_running_run_updates(browser: Any, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=3, status=None)
    server = RunServer(LivePageData([folder]), title="demo")
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        browser.get(server.url)
        with (folder / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": 777, "loss": 0.125, "step_s": 0.1}) + "\n")
        shown = browser.execute_async_script(
            """
            const done = arguments[0];
            const look = () => {
              if (document.body.innerText.includes("777 of 3")) done(true);
              else setTimeout(look, 100);
            };
            look();
            """
        )
        assert shown
        assert complaints(browser) == []
        browser.get("about:blank")
    finally:
        server.close()
        thread.join()
