"""Uploads exported weights to a model repository of the Hugging Face Hub.

The token and its rights are checked before a run starts, and again by the Hub.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonlaunch.checkpoint.exchange import weights
from axonlaunch.checkpoint.exchange.adapters import why_not_peft
from axonlaunch.checkpoint.exchange.model_card import model_card
from axonlaunch.checkpoint.format import step_folders, storage
from axonlaunch.checkpoint.format.manifest import Checkpoint
from axonlaunch.config import ConfigError, ConfigIssue, RunConfig
from axonlaunch.config.values.hub_reference import why_no_repo
from axonlaunch.system import hub
from axonlaunch.system.hub import HubCallError

if TYPE_CHECKING:
    from torch import nn

KEY = "checkpoint.push"
_CARD = "README.md"
_WRITES = ("write", "admin", "contributor")
_MAY_WRITE = ("repo.write", "repo.content.write")


def push_problems(repo: str, *, key: str = KEY) -> list[ConfigIssue]:
    """Return why this user can't upload to a repository; nothing is created.

    Args:
        repo: Name of the repository, ORG/NAME.
        key: Configuration key of the name, or an option of a command.
    """
    reason = why_no_repo(repo)
    try:
        reason = reason or _why_refused(repo, hub.call_hub(hub.library().HfApi().whoami))
    except ImportError as error:
        reason = str(error)
    except HubCallError as error:
        if error.kind == "no token":
            reason = f"there is no token of the Hub; {hub.LOG_IN}"
        elif error.kind in ("refused", "no repository"):
            reason = f"the Hub does not accept this token; {hub.LOG_IN}"
        else:
            reason = str(error)
    return [] if reason is None else [ConfigIssue(key, reason, repo)]


def pushed_adapter_problems(config: RunConfig, model: nn.Module) -> Iterator[ConfigIssue]:
    """Yield a problem if ``checkpoint.push`` can't export the run's adapter.

    Args:
        config: Configuration of the run.
        model: Complete model with its adapters, on the meta device or not.
    """
    repo = config.checkpoint.push
    if repo is None or config.adapter is None:
        return
    if (reason := why_not_peft(config, model)) is not None:
        export = f"axonlaunch checkpoint export RUN --merge --push {repo}"
        yield ConfigIssue(KEY, f"{reason}; use null, and {export} after the run", repo)


def push_run(config: RunConfig) -> str:
    """Export the newest checkpoint of a run and upload it; return the page of the repository.

    Raises:
        ConfigError: There is no checkpoint, or the upload fails.
    """
    repo = config.checkpoint.push
    assert repo is not None
    checkpoint = step_folders.find_checkpoint(storage.root(config))
    if checkpoint is None:
        raise ConfigError([ConfigIssue(KEY, "there is no checkpoint to upload", repo)])
    with tempfile.TemporaryDirectory(dir=config.run_dir, prefix="upload-") as folder:
        exported = Path(folder, "exported")
        weights.export_weights(checkpoint, config, exported)
        return push_export(
            exported, checkpoint, config, repo, private=config.checkpoint.push_private
        )


def push_export(
    folder: Path,
    checkpoint: Checkpoint,
    config: RunConfig,
    repo: str,
    *,
    private: bool,
    is_merged: bool = False,
    key: str = KEY,
) -> str:
    """Upload exported weights with a model card; return the page of the repository.

    Args:
        folder: Folder of ``export_weights``, in which README.md is written.
        checkpoint: The exported checkpoint.
        config: Configuration of its run.
        repo: Name of the repository, which is created if it does not exist.
        private: Whether a new repository is private; otherwise the account's settings decide.
        is_merged: Whether an adapter was merged into the weights.
        key: Configuration key of the name, or an option of a command.

    Raises:
        ConfigError: The upload fails.
    """
    is_adapter = config.adapter is not None and not is_merged
    (folder / _CARD).write_text(model_card(checkpoint, config, is_adapter=is_adapter))
    message = f"Step {checkpoint.step} of {config.name}"
    try:
        api = hub.library().HfApi()
        hub.library().utils.disable_progress_bars()  # the caller shows what it waits for
        with hub.quiet_hub():
            hub.call_hub(
                lambda: api.create_repo(repo, private=True if private else None, exist_ok=True)
            )
            hub.call_hub(
                lambda: api.upload_folder(
                    repo_id=repo, folder_path=str(folder), commit_message=message
                )
            )
    except (HubCallError, ImportError) as error:
        raise ConfigError([ConfigIssue(key, f"can't be uploaded: {error}", repo)]) from None
    return f"{hub.endpoint()}/{repo}"


def _why_refused(repo: str, user: dict[str, Any]) -> str | None:
    """Return why a user may not write to a repository, from the Hub's description of the user."""
    name, owner = str(user.get("name")), repo.partition("/")[0]
    token = user.get("auth", {}).get("accessToken", {})
    roles = {str(org.get("name")): org.get("roleInOrg") for org in user.get("orgs", [])}
    if owner != name and owner not in roles:
        owners = ", ".join([name, *roles])
        return f"{name} is no member of {owner}; use {owners}"
    if owner != name and roles[owner] not in (None, *_WRITES):
        return f"{name} may only read in {owner}; ask an administrator of {owner} for the right"
    if token.get("role") == "read":
        return (
            f"the token {token.get('displayName', '')} may only read; make one that may write at "
            f"{hub.endpoint()}/settings/tokens"
        )
    if token.get("role") == "fineGrained" and not _is_scoped(token.get("fineGrained", {}), repo):
        return (
            f"the token {token.get('displayName', '')} may not write to repositories of {owner}; "
            f"add this right at {hub.endpoint()}/settings/tokens"
        )
    return None


def _is_scoped(rights: dict[str, Any], repo: str) -> bool:
    """Return whether a fine-grained token may write to a repository."""
    owner = repo.partition("/")[0]
    for scope in rights.get("scoped", []):
        name = scope.get("entity", {}).get("name")
        is_of_repo = name in (owner, repo)
        if is_of_repo and any(right in _MAY_WRITE for right in scope.get("permissions", [])):
            return True
    return any(right in _MAY_WRITE for right in rights.get("global", []))
