"""What is meant by words on the command line that no command takes: slips, and the names that other servers use."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from cyclopts import CycloptsError, UnknownOptionError, UnusedCliTokensError

_OURS = {
    "--model": ("-m", "--model-path", "--hf-repo"),
    "--context-length": ("--max-model-len", "--ctx-size", "-c", "--n-ctx"),
    "--tp-size": ("--tensor-parallel-size", "--tp", "-tp"),
    "--mem-fraction-static": ("--gpu-memory-utilization",),
    "--max-running-requests": ("--max-num-seqs", "--parallel", "-np"),
    "--chunked-prefill-size": ("--max-num-batched-tokens", "--ubatch-size", "-ub"),
    "--page-size": ("--block-size",),
    "--threads": ("-t",),
    "--served-model-name": ("--alias", "-a"),
    "--speculative-draft-model-path": ("--speculative-model", "--model-draft", "-md"),
    "--speculative-num-draft-tokens": ("--num-speculative-tokens", "--draft-max"),
    "--max-tokens": ("--max-new-tokens", "--n-predict", "-n"),
    "--temperature": ("--temp",),
    "--repetition-penalty": ("--repeat-penalty",),
}
"""Flags, each with the names that others have for it."""

_ELSEWHERE = {theirs: ours for ours, names in _OURS.items() for theirs in names}
_NOT_NEEDED = ("--trust-remote-code", "--n-gpu-layers", "--gpu-layers", "-ngl", "--enforce-eager")
_STDIN = "-"
_NEAR = 0.81  # --prot is so near to --port, --max-tokens is not to --max-total-tokens

_SURPLUS = {
    "serve": "name the model with --model {}",
    "chat": "name the model with --model {}",
    "generate": "put the prompt in quotes",
}


def usage(error: CycloptsError) -> str:
    """What `error` says, with what was probably meant."""
    if isinstance(error, UnknownOptionError):
        word = (error.token.keyword or error.token.value).partition("=")[0]
        names = [name for argument in error.argument_collection for name in argument.names]
        return f"unknown option {word}{_meant(word, names)}"
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        word = error.unused_tokens[0]
        hint = _SURPLUS.get((error.command_chain or ("",))[-1], "")
        return f"{word!r} is one word too many" + (f": {hint.format(word)}" if hint else "")
    return str(error)


def _meant(word: str, names: Collection[str]) -> str:
    if word == _STDIN:
        return ": without a prompt, standard input is read"
    if word in _NOT_NEEDED:
        return ": it is not needed here, leave it out"
    ours = _ELSEWHERE.get(word)
    near = [ours] if ours in names else difflib.get_close_matches(word, names, 1, _NEAR)
    return f"; did you mean {near[0]}?" if near else ""
