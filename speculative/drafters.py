"""Which drafter a drafting model makes, and what may be asked for then."""

from __future__ import annotations

from engine.runner import ModelRunner
from models.base import ModelError
from speculative.dflash import DFlash
from speculative.drafter import Drafter
from speculative.options import Algorithm, SpeculativeOptions
from speculative.standalone import Standalone


def make_drafter(runner: ModelRunner, options: SpeculativeOptions, vocab_size: int) -> Drafter:
    """The drafter over `runner`'s model, for a target of `vocab_size` tokens.

    Raises ModelError where `options` name another algorithm than the model is for.
    """
    kind = "standalone" if runner.files.dflash is None else "dflash"
    if options.algorithm not in (kind, "auto"):
        what = "a model of its own" if kind == "standalone" else "a DFlash drafter"
        raise ModelError(
            f"{runner.files.path} is {what}: --speculative-algorithm {kind} (or auto) drafts with it, "
            f"{options.algorithm} does not"
        )
    if kind == "standalone":
        return Standalone(runner, options.num_draft_tokens, vocab_size)
    return DFlash(runner, options.num_draft_tokens, vocab_size, options.draft_window_size)


def offered(algorithm: Algorithm, drafter: Drafter | None) -> tuple[str, ...]:
    """What a request may ask of a server that runs `algorithm`."""
    if algorithm != "auto":
        return tuple(dict.fromkeys(("none", algorithm)))
    return ("none", "ngram", *([] if drafter is None else [drafter.name]), "auto")
