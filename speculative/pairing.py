"""Whether a drafter belongs to its target: what their files say of each other, checked before any weight is loaded."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from models.base import ModelError
from models.eagle3 import Eagle3Config
from models.gguf_reader import read_header
from models.loader import ModelFiles, inspect_model, inspect_mtp
from models.options import ModelOptions
from speculative.options import Algorithm

logger = logging.getLogger(__name__)

_SAMPLES, _SAMPLE_BYTES = 16, 256  # of each tensor


def inspect_drafter(options: ModelOptions, target: ModelFiles, algorithm: Algorithm = "auto") -> ModelFiles:
    """Find the drafter, as `inspect_model` finds a model, and check that it fits `target`. Raises ModelError.

    For `mtp` that is the head in the target's own checkpoint.
    """
    if algorithm == "mtp":
        return inspect_mtp(target)
    files = inspect_model(options, drafter=True)
    if files.eagle3 is not None:
        files = _for_target(files, files.eagle3, target)
    check_pairing(files, target)
    return files


def check_pairing(drafter: ModelFiles, target: ModelFiles) -> None:
    """Raise ModelError, naming both and the field, if they cannot work together; warn where they do so badly.

    A drafter that is a model by itself shares nothing with its target but the vocabulary.
    """
    ours, theirs, dflash = drafter.config, target.config, drafter.dflash

    def refuse(what: str) -> ModelError:
        return ModelError(f"{_config(drafter)} does not fit {_config(target)}: {what}")

    def same(field: str, own: int | None, other: int) -> None:
        if own is not None and own != other:
            raise refuse(f"{field} is {own}, that of the target {other}")

    def layers_exist(name: str, layer_ids: Sequence[int]) -> None:
        beyond = [layer for layer in layer_ids if not 0 <= layer < theirs.num_layers]
        if beyond:
            raise refuse(f"{name} has {beyond}, but the target's {theirs.num_layers} layers count from 0")

    def not_more_tokens(size: int) -> None:
        if size > theirs.vocab_size:
            raise refuse(f"draft_vocab_size {size} is more than its {theirs.vocab_size} tokens")

    same("vocab_size", ours.vocab_size, theirs.vocab_size)
    if drafter.eagle3 is not None:
        same("target_hidden_size", drafter.eagle3.target_hidden_size, theirs.hidden_size)
        layers_exist("eagle_aux_hidden_state_layer_ids", drafter.eagle3.target_layer_ids)
        not_more_tokens(drafter.eagle3.draft_vocab_size)
    if dflash is None:
        return
    same("hidden_size", ours.hidden_size, theirs.hidden_size)
    same("num_target_layers", dflash.num_target_layers, theirs.num_layers)
    layers_exist("target_layer_ids", dflash.target_layer_ids)
    if dflash.mask_token_id >= theirs.vocab_size:
        raise refuse(f"mask_token_id {dflash.mask_token_id} is not in its vocabulary of {theirs.vocab_size}")
    not_more_tokens(dflash.draft_vocab_size or 0)
    if ours.rope.theta != theirs.rope.theta:
        logger.warning(
            "%s: rope_theta is %g, that of the target %g: right only if it was trained so",
            _config(drafter),
            ours.rope.theta,
            theirs.rope.theta,
        )
    if ours.context_length < theirs.context_length:
        logger.info(
            "%s: drafts up to position %d, the target goes on to %d without",
            drafter.name,
            ours.context_length,
            theirs.context_length,
        )
    if dflash.target_digest is not None and dflash.target_digest != target_digest(target):
        logger.warning(
            "%s was trained on another file than %s (target_digest): the text stays that of the target, but fewer "
            "drafted tokens are accepted, the fewer the more the two differ",
            drafter.path,
            target.path,
        )


def target_layer_ids(drafter: ModelFiles) -> tuple[int, ...]:
    """The layers whose outputs it asks of the target."""
    if drafter.mtp_of is not None:
        return (drafter.mtp_of.num_layers - 1,)
    reader = drafter.dflash or drafter.eagle3
    return () if reader is None else reader.target_layer_ids


def scratch_slots(drafter: ModelFiles, num_draft_tokens: int, max_running_requests: int) -> int:
    """Slots of the drafter's pool for what it drafts at once, a block for each running request."""
    block = num_draft_tokens if drafter.dflash is None else drafter.dflash.block_size
    return block * max_running_requests


def target_digest(files: ModelFiles) -> str:
    """What tells one model from another: SHA-256 of every tensor's name, type, shape and some of its bytes.

    The bytes are 16 runs of 256, spread evenly. It is the same however a checkpoint is sharded, and another for
    another file format or quantisation of it, whose hidden states differ too.
    """
    digest = hashlib.sha256()
    for name, kind, shape, path, start, size in sorted(_tensors(files)):
        digest.update(f"{name} {kind} {list(shape)}\n".encode())
        with open(path, "rb") as file:
            for index in range(_SAMPLES):
                offset = (size - _SAMPLE_BYTES) * index // (_SAMPLES - 1)
                file.seek(start + max(offset, 0))
                digest.update(file.read(min(_SAMPLE_BYTES, size)))
    return digest.hexdigest()


def _for_target(drafter: ModelFiles, eagle3: Eagle3Config, target: ModelFiles) -> ModelFiles:
    """An EAGLE-3 drafter with what its configuration leaves to the target.

    It drafts wherever the target writes: the positions that published configurations name are those of its training.
    """
    config, context = drafter.config, target.config.context_length
    if config.context_length < context and config.rope.type in ("default", "llama3"):
        config = msgspec.structs.replace(config, max_position_embeddings=context)
    return replace(drafter, config=config, eagle3=eagle3.of_target(target.config.num_layers))


def _tensors(files: ModelFiles) -> Iterator[tuple[str, str, tuple[int, ...], Path, int, int]]:
    """Name, type and shape of every tensor; then its file, where in that it begins, and its bytes."""
    if files.kind == "gguf":
        for info in read_header(files.path).tensors.values():
            yield info.name, info.format, info.shape, files.path, info.offset, info.nbytes
        return
    for path in files.weight_files:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                yield name, entry["dtype"], tuple(entry["shape"]), path, 8 + length + first, last - first


def _config(files: ModelFiles) -> Path:
    return files.path / "config.json" if files.kind == "hf" else files.path
