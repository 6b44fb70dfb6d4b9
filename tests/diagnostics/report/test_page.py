"""The page shows the folder's contents, in a file that downloads nothing and runs no user text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.run_folders import run_folder

from axonlaunch.diagnostics.report.comparison import run_table
from axonlaunch.diagnostics.report.page import as_script_data, page_of
from axonlaunch.diagnostics.report.page_data import facts, page_data
from axonlaunch.diagnostics.report.record.run_record import read_run

HOSTILE = "</script><img src=x onerror=alert(1)><!--"


def shown(page: str) -> dict[str, object]:
    [text] = re.findall(r'id="data">(.*?)</script>', page, flags=re.DOTALL)
    content: dict[str, object] = json.loads(text)
    return content


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [20_000])
def test_the_page_of_a_long_run_of_64_ranks_is_small_and_keeps_the_peak(
    num_steps: int, tmp_path: Path
) -> None:
    peaks = {11_234: 99.5}
    loss = lambda step: peaks.get(step, 1.0)  # noqa: E731
    run = read_run(run_folder(tmp_path / "long", steps=num_steps, ranks=64, loss=loss))
    data = page_data([run])
    assert len(page_of(data, title="long")) < 2_000_000
    steps, values = data["runs"][0]["series"]["loss"]
    assert values[steps.index(11_234)] == 99.5
    assert len(steps) < 5000


def test_hostile_text_is_escaped_everywhere(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", name=HOSTILE, extra_config=f"seed: {HOSTILE!r}\n")
    with (folder / "events.jsonl").open("a") as stream:
        event = {"time": 2000, "event": "noted", "text": HOSTILE}
        stream.write(json.dumps(event) + "\n")
    page = page_of(page_data([read_run(folder)]), title=HOSTILE)
    assert HOSTILE not in page
    assert page.count("<img") == 0
    assert page.count("<script") == page.count("</script>") == 3
    assert HOSTILE in json.dumps(shown(page)).encode().decode("unicode_escape")


def test_script_element_content_round_trips() -> None:
    data = {"text": "</script> & <!-- \u2028 ü"}
    text = as_script_data(data)
    assert not set("<>&") & set(text)
    assert json.loads(text) == data


def test_report_page_has_no_external_addresses(tmp_path: Path) -> None:
    page = page_of(page_data([read_run(run_folder(tmp_path / "demo"))]), title="demo")
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; ")
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "unsafe-eval" not in policy
    assert policy.count("'sha256-") == 2


def test_a_crash_card_has_the_rank_the_reason_and_the_hint(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", status="failed")
    crash = {"rank": 3, "world_size": 4, "reason": "out of memory", "hint": "less", "step": None}
    (folder / "crash.json").write_text(json.dumps(crash))
    run = page_data([read_run(folder)])["runs"][0]
    assert (run["status"], run["crash"]["reason"]) == ("failed", "out of memory")


def test_a_run_without_steps_has_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "early"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: early\n")
    data = page_data([read_run(folder)])
    assert data["runs"][0]["series"] == {}
    assert page_of(data, title="early")


def test_numbers_that_are_no_numbers_leave_gaps(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=3, loss=lambda step: None if step == 2 else 1.0)
    assert page_data([read_run(folder)])["runs"][0]["series"]["loss"] == [[1, 2, 3], [1, None, 1]]


def test_two_runs_of_one_name_are_called_by_their_folders(tmp_path: Path) -> None:
    runs = [read_run(run_folder(tmp_path / str(n), name="demo")) for n in (1, 2)]
    page = page_data(runs)
    assert [run["label"] for run in page["runs"]] == [str(tmp_path / "1"), str(tmp_path / "2")]
    assert page["configurations"] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [("status", "done"), ("step", "30 of 30"), ("commit", "a" * 40), ("tokens", "3,000")],
)
def test_the_head_says(name: str, text: str, tmp_path: Path) -> None:
    assert dict(facts(read_run(run_folder(tmp_path / "demo"))))[name] == text


def test_runs_are_ranked_by_their_evaluation_and_differences_are_columns(tmp_path: Path) -> None:
    rates, evaluated = ("0.1", "0.2", "0.3"), (2.0, 1.0, None)
    runs = []
    for number, (rate, loss) in enumerate(zip(rates, evaluated, strict=True)):
        extra = f"optimizer:\n  lr: {rate}\n"
        folder = run_folder(tmp_path / str(number), steps=3, extra_config=extra)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3, "eval_loss": loss}) + "\n")
        runs.append(read_run(folder))
    head, rows = run_table(runs, ["a", "b", "c"])
    assert head[-1] == "optimizer.lr"
    assert [(row.run, row.is_best, row.cells[0], row.cells[-1]) for row in rows] == [
        (1, True, "b", "0.2"),
        (0, False, "a", "0.1"),
        (2, False, "c", "0.3"),
    ]
    assert page_data(runs[:1])["table"] is None


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("name: hf\n  path: /models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("name: hf\n  path: Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("name: custom\n  target: denoise:Denoiser", "denoise:Denoiser"),
        ("name: gpt", "gpt"),
    ],
)
def test_the_head_names_the_model_and_how_it_is_trained(
    model: str, name: str, tmp_path: Path
) -> None:
    folder = run_folder(tmp_path / "demo", extra_config="optimizer: {name: muon, lr: 0.02}\n")
    file = folder / "config.yaml"
    file.write_text(file.read_text().replace("name: gpt", model))
    head = dict(facts(read_run(folder)))
    assert (head["model"], head["optimizer"], head["learning rate"]) == (name, "muon", "0.02")


def test_image_run_shows_images_on_its_page_and_in_comparisons(tmp_path: Path) -> None:
    runs = [
        read_run(run_folder(tmp_path / "a", counted="images")),
        read_run(run_folder(tmp_path / "b", counted="tokens")),
    ]
    head = dict(facts(runs[0]))
    assert (head["images"], head["images/s"]) == ("3,000", "1,000")
    assert "tokens" not in head
    data = page_data(runs[:1])
    assert data["counted"] == "images"
    assert "images_per_s" in data["runs"][0]["series"]
    assert data["runs"][0]["progress"][1][-1] == 3000
    both = page_data(runs)
    assert both["counted"] == "images or tokens"
    rows = dict(both["results"])
    assert (rows["images/s"], rows["tokens/s"]) == ([1000.0, None], [None, 1000.0])


GLOO = "RuntimeError: [/pytorch/third_party/gloo/tcp/pair.cc:5] Connection closed by peer [::1]:7"


def test_a_failed_runs_page_shows_no_text_of_gloo(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", status="failed")
    failure = {"rank": 1, "kind": "connection", "reason": GLOO}
    crash = {**failure, "world_size": 4, "step": 2, "followers": [{"rank": 0, "reason": GLOO}]}
    (folder / "crash.json").write_text(json.dumps(crash))
    with (folder / "events.jsonl").open("a") as stream:
        stream.write(json.dumps({"time": 2000, "event": "failed", **failure}) + "\n")
    page = page_of(page_data([read_run(folder)]), title="demo")
    assert "gloo" not in page
    assert page.count("lost the connection to a rank that had ended") == 2
    assert "rank 0: the same" in page


def test_failed_runs_page_folds_the_errors_of_followers(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", status="failed")
    followers = [{"rank": rank, "reason": "boom" if rank < 4 else "bang"} for rank in range(1, 6)]
    crash = {"rank": 0, "reason": "boom", "step": 2, "doing": "stepping", "host": "node-0"}
    crash |= {"coords": {"dp": 1}, "world_size": 6, "followers": followers}
    (folder / "crash.json").write_text(json.dumps(crash))
    shown = page_data([read_run(folder)])["runs"][0]["crash"]
    assert shown["followers"] == ["ranks 1-3: the same", "ranks 4-5: bang"]
    assert shown["place"] == "dp=1, on node-0, in step 3"


@pytest.mark.parametrize(("device", "owner"), [("cpu", "process"), ("cuda:0", "tensors")])
def test_title_of_memory_says_whose_it_is(device: str, owner: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo")
    with (folder / "events.jsonl").open("a") as stream:
        stream.write(json.dumps({"time": 2000, "event": "started", "device": device}) + "\n")
    curves = page_data([read_run(folder)])["curves"]
    assert curves["peak_memory_bytes"] == f"peak memory of the main rank's {owner}"


def test_a_first_failure_that_is_about_another_connection_keeps_its_reason(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", status="failed")
    reason = "ConnectionError: the hub: Connection refused"
    crash = {"rank": 1, "kind": "error", "reason": reason, "step": None}
    (folder / "crash.json").write_text(json.dumps(crash))
    assert page_data([read_run(folder)])["runs"][0]["crash"]["reason"] == reason
