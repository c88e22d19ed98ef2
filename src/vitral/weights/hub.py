"""hf:owner/name[@revision] → a folder, through huggingface_hub: its cache, tokens, mirrors and offline mode hold."""

from __future__ import annotations

import re
from pathlib import Path

from vitral.errors import VitralError
from vitral.weights.files import SUFFIXES, one_line

SCHEME = "hf:"
CONFIGS = ["config.json", "preprocessor_config.json"]
# In this order: what cannot hold code first, and nothing twice.
WEIGHTS = (
    ["model*.safetensors", "model.safetensors.index.json", "weights.safetensors"],
    ["pytorch_model*.bin*"],
    ["*.npz", "*.pth", "*.pt"],
)


def spelled(source: str) -> tuple[str, str | None]:
    """owner/name, and the revision if one is named."""
    found = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@(.+))?", source)
    if found is None:
        raise VitralError(f"{source!r} is not a model on the hub", "write hf:owner/name or hf:owner/name@revision")
    return found[1], found[2]


def fetch(source: str) -> Path:
    repository, revision = spelled(source)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise VitralError(f"{source} needs huggingface_hub", "pip install 'vitral[hub]'") from error
    try:
        for weights in WEIGHTS:
            folder = Path(snapshot_download(repository, revision=revision, allow_patterns=CONFIGS + weights))
            if any(file.suffix in SUFFIXES for file in folder.iterdir()):
                return folder
    except Exception as error:  # huggingface_hub lets its HTTP client's own errors through
        kinds = {kind.__name__ for kind in type(error).__mro__}
        absent = "LocalEntryNotFoundError" in kinds
        what = "not in the cache, and the hub was not reached" if absent else one_line(error)
        raise VitralError(f"{source}: {what}", _what_to_do(error)) from error
    looked_for = ", ".join(pattern for patterns in WEIGHTS for pattern in patterns)
    raise VitralError(f"{source} holds no weights that vitral reads", f"looked for {looked_for}")


def upload(folder: Path, repository: str, *, private: bool = False, revision: str | None = None) -> str:
    """The folder as one commit, in a repository that is made if it is not there; returns its address."""
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError as error:
        raise VitralError(f"hf:{repository} needs huggingface_hub", "pip install 'vitral[hub]'") from error
    if not get_token():
        raise VitralError(
            f"there is no token to write hf:{repository} with", "log in with: hf auth login (or set HF_TOKEN)"
        )
    try:
        api = HfApi(library_name="vitral")
        made = api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=revision,
            commit_message="A model from vitral, with its card",
        )
    except Exception as error:  # huggingface_hub lets its HTTP client's own errors through
        raise VitralError(f"hf:{repository} was not written: {one_line(error)}", _why_not_written(error)) from error
    return str(made)


def _why_not_written(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return "may this token write there? Make one with write access and log in with: hf auth login"
    if status is not None:
        return "the hub refused it; --dry-run --folder DIR writes the same files without uploading"
    return "no network? HF_ENDPOINT names a mirror; --dry-run --folder DIR writes the same files without uploading"


def _what_to_do(error: Exception) -> str:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return "its owner asks for an agreement: accept it on the model's page, then log in with: hf auth login"
    if "RepositoryNotFoundError" in kinds:
        return "is the name right? For a private model, log in with: hf auth login"
    if kinds & {"RevisionNotFoundError", "RevisionResolutionError"}:
        return "leave out @revision for the newest, or name a branch, a tag or a commit"
    return "no network? A model fetched before is read from the cache; HF_ENDPOINT names a mirror; a folder works too"
