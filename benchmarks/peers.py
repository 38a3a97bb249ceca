"""Engines behind one interface, each in a process of its own: Tandem, llama.cpp, OpenVINO GenAI, transformers.

`compare_cpu.py` starts this file once for each engine and talks to it in lines of JSON; a process of its own is what
makes start-up time and peak memory those of one engine. The interpreter may be one of another environment, so
nothing but the standard library is imported before the engine is known.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TextIO

# generate(prompts, max_tokens, mode, stop) decodes every prompt greedily to exactly max_tokens, all prompts at once; or
# a single one until it writes a token of `stop`, if there are any. It gives, of each, seconds from the start to its
# first and to its last token, and the tokens.
Answer = tuple[float, float, list[int]]
Generate = Callable[[Sequence[list[int]], int, str, Sequence[int]], list[Answer]]


def tandem(settings: dict[str, Any], stack: ExitStack) -> Generate:
    """Modes are algorithms of speculation. Nothing is kept of earlier requests, neither prefixes nor n-grams."""
    from concurrent.futures import ThreadPoolExecutor

    import in_process

    from app.settings import EngineSettings
    from engine.request import SamplingParams

    options = EngineSettings(
        model=settings["model"],
        speculative_algorithm="auto",
        speculative_draft_model_path=settings["drafter"],
        max_running_requests=settings["streams"],
        context_length=settings["context"],
        max_total_tokens=settings["context"],
        disable_prefix_caching=True,
        speculative_ngram_history=0,
        threads=settings["threads"],
    )
    engine = stack.enter_context(in_process.tandem(options))
    pool = stack.enter_context(ThreadPoolExecutor(settings["streams"]))

    def generate(
        prompts: Sequence[list[int]], max_tokens: int, mode: str, stop: Sequence[int]
    ) -> list[Answer]:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=not stop)

        def one(prompt: list[int]) -> Answer:
            answer = engine.generate(prompt, sampling, mode)
            first = answer.timing.ttft
            return first, first + answer.timing.decode_seconds, list(answer.token_ids)

        return list(pool.map(one, prompts))

    return generate


def llama_cpp(settings: dict[str, Any], stack: ExitStack) -> Generate:
    """Modes: `plain`, through the C interface, and `lookup`, its own prompt-lookup decoding (one prompt)."""
    import llama_cpp as library
    import numpy as np
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    library.llama_backend_init()
    batch_size = 512
    path = settings["model"]
    parameters = library.llama_context_default_params()
    parameters.n_ctx, parameters.n_seq_max = settings["context"], settings["streams"]
    parameters.n_batch = parameters.n_ubatch = batch_size
    parameters.n_threads = parameters.n_threads_batch = settings["threads"]
    if hasattr(parameters, "kv_unified"):  # one cache for all streams, as the others have
        parameters.kv_unified = True
    model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
    context = library.llama_init_from_model(model, parameters)
    vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    batch = library.llama_batch_init(batch_size, 0, 1)
    high_level: list[Any] = []

    def decode(rows: Sequence[tuple[int, int, int, bool]]) -> dict[int, int]:
        """One pass over (token, position, sequence, wanted) rows: the next token of each sequence that wants one."""
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        batch.n_tokens = len(rows)
        if library.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        return {
            row[2]: int(np.ctypeslib.as_array(library.llama_get_logits_ith(context, i), (vocab,)).argmax())
            for i, row in enumerate(rows)
            if row[3]
        }

    def plain(prompts: Sequence[list[int]], max_tokens: int, stop: Sequence[int]) -> list[Answer]:
        library.llama_memory_clear(library.llama_get_memory(context), True)
        start = time.perf_counter()
        rows = [
            (token, i, s, i == len(prompt) - 1)
            for s, prompt in enumerate(prompts)
            for i, token in enumerate(prompt)
        ]
        tokens: dict[int, list[int]] = {s: [] for s in range(len(prompts))}
        first = {}
        for at in range(0, len(rows), batch_size):
            for s, token in decode(rows[at : at + batch_size]).items():
                tokens[s].append(token)
                first[s] = time.perf_counter() - start
        for step in range(max_tokens - 1):
            if tokens[0][-1] in stop:
                break
            following = [(tokens[s][-1], len(prompt) + step, s, True) for s, prompt in enumerate(prompts)]
            for s, token in decode(following).items():
                tokens[s].append(token)
        end = time.perf_counter() - start
        return [(first[s], end, tokens[s]) for s in range(len(prompts))]

    def lookup(prompt: list[int], max_tokens: int, stop: Sequence[int]) -> Answer:
        if not high_level:
            high_level.append(
                library.Llama(
                    path,
                    n_ctx=settings["context"],
                    n_threads=settings["threads"],
                    n_threads_batch=settings["threads"],
                    draft_model=LlamaPromptLookupDecoding(num_pred_tokens=settings["drafts"]),
                    logits_all=True,
                    verbose=False,
                )
            )
        llama = high_level[0]
        llama.reset()
        start = time.perf_counter()
        tokens: list[int] = []
        first = 0.0
        for token in llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            tokens.append(token)
            first = first or time.perf_counter() - start
            if len(tokens) == max_tokens or token in stop:
                break
        return first, time.perf_counter() - start, tokens

    def generate(
        prompts: Sequence[list[int]], max_tokens: int, mode: str, stop: Sequence[int]
    ) -> list[Answer]:
        if mode == "lookup":
            return [lookup(prompt, max_tokens, stop) for prompt in prompts]
        return plain(prompts, max_tokens, stop)

    return generate


def openvino(settings: dict[str, Any], stack: ExitStack) -> Generate:
    """Continuous batching, prefix caching off; it reads the same GGUF file."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = settings["streams"]
    scheduler.max_num_batched_tokens = 512
    scheduler.num_kv_blocks = settings["context"] // 32 + settings["streams"]
    pipeline = genai.ContinuousBatchingPipeline(
        settings["model"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": settings["threads"]}
    )

    def generate(
        prompts: Sequence[list[int]], max_tokens: int, mode: str, stop: Sequence[int]
    ) -> list[Answer]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, not stop, False
        if stop:
            config.eos_token_id, config.stop_token_ids = stop[0], set(stop)
        start = time.perf_counter()
        handles = [
            pipeline.add_request(i, ov.Tensor(np.array([prompt], dtype=np.int64)), config)
            for i, prompt in enumerate(prompts)
        ]
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        tokens: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - start
            for i, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        tokens[i] += output.generated_ids
                    first.setdefault(i, now)
                    last[i] = now
        return [(first[i], last[i], tokens[i]) for i in range(len(prompts))]

    return generate


def transformers(settings: dict[str, Any], stack: ExitStack) -> Generate:
    """bfloat16, eager, one prompt after another."""
    import compare_transformers
    import torch

    from models.loader import inspect_model
    from models.options import ModelOptions

    torch.set_num_threads(settings["threads"])
    files = inspect_model(ModelOptions(model=settings["model"]))
    model = compare_transformers.load_reference(files, torch.bfloat16, torch.device("cpu"))

    def generate(
        prompts: Sequence[list[int]], max_tokens: int, mode: str, stop: Sequence[int]
    ) -> list[Answer]:
        runs = [compare_transformers.generate(model, prompt, max_tokens, stop) for prompt in prompts]
        return [
            (run.timing.ttft, run.timing.ttft + run.timing.decode_seconds, list(run.token_ids))
            for run in runs
        ]

    return generate


ENGINES = {"tandem": tandem, "llama.cpp": llama_cpp, "openvino": openvino, "transformers": transformers}


def serve(name: str, settings: dict[str, Any], requests: TextIO, replies: TextIO) -> None:
    """Start the engine, say how long that took, then answer until the requests end."""

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=replies, flush=True)

    start = time.perf_counter()
    with ExitStack() as stack:
        try:
            generate = ENGINES[name](settings, stack)
            generate([[1, 2, 3]], 2, settings["modes"][0], ())  # ready is what can answer
        except Exception as error:  # whatever an engine cannot do here is told, and the others go on
            return say({"error": f"{type(error).__name__}: {error}"})
        say({"seconds": time.perf_counter() - start})
        for line in requests:
            request = json.loads(line)
            try:
                answers = generate(
                    request["prompts"], request["max_tokens"], request["mode"], request["stop"]
                )
            except Exception as error:
                say({"error": f"{type(error).__name__}: {error}"})
                continue
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            say({"answers": answers, "peak_mb": peak / 1024})


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")  # engines print, and what they print must not stand among replies
    os.dup2(2, 1)
    serve(sys.argv[1], json.loads(sys.argv[2]), sys.stdin, replies)
