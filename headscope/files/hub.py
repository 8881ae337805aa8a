"""Folders on the model hub: checked before the work begins, uploaded once they are whole.

Everything goes through huggingface_hub's own client, with the token that it finds (`hf auth login`, or HF_TOKEN).
"""

from __future__ import annotations

from pathlib import Path

from headscope.errors import ConfigError, OutputError, flag, restate
from headscope.files.output_checks import RECORDS


def is_cached(name: str) -> bool:
    """Whether a model of the hub is in the local cache; False for a text that is no name on the hub."""
    if name.count("/") > 1:
        return False
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def check_hub(name: str | None) -> None:
    """ConfigError for an invalid repository name or a missing token; OutputError if the hub cannot be reached."""
    if name is None:
        return
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    advice = "give USER/NAME, of letters, digits, '-', '_' and '.'"
    with restate(ConfigError, f"{flag.hub_name} {name!r} is no name on the hub; {advice}", HFValidationError):
        validate_repo_id(name if "/" in name else "")
    if get_token() is None:
        raise ConfigError(f"{flag.hub_name} {name} needs a token of the hub: run `hf auth login`, or set HF_TOKEN")
    # Exception: the client raises many kinds without a network or for a refused token
    problem = "the hub cannot be reached or refuses the token, so nothing was begun ({why})"
    with restate(OutputError, problem, Exception):
        HfApi().whoami()


def push(folder: Path, name: str, *, public: bool, title: str) -> str:
    """Upload a complete folder to the repository `user/name` in one commit; returns its address.

    A new repository is private unless `public`; one that exists stays as it is. The records of headscope's runs stay
    here, because they name paths of this machine. Files that are in the repository and not in the folder stay there.
    OutputError where the hub refuses: the folder is complete all the same.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    advice = f"try again with `hf upload {name} {folder}`"
    with restate(OutputError, f"{folder} is complete but was not pushed to {name} ({{why}}); {advice}", Exception):
        url = api.create_repo(name, private=not public, exist_ok=True, repo_type="model")
        api.upload_folder(
            repo_id=name, folder_path=folder, repo_type="model", commit_message=title, ignore_patterns=list(RECORDS)
        )
    return str(url)
