"""Which drafter a drafting model makes, and what may be asked for then."""

from __future__ import annotations

from engine.runner import ModelRunner
from models.base import ModelError
from speculative.dflash import DFlash
from speculative.drafter import Drafter
from speculative.feature_chain import MTP, Eagle3
from speculative.options import Algorithm, SpeculativeOptions
from speculative.standalone import Standalone

_KINDS = {
    "standalone": "a model of its own",
    "dflash": "a DFlash drafter",
    "eagle3": "an EAGLE-3 drafter",
    "mtp": "an MTP head",
}


def make_drafter(runner: ModelRunner, options: SpeculativeOptions, vocab_size: int) -> Drafter:
    """The drafter over `runner`'s model, for a target of `vocab_size` tokens.

    Raises ModelError where `options` name another algorithm than the model is for, or a window that it has not.
    """
    kind = runner.files.drafts
    if options.algorithm not in (kind, "auto"):
        raise ModelError(
            f"{runner.files.path} is {_KINDS[kind]}: --speculative-algorithm {kind} (or auto) drafts with it, "
            f"{options.algorithm} does not"
        )
    if kind == "dflash":
        return DFlash(runner, options.num_draft_tokens, vocab_size, options.draft_window_size)
    if options.draft_window_size is not None:
        raise ModelError(
            f"--speculative-draft-window-size is for DFlash drafters: {runner.files.path} is {_KINDS[kind]}"
        )
    made: dict[str, type[Drafter]] = {"standalone": Standalone, "eagle3": Eagle3, "mtp": MTP}
    return made[kind](runner, options.num_draft_tokens, vocab_size)


def offered(algorithm: Algorithm, drafter: Drafter | None) -> tuple[str, ...]:
    """What a request may ask of a server that runs `algorithm`."""
    if algorithm != "auto":
        return tuple(dict.fromkeys(("none", algorithm)))
    return ("none", "ngram", *([] if drafter is None else [drafter.name]), "auto")
