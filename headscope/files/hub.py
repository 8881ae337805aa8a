"""Folders on the model hub: checked before the work begins, uploaded once they are whole.

Everything goes through huggingface_hub's own client, with the token that it finds (`hf auth login`, or HF_TOKEN).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headscope.errors import ConfigError, OutputError, flag, reason_of, restate
from headscope.files.output_checks import RECORDS


@dataclass(frozen=True, kw_only=True)
class HubTarget:
    """A repository on the hub, `user/name`. A new one is private unless `public`; one that exists stays as it is."""

    name: str
    public: bool = False


def is_cached(name: str) -> bool:
    """Whether a model of the hub was fetched before; False for whatever is no name there. Asks no server."""
    if name.count("/") > 1:
        return False
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def hub_target(name: str | None, *, public: bool = False) -> HubTarget | None:
    """Where to push to, if anywhere, checked: the name, and that the hub answers to the token.

    ConfigError for a name that is none, and for no token; OutputError where the hub does
    not answer.
    """
    if name is None:
        return None
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    advice = "give USER/NAME, of letters, digits, '-', '_' and '.'"
    with restate(ConfigError, f"{flag.hub_name} {name!r} is no name on the hub; {advice}", HFValidationError):
        validate_repo_id(name if "/" in name else "")
    if get_token() is None:
        raise ConfigError(f"{flag.hub_name} {name} needs a token of the hub: run `hf auth login`, or set HF_TOKEN")
    try:
        HfApi().whoami()
    except Exception as error:  # whatever the client raises without a network, or for a token that is refused
        raise OutputError(
            f"the hub cannot be reached or refuses the token, so nothing was begun ({reason_of(error, max_length=200)})"
        ) from error
    return HubTarget(name=name, public=public)


def push(folder: Path, target: HubTarget, *, title: str) -> str:
    """Upload a complete folder in one commit; returns its address.

    The records of headscope's runs stay here, because they name paths of this machine. Files that are in the repository
    and not in the folder stay there. OutputError where the hub refuses: the folder is complete all the same.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(target.name, private=not target.public, exist_ok=True, repo_type="model")
        api.upload_folder(
            repo_id=target.name,
            folder_path=folder,
            repo_type="model",
            commit_message=title,
            ignore_patterns=list(RECORDS),
        )
    except Exception as error:  # whatever the client raises
        raise OutputError(
            f"{folder} is complete but was not pushed to {target.name} ({reason_of(error, max_length=200)}); try again "
            f"with `hf upload {target.name} {folder}`"
        ) from error
    return str(url)
