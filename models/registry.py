"""Architecture names, as checkpoints spell them, and the class that runs each."""

from __future__ import annotations

from models.base import ModelError
from models.config import ModelConfig
from models.decoder import Decoder
from models.deepseek_v2 import DeepseekV2ForCausalLM
from models.dflash_config import ARCHITECTURE as DFLASH
from models.eagle3 import ARCHITECTURES as EAGLE3
from models.gemma3 import Gemma3ForCausalLM
from models.granite_hybrid import GraniteMoeHybridForCausalLM
from models.lfm2 import Lfm2ForCausalLM
from models.llama import LlamaForCausalLM
from models.mamba2 import Mamba2ForCausalLM
from models.mistral import MistralForCausalLM
from models.nemotron_h import NemotronHForCausalLM
from models.qwen2 import Qwen2ForCausalLM
from models.qwen3 import Qwen3ForCausalLM
from models.qwen3_5 import Qwen3_5ForCausalLM
from models.qwen3_moe import Qwen3MoeForCausalLM
from models.qwen3_next import Qwen3NextForCausalLM

FAMILIES: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "MinistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5ForConditionalGeneration": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5ForCausalLM,
    "Lfm2ForCausalLM": Lfm2ForCausalLM,
    "Mamba2ForCausalLM": Mamba2ForCausalLM,
    "NemotronHForCausalLM": NemotronHForCausalLM,
    "GraniteMoeHybridForCausalLM": GraniteMoeHybridForCausalLM,
    "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekV2ForCausalLM,
    "KimiK25ForConditionalGeneration": DeepseekV2ForCausalLM,
    "Kimi_K25ForConditionalGeneration": DeepseekV2ForCausalLM,  # as transformers spells it
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma3ForConditionalGeneration": Gemma3ForCausalLM,
}


def family(config: ModelConfig, where: str) -> type[Decoder]:
    """The class for `config`. Raises ModelError, which starts with `where`, for an architecture not in FAMILIES."""
    found = FAMILIES.get(config.architecture)
    if config.architecture in (DFLASH, *EAGLE3):
        raise ModelError(
            f"{where}: a drafter is no model by itself; give it as --speculative-draft-model-path"
        )
    if found is None:
        raise ModelError(
            f"{where}: architecture {config.architecture!r} is not supported ({', '.join(sorted(FAMILIES))} are)"
        )
    return found
