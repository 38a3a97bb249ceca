"""The same prompts through Tandem and through transformers' `generate`, on the same weights, in one run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any, Literal

import msgspec
import torch
from command import print_row, run
from cyclopts import Parameter
from cyclopts.validators import Number
from in_process import InProcess, same_tokens, sources, tandem
from prompts import Prompt, PromptOptions
from timing import Timing
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from app.settings import EngineSettings
from engine.request import SamplingParams
from models.gguf import GGUFSource
from models.loader import ModelFiles, inspect_model, resolve_device

ReferenceDtype = Literal["float32", "bfloat16"]

_WIDTHS = (10, 18, 9, 10, 12)


@dataclass(frozen=True)
class Run:
    """One prompt through one engine."""

    token_ids: tuple[int, ...]
    timing: Timing


class ArrivalTimes(BaseStreamer):
    """Notes when `generate` hands out tokens."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.arrivals.append((time.perf_counter(), value.numel()))
        self._prompt_seen = True  # the first thing handed out is the prompt

    def end(self) -> None:
        pass


def compare_transformers(
    *,
    max_tokens: Annotated[int, Parameter(validator=Number(gte=2))] = 64,
    transformers_dtype: tuple[ReferenceDtype, ...] = ("float32", "bfloat16"),
    options: Annotated[PromptOptions, Parameter(name="*")] = PromptOptions(),
    settings: Annotated[EngineSettings, Parameter(name="*")] = EngineSettings(),
) -> int:
    """Decode the same prompts greedily with Tandem and with transformers, in turn, with as many threads.

    One request at a time, each to exactly --max-tokens. Tandem runs without speculation and without its prefix
    cache: what is compared is the work that both do. Ratios above 1 mean that Tandem is faster.

    Parameters
    ----------
    max_tokens
        Tokens of every answer.
    transformers_dtype
        What transformers holds the dequantised weights in, and computes in. The first one makes the ratios.
    """
    prompts = options.read()
    settings = replace(settings, disable_prefix_caching=True)
    runs: list[dict[str, Run]] = []
    with tandem(settings) as engine:
        references = load_references(settings, transformers_dtype)
        names = ["tandem", *references]
        measure(engine, references, names, engine.encode(["Hello"]), 4)  # the first steps are slow
        print_row(("prompt", "engine", "TTFT ms", "tokens/s", "same tokens"), _WIDTHS)
        for number, prompt in enumerate(prompts):
            prompt_ids = engine.encode(prompt.turns[:1])
            if len(prompt_ids) + max_tokens > engine.max_context_len:
                print(f"prompt {prompt.id}: skipped, it does not fit in the context", flush=True)
                continue
            order = names[number % len(names) :] + names[: number % len(names)]
            row = measure(engine, references, order, prompt_ids, max_tokens)
            runs.append(row)
            _print(prompt, row, names)
    if not runs:
        raise ValueError(f"{options.prompts}: no prompt fits in the context")
    summary = summarise(runs, list(references)) | {"threads": torch.get_num_threads()}
    for name, ratios in summary["against"].items():
        print(
            f"tandem against {name}: {ratios['decode_tokens_per_s']:.2f} times the decode tokens/s, "
            f"TTFT {ratios['ttft']:.2f} times shorter, "
            f"{ratios['identical']} of {len(runs)} texts identical, median of tokens in common "
            f"{ratios['same_tokens']:.0f} of {max_tokens}"
        )
    if options.json:
        print(msgspec.json.encode(summary).decode())
    return 0


def load_references(settings: EngineSettings, dtypes: Sequence[ReferenceDtype]) -> dict[str, PreTrainedModel]:
    """The same model in transformers, by name."""
    files = inspect_model(settings.model_options())
    device = resolve_device(settings.device)
    return {
        f"transformers {name}": load_reference(files, getattr(torch, name), device)
        for name in dict.fromkeys(dtypes)
    }


def load_reference(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model of `files` in transformers, a GGUF file's weights dequantised, with no token that ends a text."""
    if files.kind == "gguf":
        config = AutoConfig.from_pretrained(
            files.path.parent,
            gguf_file=files.path.name,
            vocab_size=files.config.vocab_size,  # these two transformers does not read in every file
            head_dim=files.config.head_dim,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        source = GGUFSource(files.path)
        weights = {name: source.tensor(name) for name in source.names()}
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])  # where it is tied
        model.load_state_dict(weights)
    else:
        model = AutoModelForCausalLM.from_pretrained(files.path, dtype=dtype)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return model.to(device).eval()


def measure(
    engine: InProcess,
    references: dict[str, PreTrainedModel],
    order: Sequence[str],
    prompt_ids: list[int],
    max_tokens: int,
) -> dict[str, Run]:
    """One prompt through every engine, one after the other."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    runs = {}
    for name in order:
        if name in references:
            runs[name] = generate(references[name], prompt_ids, max_tokens)
        else:
            answer = engine.generate(prompt_ids, sampling, "none")
            runs[name] = Run(answer.token_ids, answer.timing)
    return runs


def generate(
    model: PreTrainedModel, prompt_ids: list[int], max_tokens: int, stop_token_ids: Sequence[int] = ()
) -> Run:
    """`max_tokens` greedy tokens from transformers, or those up to the first of `stop_token_ids`."""
    inputs = torch.tensor([prompt_ids], device=model.device)
    streamer = ArrivalTimes()
    start = time.perf_counter()
    output = model.generate(  # type: ignore[operator]  # typed as any attribute of a module
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_tokens,
        eos_token_id=list(stop_token_ids) or None,
        streamer=streamer,
    )
    token_ids = tuple(output[0, len(prompt_ids) :].tolist())
    return Run(token_ids, Timing.of(start, streamer.arrivals))


def summarise(runs: Sequence[dict[str, Run]], references: Sequence[str]) -> dict[str, Any]:
    """Ratios are medians over the prompts, each of which was run on all engines within moments."""
    against = {
        name: {
            "decode_tokens_per_s": median(
                row["tandem"].timing.tokens_per_s / row[name].timing.tokens_per_s for row in runs
            ),
            "ttft": median(row[name].timing.ttft / row["tandem"].timing.ttft for row in runs),
            "identical": sum(row["tandem"].token_ids == row[name].token_ids for row in runs),
            "same_tokens": median(same_tokens(row["tandem"].token_ids, row[name].token_ids) for row in runs),
        }
        for name in references
    }
    first = against[references[0]]
    return {
        "ratios": {"decode_tokens_per_s": first["decode_tokens_per_s"], "ttft": first["ttft"]},
        "against": against,
        "engines": {
            name: {
                "decode_tokens_per_s": median(row[name].timing.tokens_per_s for row in runs),
                "ttft_ms": 1000 * median(row[name].timing.ttft for row in runs),
            }
            for name in ("tandem", *references)
        },
        "prompts": len(runs),
    }


def _print(prompt: Prompt, row: dict[str, Run], names: Sequence[str]) -> None:
    for name in names:
        run = row[name]
        same = None if name == "tandem" else same_tokens(row["tandem"].token_ids, run.token_ids)
        print_row((prompt.id, name, 1000 * run.timing.ttft, run.timing.tokens_per_s, same), _WIDTHS)


if __name__ == "__main__":
    sys.exit(run(compare_transformers, config=sources(os.environ)))
