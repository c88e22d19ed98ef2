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


def fetch(source: str) -> Path:
    spelled = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@(.+))?", source)
    if spelled is None:
        raise VitralError(f"{source!r} is not a model on the hub", "write hf:owner/name or hf:owner/name@revision")
    repository, revision = spelled.groups()
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
        raise VitralError(f"{source}: {one_line(error)}", _what_to_do(error)) from error
    looked_for = ", ".join(pattern for patterns in WEIGHTS for pattern in patterns)
    raise VitralError(f"{source} holds no weights that vitral reads", f"looked for {looked_for}")


def _what_to_do(error: Exception) -> str:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return "its owner asks for an agreement: accept it on the model's page, then log in with: hf auth login"
    if "RepositoryNotFoundError" in kinds:
        return "is the name right? For a private model, log in with: hf auth login"
    if kinds & {"RevisionNotFoundError", "RevisionResolutionError"}:
        return "leave out @revision for the newest, or name a branch, a tag or a commit"
    return "no network? A model fetched before is read from the cache; HF_ENDPOINT names a mirror; a folder works too"
