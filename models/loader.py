"""From the name of a model to the model: find its files, check what can be seen without loading, load."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import torch

from models.base import CausalLM, ModelError
from models.config import ModelConfig
from models.decoder import Decoder
from models.dflash import DFlashDrafter
from models.dflash_config import ARCHITECTURE as DFLASH
from models.dflash_config import DFlashConfig, read_dflash_config
from models.eagle3 import Eagle3Config, Eagle3Drafter, is_eagle3, read_eagle3_config
from models.eagle3 import weight_name as eagle3_weight_name
from models.gguf import GGUFSource, gguf_config
from models.hf_config import read_config
from models.mtp import PROJECTION, mtp_config, mtp_head, mtp_prefix, mtp_weight_name
from models.options import Dtype, ModelOptions, Quantization
from models.registry import family
from models.source import PICKLED_NAME, SafetensorsSource, WeightSource, safetensors_files
from models.weights import Precision, Weights

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model that was found and looks sound. `path` is the .gguf file or the Hugging Face folder."""

    kind: Literal["gguf", "hf"]
    path: Path
    weight_files: tuple[Path, ...]
    weight_bytes: int
    config: ModelConfig
    name: str
    # One of these is set for a drafter that is no model by itself.
    dflash: DFlashConfig | None = None
    eagle3: Eagle3Config | None = None
    mtp_of: ModelConfig | None = None  # the target's, in whose checkpoint the head is

    @property
    def drafts(self) -> Literal["standalone", "dflash", "eagle3", "mtp"]:
        """The algorithm that it can serve as a drafter for."""
        if self.dflash is not None:
            return "dflash"
        if self.eagle3 is not None:
            return "eagle3"
        return "standalone" if self.mtp_of is None else "mtp"


def inspect_model(
    options: ModelOptions, download: Callable[[str], Path] | None = None, drafter: bool = False
) -> ModelFiles:
    """Find `options.model` and check its headers, sizes and architecture, without loading weights.

    `drafter` allows for one that is no model by itself. A name that is not on this machine but looks like a hub id
    is fetched by `download` (default: the Hugging Face hub, showing progress). Raises ModelError that names the
    file and what is wrong with it.
    """
    path = Path(options.model).expanduser()
    if path.is_file():
        return _inspect_gguf(path)
    if path.is_dir():
        return _inspect_folder(path, path.resolve().name, drafter)
    if not _HUB_ID.fullmatch(options.model):
        raise ModelError(
            f"{options.model}: no such file or folder (a model is a .gguf file, a Hugging Face folder with "
            "safetensors, or a hub id like org/name)"
        )
    fetch = download or partial(hub_snapshot, pickled=drafter)
    return _inspect_folder(fetch(options.model), options.model, drafter)


def load_model(files: ModelFiles, device: torch.device, precision: Precision) -> CausalLM:
    """Load the weights on `device`, matrices brought one by one into the form that `precision` says.

    Raises ModelError for a tensor that is missing, or of another shape than the configuration says.
    """
    source: WeightSource
    source = GGUFSource(files.path) if files.kind == "gguf" else SafetensorsSource(files.weight_files)
    weights = Weights(source, str(files.path), device, precision)
    with torch.inference_mode():
        model = family(files.config, str(files.path))(files.config, weights)
    weights.warn_unread(besides=mtp_prefix(files.config))
    return model


def load_drafter(files: ModelFiles, device: torch.device, precision: Precision, target: CausalLM) -> CausalLM:
    """Load the drafter of `target`: one that borrows from it (DFlash, EAGLE-3, MTP), or a model by itself.

    A borrower computes in the target's dtype, whatever `precision` says. Raises ModelError, as `load_model`.
    """
    if files.drafts == "standalone":
        return load_model(files, device, precision)
    if not isinstance(target, Decoder):
        raise ModelError(f"{files.path}: a drafter cannot borrow from {type(target).__name__}")
    native = precision.native and target.dtype == precision.dtype
    source = SafetensorsSource(files.weight_files, _drafter_names(files))
    held = Precision(target.dtype, native, precision.quantization if native else None)
    weights = Weights(source, str(files.path), device, held)
    model: Decoder
    with torch.inference_mode():
        if files.dflash is not None:
            model = DFlashDrafter(files.config, files.dflash, weights, target)
        elif files.eagle3 is not None:
            model = Eagle3Drafter(files.config, files.eagle3, weights, target)
        else:
            model = mtp_head(files.config, str(files.path))(files.config, weights, target)
    weights.warn_unread()
    return model


def inspect_mtp(target: ModelFiles) -> ModelFiles:
    """The MTP head in the checkpoint of `target`, as a drafter. Raises ModelError if there is none."""
    mtp_head(target.config, str(target.path))
    if target.kind == "gguf":
        raise ModelError(f"{target.path}: MTP heads are read from safetensors, not from GGUF files")
    files = replace(target, config=mtp_config(target.config), mtp_of=target.config)
    if PROJECTION not in SafetensorsSource(files.weight_files, _drafter_names(files)).names():
        raise ModelError(f"{target.path}: the checkpoint has no MTP head (it may have been saved without)")
    return files


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU where there is one, else the CPU. Raises ModelError for one that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    unknown = ModelError(f"device {device!r} is not one: use auto, cpu or cuda")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise unknown from error
    if resolved.type not in ("cpu", "cuda"):
        raise unknown
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {device!r}: no CUDA device is available here")
    return resolved


def resolve_precision(
    files: ModelFiles,
    dtype: Dtype,
    device: torch.device,
    native: bool,
    quantization: Quantization | None = None,
) -> Precision:
    """What to compute in. A named dtype converts all weights to it.

    `auto` on a CPU leaves the weights in the checkpoint's own format, for the native kernels, with float32
    activations. Without those kernels (`native` False), 16-bit checkpoints and GGUF files run in bfloat16 where
    the CPU has instructions for that, else in float32. On a GPU a GGUF file runs in bfloat16, a checkpoint in its
    own type. `quantization` is for checkpoints and those kernels: ModelError for anything else.
    """
    if quantization is not None:
        if files.kind == "gguf":
            raise ModelError(
                f"{files.path}: quantization {quantization!r} is for safetensors, not for GGUF files"
            )
        if dtype != "auto" or device.type != "cpu" or not native:
            raise ModelError(f"quantization {quantization!r} needs the native CPU kernels and dtype 'auto'")
        return Precision(torch.float32, native=True, quantization=quantization)
    if dtype != "auto":
        return Precision(_DTYPES[dtype])
    if device.type == "cpu" and native:
        return Precision(torch.float32, native=True)
    if files.config.dtype == "float32":
        return Precision(torch.float32)
    if device.type == "cpu":
        return Precision(torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32)
    return Precision(_DTYPES.get(files.config.dtype or "bfloat16", torch.bfloat16))


def hub_snapshot(repo_id: str, pickled: bool = False) -> Path:
    """Fetch a model from the Hugging Face hub into its cache, with progress. Raises ModelError if it cannot.

    pickled: where it has no safetensors, PyTorch's own file will do.
    """
    from huggingface_hub import snapshot_download  # slow to import, and seldom needed
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=_HUB_FILES))
        if pickled and not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(repo_id, allow_patterns=[*_HUB_FILES, PICKLED_NAME]))
        return folder
    except GatedRepoError as error:
        raise ModelError(
            f"{repo_id}: gated on the Hugging Face hub; accept its terms and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{repo_id}: neither a local path nor a public model on the Hugging Face hub"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{repo_id}: not a local path, not in the local cache, and the Hugging Face hub cannot be reached: check "
            "the network (HF_ENDPOINT names another hub, HF_HOME another cache), or download the model elsewhere and "
            "give its folder"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{repo_id}: the download from the Hugging Face hub failed ({error})") from error


def _inspect_gguf(path: Path) -> ModelFiles:
    config = gguf_config(path)
    family(config, str(path))
    return ModelFiles("gguf", path, (path,), path.stat().st_size, config, path.stem)


def _inspect_folder(folder: Path, name: str, drafter: bool) -> ModelFiles:
    raw, where = _read_json(folder / "config.json"), str(folder / "config.json")
    config = read_config(raw, where)
    dflash = eagle3 = None
    if drafter and config.architecture == DFLASH:
        dflash = read_dflash_config(raw, where)
    elif drafter and is_eagle3(raw):
        eagle3 = read_eagle3_config(raw, where)
        config = msgspec.structs.replace(config, num_layers=1, layer_types=())  # whatever the file says
    else:
        family(config, where)
    files = safetensors_files(folder, pickled=eagle3 is not None)
    SafetensorsSource(files)  # opens every file, which checks its header against its size
    size = sum(file.stat().st_size for file in files)
    return ModelFiles("hf", folder, files, size, config, name, dflash, eagle3)


def _drafter_names(files: ModelFiles) -> Callable[[str], str | None]:
    """From names in a borrower's checkpoint to those that a whole model would have; None: of no use to it."""
    if files.mtp_of is not None:
        return mtp_weight_name(files.mtp_of)
    # Published names lack the prefix.
    return eagle3_weight_name if files.dflash is None else lambda name: f"model.{name.removeprefix('model.')}"


def _read_json(path: Path) -> dict[str, object]:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(
            f"{path}: no such file (a model is a .gguf file, or a Hugging Face folder: config.json and safetensors)"
        ) from error
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from error
