"""Download from and upload to the Hugging Face hub.

huggingface_hub does the work, so that its cache, tokens, mirrors and offline mode apply.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from vitral.data.names import CHECKPOINT_SUFFIXES
from vitral.errors import VitralError
from vitral.weights.files import error_in_one_line

SCHEME = "hf:"
CONFIG_PATTERNS = ["config.json", "preprocessor_config.json", "open_clip_config.json"]
# In order of preference: files that cannot contain code first. Only the first kind that exists is downloaded.
WEIGHT_PATTERNS = (
    ["model*.safetensors", "model.safetensors.index.json", "weights.safetensors"],
    ["open_clip_model.safetensors"],
    ["pytorch_model*.bin*"],
    ["open_clip_pytorch_model.bin"],
    ["*.npz", "*.pth", "*.pt"],
)


INSTALL_COMMAND = "pip install 'vitral[hub]'"
INFO_TIMEOUT = 10.0  # seconds for the description of a model


class HubLibraryMissing(VitralError):
    """huggingface_hub is not installed."""


class HubUnreachable(VitralError):
    """No answer from the hub: no network, offline mode, or a timeout."""


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model's page on the hub."""

    revision: str  # commit of the default branch
    license: str  # as on the hub, such as "apache-2.0"; empty if not stated
    is_gated: bool  # whether its terms must be accepted before a download
    num_bytes: int  # of the weights that `download` would fetch


def parse_hub_name(source: str) -> tuple[str, str | None]:
    """Repository and revision of hf:owner/name[@revision]."""
    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@(.+))?", source)
    if match is None:
        raise VitralError(f"{source!r} is not a model name on the hub", "Use hf:owner/name or hf:owner/name@revision")
    return match[1], match[2]


def download(source: str) -> Path:
    """Download the weights and JSON files of hf:owner/name[@revision]; returns the cached folder."""
    repository, revision = parse_hub_name(source)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise _missing_library_error(source) from error
    try:
        for patterns in WEIGHT_PATTERNS:
            folder = Path(snapshot_download(repository, revision=revision, allow_patterns=CONFIG_PATTERNS + patterns))
            if any(file.suffix in CHECKPOINT_SUFFIXES for file in folder.iterdir()):
                return folder
    except Exception as error:  # huggingface_hub does not wrap the errors of its HTTP client
        is_offline = "LocalEntryNotFoundError" in _class_names(error)
        reason = "not in the cache, and the hub is unreachable" if is_offline else error_in_one_line(error)
        raise VitralError(f"{source}: {reason}", _download_hint(error)) from error
    expected = ", ".join(pattern for patterns in WEIGHT_PATTERNS for pattern in patterns)
    raise VitralError(f"{source} contains no supported weights", f"Expected one of {expected}")


def model_info(repository: str) -> HubModel:
    """License, access and size of a model. Raises HubUnreachable, or VitralError if the hub refuses."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise _missing_library_error(f"{SCHEME}{repository}") from error
    try:
        info = HfApi(library_name="vitral").model_info(repository, timeout=INFO_TIMEOUT, files_metadata=True)
    except Exception as error:  # huggingface_hub does not wrap the errors of its HTTP client
        what = f"{SCHEME}{repository}: {error_in_one_line(error)}"
        kind = VitralError if getattr(error, "response", None) is not None else HubUnreachable
        raise kind(what, _download_hint(error)) from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    weights = (sum(sizes[name] for name in sizes if _matches(name, patterns)) for patterns in WEIGHT_PATTERNS)
    return HubModel(
        revision=info.sha or "",
        license=str(getattr(info.card_data, "license", None) or ""),
        is_gated=bool(info.gated),
        num_bytes=next(filter(None, weights), 0),
    )


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def is_cached(repository: str) -> bool:
    """Whether `download` can read the model's safetensors file from the cache."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    return isinstance(try_to_load_from_cache(repository, "model.safetensors"), str)


def upload(folder: Path, repository: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload a folder as one commit, creating the repository if necessary; returns the repository's URL."""
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError as error:
        raise _missing_library_error(f"hf:{repository}") from error
    if not get_token():
        raise VitralError(f"no token for writing to hf:{repository}", "Log in with: hf auth login (or set HF_TOKEN)")
    try:
        api = HfApi(library_name="vitral")
        url = api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=revision,
            commit_message="Upload model and model card with vitral",
        )
    except Exception as error:  # huggingface_hub does not wrap the errors of its HTTP client
        raise VitralError(
            f"upload to hf:{repository} failed: {error_in_one_line(error)}", _upload_hint(error)
        ) from error
    return str(url)


def _missing_library_error(source: str) -> HubLibraryMissing:
    return HubLibraryMissing(f"{source} requires huggingface_hub", INSTALL_COMMAND)


def _class_names(error: Exception) -> set[str]:
    """Names of the error's class and its base classes, to recognise errors of different huggingface_hub versions."""
    return {cls.__name__ for cls in type(error).__mro__}


def _upload_hint(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return "Log in with a token that has write access: hf auth login"
    dry_run = "write the files without uploading them: --dry-run --folder DIR"
    if status is not None:
        return f"The hub refused the upload; {dry_run}"
    return f"Check the network connection, set HF_ENDPOINT to a mirror, or {dry_run}"


def _download_hint(error: Exception) -> str:
    names = _class_names(error)
    if "GatedRepoError" in names:
        return "Accept the license on the model's page, then log in with: hf auth login"
    if "RepositoryNotFoundError" in names:
        return "Check the name. For a private model, log in with: hf auth login"
    if names & {"RevisionNotFoundError", "RevisionResolutionError"}:
        return "Omit @revision for the latest one, or use an existing branch, tag or commit"
    return "Check the network connection, set HF_ENDPOINT to a mirror, or pass a downloaded folder"
