"""Lists and downloads the files of a data set of the Hugging Face Hub, into the Hub's cache.

A commit that is in the cache is read without a network. Only this module talks to the Hub about
data.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonlaunch.config.values.hub_reference import HubReference
from axonlaunch.data.files.formats import needs_pyarrow
from axonlaunch.system import hub
from axonlaunch.system.hub import HubCallError
from axonlaunch.system.storage.cache import cache_folder, keep
from axonlaunch.system.storage.files import read_text
from axonlaunch.system.text.formatting import size as shown_size

CARD = "README.md"
DEFAULT_BRANCH = "main"
_BAR = 24
_AT_ONCE = 8
_WORTH_A_LINE = 100 << 20
"""Bytes of a download that takes long enough to be announced in a log."""
_TIMEOUT_S = 20.0
_LARGEST_CARD, _LARGEST_LIST = 4 << 20, 256 << 20
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})")
_PYARROW = "needs pyarrow; pip install 'axonlaunch[data]'"


class HubError(ValueError):
    """A data set can't be read from the Hub; the text says why and what to do.

    Attributes:
        is_transient: Whether the Hub may answer later.
    """

    def __init__(self, message: str, *, is_transient: bool = False) -> None:
        super().__init__(message)
        self.is_transient = is_transient


@dataclass(frozen=True)
class Downloading:
    """Progress of a download as shown to a user.

    Attributes:
        repo: Name of the data set.
        done: Bytes that were downloaded so far.
        total: Bytes of all files.
    """

    repo: str
    done: int
    total: int

    def __str__(self) -> str:
        fraction = min(1.0, self.done / max(1, self.total))
        done = round(fraction * _BAR)
        bar = "█" * done + "░" * (_BAR - done)
        return f"downloading {bar} {fraction:.0%} of {shown_size(self.total)}, {self.repo}"


OnDownload = Callable[[Downloading], None]


def pin(reference: HubReference) -> HubReference:
    """Return the reference at the commit to which its revision leads now.

    Without a network, it is the commit to which it led at the last download.

    Raises:
        HubError: The data set or the revision does not exist, or the Hub can't be reached.
    """
    if reference.commit is not None:
        return reference

    def ask() -> Any:
        api = hub.library().HfApi()
        return api.dataset_info(reference.repo, revision=reference.revision, timeout=_TIMEOUT_S)

    try:
        with hub.quiet_hub():
            commit = str(hub.call_hub(ask).sha)
        _keep_commit(reference, commit)
    except HubCallError as error:
        cached = _cached_commit(reference) if error.is_unreachable else None
        if cached is None:
            raise _refusal(reference, error) from None
        commit = cached
        if error.kind != "offline":  # which the user has set
            note = f"{reference}: {error}; the commit of the last download is used, {commit[:8]}"
            print(note, file=sys.stderr)
    return reference.at(commit)


def list_files(reference: HubReference) -> Mapping[str, int]:
    """Return the size in bytes of each file of a data set at a commit.

    Without a network, the list of an earlier call; if there is none, the files in the Hub's cache.

    Raises:
        HubError: The commit is not in the cache, and the Hub can't be reached or refuses.
    """
    assert reference.commit is not None
    if (kept := _kept_list(_list_file(reference))) is not None:
        return kept

    def ask() -> dict[str, int]:
        api = hub.library().HfApi()
        commit = reference.commit
        tree = api.list_repo_tree(
            reference.repo, repo_type="dataset", revision=commit, recursive=True
        )
        return {entry.path: int(entry.size) for entry in tree if hasattr(entry, "size")}

    try:
        with hub.quiet_hub():
            files = hub.call_hub(ask)
    except HubCallError as error:
        if not error.is_unreachable:
            raise _refusal(reference, error) from None
        return _cached_files(reference, error)
    if not all(map(str.isprintable, files)):  # names are printed
        raise HubError("has a file whose name has control characters")
    keep(_list_file(reference), json.dumps(files))
    return files


def read_card(reference: HubReference) -> str:
    """Return README.md of a data set at a commit; empty if it has none.

    Raises:
        HubError: README.md can't be downloaded.
    """
    if CARD not in list_files(reference):
        return ""
    file = fetch_files(reference, [CARD])[CARD]
    return read_text(file.resolve(), at_most=_LARGEST_CARD)


def fetch_files(
    reference: HubReference, names: Sequence[str], *, report: OnDownload = lambda state: None
) -> dict[str, Path]:
    """Return the path of each file in the Hub's cache, after downloading those that are missing.

    Complete files are kept if the call is interrupted, and a lost connection resumes inside a file.

    Args:
        reference: A data set at a commit.
        names: Paths of files in the repository.
        report: Called from time to time.

    Raises:
        HubError: A file can't be downloaded.
    """
    found = {name: path for name in names if (path := cached_file(reference, name)) is not None}
    missing = [name for name in names if name not in found]
    if not missing:
        return found
    if any(map(needs_pyarrow, names)) and importlib.util.find_spec("pyarrow") is None:
        raise HubError(f"{next(filter(needs_pyarrow, names))} {_PYARROW}")
    sizes = list_files(reference)
    total = sum(sizes.get(name, 0) for name in missing)
    progress = _Progress(reference.repo, total, report)
    if total >= _WORTH_A_LINE and not sys.stderr.isatty():  # a terminal shows the progress
        print(f"downloading {reference.repo}: {shown_size(total)}", file=sys.stderr, flush=True)
    with (
        ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="downloading") as pool,
        hub.quiet_hub(),
    ):
        downloads = {
            name: pool.submit(_download, reference, name, progress.bar()) for name in missing
        }
        try:
            for download in as_completed(downloads.values()):
                download.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            progress.cancel()  # the context waits for the downloads that have begun
            raise
    return found | {name: download.result() for name, download in downloads.items()}


def cached_file(reference: HubReference, name: str) -> Path | None:
    """Return the path of a file in the Hub's cache; None if it is not there."""
    cached = hub.library().try_to_load_from_cache(
        reference.repo, name, repo_type="dataset", revision=reference.commit
    )
    return Path(cached) if isinstance(cached, str) else None


def _download(reference: HubReference, name: str, bar: Any) -> Path:
    def download() -> str:
        path: str = hub.library().hf_hub_download(
            reference.repo, name, repo_type="dataset", revision=reference.commit, tqdm_class=bar
        )
        return path

    try:
        return Path(hub.call_hub(download))
    except HubCallError as error:
        raise _refusal(reference, error, name) from None


def _refusal(reference: HubReference, error: HubCallError, name: str = "") -> HubError:
    """Return the error of a data set, or of one of its files, that the Hub does not give."""
    subject, message = f"{name} " if name else "", _message(reference, error)
    if error.is_unreachable:
        text = f"{subject}is not in the cache of the Hub, and {message}"
        return HubError(text, is_transient=error.is_transient)
    is_of_repo = not name or error.kind in ("gated", "no repository")
    text = message if is_of_repo else f"{name}: {message}"
    return HubError(text, is_transient=error.is_transient)


def _message(reference: HubReference, error: HubCallError) -> str:
    """Return in one line what failed and what to do."""
    page = f"{hub.endpoint()}/datasets/{reference.repo}"
    if error.is_unreachable:
        revision = "" if reference.revision is None else f" --revision {reference.revision}"
        return (
            f"{error}; where there is a network, run hf download {reference.repo} "
            f"--repo-type dataset{revision}"
        )
    if error.kind == "gated":
        return f"is gated; ask for access at {page}, then {hub.LOG_IN}"
    if error.kind == "no revision":
        return f"the Hub has no revision {reference.revision} of it; see {page}/tree/main"
    if error.kind == "no repository":
        return (
            "there is no such file or folder here, and no such data set on the Hub; if it is "
            f"private, {hub.LOG_IN}"
        )
    if error.kind in ("failed", "ended early"):
        return f"{error}; try again later"
    return f"can't be downloaded: {error}" if error.kind == "other" else str(error)


class _Progress:
    """Adds up the bytes of concurrent downloads."""

    def __init__(self, repo: str, total: int, report: OnDownload) -> None:
        self._repo, self._total, self._report = repo, total, report
        self._done = 0
        self._is_cancelled = False
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Let each download fail at its next block."""
        self._is_cancelled = True

    def add(self, count: float) -> None:
        if self._is_cancelled:
            raise RuntimeError("the download is canceled")
        with self._lock:
            self._done = min(self._total, self._done + int(count))
            self._report(Downloading(self._repo, self._done, self._total))

    def bar(self) -> Any:
        """Return a class with tqdm's interface, of which the library makes an object per file."""
        progress = self

        class Bar:
            def __init__(self, *_: Any, **__: Any) -> None:
                self.n = self.total = 0

            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def update(self, count: float | None = 1) -> None:
                progress.add(count or 0)

            def __getattr__(self, name: str) -> Any:
                if name.startswith("update_"):  # of further bars
                    raise AttributeError(name)
                return lambda *_, **__: None

        return Bar


def _repo_cache(reference: HubReference) -> Path:
    """Return the folder of a data set in the Hub's cache."""
    name = "--".join(["datasets", *reference.repo.split("/")])
    return Path(hub.library().constants.HF_HUB_CACHE) / name


def _keep_commit(reference: HubReference, commit: str) -> None:
    """Record to which commit a revision leads, where the library records it."""
    file = _repo_cache(reference) / "refs" / (reference.revision or DEFAULT_BRANCH)
    if _cached_commit(reference) != commit:
        keep(file, commit)


def _cached_commit(reference: HubReference) -> str | None:
    try:
        text = (
            _repo_cache(reference) / "refs" / (reference.revision or DEFAULT_BRANCH)
        ).read_text()
    except OSError:
        return None
    return reference.at(text.strip()).commit


def _list_file(reference: HubReference) -> Path:
    name = "--".join([*reference.repo.split("/"), str(reference.commit)])
    return cache_folder() / "hub" / f"{name}.json"


def _kept_list(file: Path) -> dict[str, int] | None:
    try:
        content = json.loads(read_text(file, at_most=_LARGEST_LIST))
        return {str(name): int(size) for name, size in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _cached_files(reference: HubReference, error: HubCallError) -> dict[str, int]:
    """Return the files of a commit that ``hf download`` has put into the Hub's cache.

    Raises:
        HubError: There are none, or a download was interrupted.
    """
    repo = _repo_cache(reference)
    snapshot = repo / "snapshots" / str(reference.commit)
    with suppress(Exception):  # only newer versions of the library keep a list
        tree = hub.library().get_cached_repo_tree(
            reference.repo, repo_type="dataset", revision=reference.commit
        )
        return {entry.path: int(entry.size) for entry in tree}
    files = {
        str(path.relative_to(snapshot)): path.stat().st_size
        for path in sorted(snapshot.rglob("*"))
        if path.is_file()
    }
    if not files:
        raise _refusal(reference, error)
    if any((repo / "blobs").glob("*.incomplete")) or _lacks_parts(files):
        reason = _message(reference, error)
        raise HubError(f"is only partly in the cache of the Hub, and {reason}")
    return files


def _lacks_parts(names: Iterable[str]) -> bool:
    """Return whether a name like ``train-00000-of-00002.parquet`` has not as many others."""
    parts = Counter((found[1], int(found[2])) for name in names if (found := _PART.match(name)))
    return any(count < total for (_, total), count in parts.items())
