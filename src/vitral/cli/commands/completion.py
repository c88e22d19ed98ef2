"""vitral completion: print a shell completion script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitral.cli.parsing import Command, argument


@dataclass(frozen=True, kw_only=True)
class CompletionArgs:
    """Print a completion script.

    bash: add `source <(vitral completion bash)` to ~/.bashrc.

    zsh: add `source <(vitral completion zsh)` to ~/.zshrc, after compinit.

    fish: vitral completion fish > ~/.config/fish/completions/vitral.fish
    """

    shell: Literal["bash", "zsh", "fish"] = argument("shell to complete in: bash, zsh or fish")


def completion(args: CompletionArgs) -> int:
    from vitral.cli.completion import completion_script

    print(completion_script(args.shell), end="")
    return 0


COMMAND = Command("completion", CompletionArgs, completion)
