"""The explorer of the served models at /explorer/: a site in which they run in the browser.

It contains the weights, so it is offered only where they may be read: by default to this machine alone, and never
together with API keys. The files are written in memory when the first of them is requested.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

from vitral.errors import VitralError
from vitral.explorer.build import ExplorerOptions, site_model
from vitral.explorer.supported import unsupported_reason
from vitral.explorer.write import site_files
from vitral.serve.hosts import LOCAL_HOSTS
from vitral.serve.models import ServedModel

ExplorerSetting = Literal["auto", "on", "off"]
# The engine runs in a worker that is created from a string, and compiles WebAssembly.
EXPLORER_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' blob: data:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def is_explorer_offered(setting: ExplorerSetting, host: str, keys: Sequence[str] | None) -> bool:
    """Whether the server publishes its models' weights. auto: to this machine, without API keys."""
    if setting == "on" and keys is not None:
        raise VitralError(
            "the explorer publishes the weights of the models, also to visitors without an API key",
            "Omit --explorer on, or serve without keys",
        )
    return setting == "on" or (setting == "auto" and keys is None and host in LOCAL_HOSTS)


class ServedExplorer:
    """The site's files. Models that a browser cannot run are left out."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = [
            model for model in models if unsupported_reason(model.predictor.model, model.predictor.model_config) is None
        ]
        for model in self.models:
            model.in_explorer = True
        self._files: Mapping[str, bytes] | None = None
        self._lock = asyncio.Lock()

    async def file(self, name: str) -> bytes | None:
        """The content of a file of the site; None if there is no such file."""
        if not self.models:
            return None
        async with self._lock:
            if self._files is None:
                self._files = await asyncio.get_running_loop().run_in_executor(None, self._write)
        return self._files.get(name)

    def _write(self) -> dict[str, bytes]:
        options = ExplorerOptions()
        models = [site_model(model.predictor.reference(), model.name, options) for model in self.models]
        return {name: text.encode() for name, text in site_files(models).items()}
