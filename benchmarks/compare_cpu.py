"""The same GGUF file through Tandem, llama.cpp, OpenVINO GenAI and transformers on this machine's CPU, in turn."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
from command import print_row, run
from cyclopts import Parameter
from cyclopts.validators import Number
from in_process import same_tokens
from kernels_cpu import read_bandwidth
from prompts import Prompt, PromptOptions

from engine.tokenizer import Tokenizer, tokenizer_from_gguf
from kernels.threads import default_threads
from models.default import default_drafter_path, default_model_path

PEERS = Path(__file__).with_name("peers.py")
ENGINES = ("tandem", "llama.cpp", "openvino", "transformers")
# What an engine calls decoding without speculation.
_PLAIN_MODES = {name: ("none" if name == "tandem" else "plain",) for name in ENGINES}
_WIDTHS = (16, 14, 8, 10)

_SEVERAL = Parameter(consume_multiple=True)
_AT_LEAST_ONE = Parameter(validator=Number(gte=1))


@dataclass(frozen=True)
class Workload:
    """Something to measure: prompts, all at once, and the modes of engines that take part.

    `stop`: tokens that end the answer before `max_tokens`, to a single prompt.
    """

    name: str
    prompts: list[list[int]]
    max_tokens: int
    modes: dict[str, tuple[str, ...]]
    stop: tuple[int, ...] = ()


@dataclass(frozen=True)
class Measured:
    """What one engine made of one workload: so many tokens in so many seconds, and all tokens of its answers."""

    count: int
    seconds: float
    tokens: list[list[int]]

    @property
    def speed(self) -> float:
        """Tokens/s."""
        return self.count / max(self.seconds, 1e-9)


FAILED = Measured(0, 0.0, [[]])  # keeps its place, so that the others' pairs stay pairs


class Engine:
    """A child process that runs one engine."""

    def __init__(self, python: str, name: str, settings: dict[str, Any]) -> None:
        """Waits until the engine can answer. Raises RuntimeError, with its reason, where it cannot be had."""
        self.name = name
        self.peak_mb = 0.0
        command = [python, str(PEERS), name, json.dumps(settings)]
        # Importing Tandem sets this, for torch's threads; those of llama.cpp it makes a third as fast.
        environ = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environ,
        )
        self.start_seconds = self._answer()["seconds"]

    def measure(self, workload: Workload, mode: str) -> Measured:
        """Raises RuntimeError where the engine fails."""
        request = {
            "prompts": workload.prompts,
            "max_tokens": workload.max_tokens,
            "mode": mode,
            "stop": workload.stop,
        }
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._answer()
        self.peak_mb = answer["peak_mb"]
        return counted(workload, answer["answers"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def compare_cpu(
    *,
    model: str | None = None,
    drafter: str | None = None,
    engines: Annotated[tuple[str, ...], _SEVERAL] = ENGINES,
    peers_python: str = sys.executable,
    contexts: Annotated[tuple[int, ...], _SEVERAL] = (64, 1024, 4096),
    streams: Annotated[tuple[int, ...], _SEVERAL] = (4, 8, 16),
    prefill: Annotated[tuple[int, ...], _SEVERAL] = (512, 2048),
    max_tokens: Annotated[int, Parameter(validator=Number(gte=2))] = 48,
    text_tokens: Annotated[int, Parameter(validator=Number(gte=2))] = 256,
    repeats: Annotated[int, _AT_LEAST_ONE] = 3,
    threads: Annotated[int | None, _AT_LEAST_ONE] = None,
    options: Annotated[PromptOptions, Parameter(name="*")] = PromptOptions(limit=8),
) -> int:
    """Measure Tandem and its peers on one GGUF file: decoding, streams, prompts, texts with speculation, memory.

    Every engine is a process of its own; they take turns, workload by workload, and the first one changes. Figures
    are medians over --repeats, of texts all tokens over all seconds; all greedy. Ratios above 1 mean that Tandem is
    faster, except for memory.

    Parameters
    ----------
    model
        A GGUF file (default: the default model).
    drafter
        A DFlash drafter for Tandem: adds `dflash` to its modes, and to what `auto` may choose (default: that of the
        default model).
    engines
        Which engines take part, Tandem among them. One that is not installed is named and left out.
    peers_python
        An interpreter that has llama-cpp-python and openvino-genai, if this one has not.
    contexts
        Tokens of prompts after which decoding is timed, one stream.
    streams
        How many prompts of 64 tokens are decoded at once.
    prefill
        Tokens of prompts whose reading is timed.
    max_tokens
        Tokens of every answer but those to --prompts.
    text_tokens
        Longest answer to a text of --prompts. It ends where the model ends it.
    repeats
        How often all is measured.
    """
    path = Path(model) if model else default_model_path()
    drafter = drafter or (None if model else str(default_drafter_path()))
    if path.suffix != ".gguf" or not path.is_file():
        raise ValueError(f"{path}: not a GGUF file")
    tokenizer = tokenizer_from_gguf(path)
    chosen = options.read()
    threads = threads or default_threads()
    texts = [encode(tokenizer, prompt) for prompt in chosen]
    longest = max([*contexts, *prefill, *map(len, texts), max(streams) * 64])
    settings = {
        "model": str(path),
        "drafter": drafter,
        "streams": max(streams),
        "context": -(-(longest + max(max(streams) * max_tokens, text_tokens) + 64) // 256) * 256,
        "threads": threads,
        "drafts": 8,
    }
    running: dict[str, Engine] = {}
    missing: dict[str, str] = {}
    for name in engines:
        python = peers_python if name in ("llama.cpp", "openvino") else sys.executable
        try:
            running[name] = Engine(python, name, settings | {"modes": _PLAIN_MODES[name]})
        except (RuntimeError, OSError) as error:
            missing[name] = str(error)
            print(f"{name}: left out ({error})", flush=True)
    if "tandem" not in running:
        raise ValueError("there is nothing to compare with: Tandem did not start")
    speculating = {"tandem": ("ngram", *(("dflash",) if drafter else ()), "auto"), "llama.cpp": ("lookup",)}
    results: dict[tuple[str, str, str], list[Measured]] = defaultdict(list)
    long_text = list(
        itertools.chain.from_iterable(tokenizer.encode(turn) for p in chosen for turn in p.turns)
    )
    windows = window(long_text)
    for repeat in range(repeats):
        synthetic = workloads(windows, contexts, streams, prefill, max_tokens)
        for workload in [*synthetic, *answers(texts, text_tokens, tokenizer.eos_token_ids, speculating)]:
            measure(running, workload, repeat, results, missing)
    for engine in running.values():
        engine.close()
    summary = summarise(results, running, path.stat().st_size, read_bandwidth(threads, 5))
    print_summary(summary, missing)
    if options.json:
        print(msgspec.json.encode(summary | {"missing": missing, "threads": threads}).decode())
    return 0


def encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """A prompt's first turn as the model's chat template has it."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt.turns[0])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt.turns[0]}], add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def window(tokens: Sequence[int]) -> Iterator[int]:
    """Endless text, never twice from the same place: an engine that keeps prefixes gains nothing."""
    for start in itertools.count():
        yield tokens[start % len(tokens)]
        yield from tokens


def workloads(
    windows: Iterator[int],
    contexts: Sequence[int],
    streams: Sequence[int],
    prefill: Sequence[int],
    max_tokens: int,
) -> Iterator[Workload]:
    """What is measured in one round over new text, as long as is asked for."""

    def text(count: int) -> list[int]:
        return list(itertools.islice(windows, count))

    batching = {name: modes for name, modes in _PLAIN_MODES.items() if name != "transformers"}
    for context in contexts:
        yield Workload(f"decode at {context}", [text(context)], max_tokens, _PLAIN_MODES)
    for count in streams:
        yield Workload(f"{count} streams", [text(64) for _ in range(count)], max_tokens, batching)
    for count in prefill:
        yield Workload(f"prefill {count}", [text(count)], 1, _PLAIN_MODES)


def answers(
    texts: Sequence[list[int]],
    max_tokens: int,
    stop: Iterable[int],
    speculating: dict[str, tuple[str, ...]],
) -> Iterator[Workload]:
    """The answers to `texts`, in all modes of each engine."""
    modes = {name: (*own, *speculating.get(name, ())) for name, own in _PLAIN_MODES.items()}
    for number, prompt in enumerate(texts):
        yield Workload(f"text {number}", [prompt], max_tokens, modes, tuple(sorted(stop)))


def measure(
    engines: dict[str, Engine],
    workload: Workload,
    turn: int,
    results: dict[tuple[str, str, str], list[Measured]],
    missing: dict[str, str],
) -> None:
    """One workload on every engine, which one is first changing with `turn`. Adds to `results` and `missing`."""
    order = [(name, mode) for name in engines for mode in workload.modes.get(name, ())]
    for name, mode in order[turn % len(order) :] + order[: turn % len(order)]:
        try:
            measured = engines[name].measure(workload, mode)
        except RuntimeError as error:
            missing[f"{name} {mode}, {workload.name}"] = str(error)
            measured = FAILED
        results[
            workload.name.rsplit(" ", 1)[0] if "text" in workload.name else workload.name, name, mode
        ].append(measured)


def counted(workload: Workload, replies: Sequence[tuple[float, float, list[int]]]) -> Measured:
    """What counts: of a prompt whose reading is timed, its own tokens; of several streams all they wrote, prompts
    read meanwhile; else what was decoded after the first token."""
    tokens = [tokens for _, _, tokens in replies]
    first, last = replies[0][0], max(end for _, end, _ in replies)
    if workload.max_tokens == 1:
        return Measured(len(workload.prompts[0]), first, tokens)
    if len(replies) > 1:
        return Measured(sum(map(len, tokens)), last, tokens)
    return Measured(len(tokens[0]) - 1, last - first, tokens)


def whole(runs: Sequence[Measured]) -> float:
    """Tokens/s of all runs together."""
    return sum(run.count for run in runs) / max(sum(run.seconds for run in runs), 1e-9)


def summarise(
    results: dict[tuple[str, str, str], list[Measured]],
    engines: dict[str, Engine],
    weight_bytes: int,
    bandwidth: float,
) -> dict[str, Any]:
    """Medians, and ratios of Tandem's to those of others, from runs that took turns. Texts count together, as they
    differ: their speed is that of all tokens, so a longer answer counts more."""
    counting = {key: [run for run in runs if run.count] for key, runs in results.items()}
    speeds = {
        key: whole(runs) if key[0] == "text" else median(run.speed for run in runs)
        for key, runs in counting.items()
        if runs
    }

    def pairs(workload: str, mode: str, peer: str, peer_mode: str) -> list[tuple[Measured, Measured]]:
        ours, theirs = (
            results.get((workload, "tandem", mode), ()),
            results.get((workload, peer, peer_mode), ()),
        )
        return [(a, b) for a, b in zip(ours, theirs, strict=False) if a.count and b.count]

    def middle(*of: str) -> float | None:
        return median(a.speed / b.speed for a, b in found) if (found := pairs(*of)) else None

    def together(*of: str) -> float | None:
        found = pairs("text", *of)
        return whole([a for a, _ in found]) / whole([b for _, b in found]) if found else None

    names = list(dict.fromkeys(workload for workload, _, _ in results))
    decode, filling = names[0], next((name for name in names if name.startswith("prefill")), "")
    ratios = {
        "plain_vs_llamacpp": middle(decode, "none", "llama.cpp", "plain"),
        "plain_vs_openvino": middle(decode, "none", "openvino", "plain"),
        "plain_vs_transformers": middle(decode, "none", "transformers", "plain"),
        "auto_vs_llamacpp": together("auto", "llama.cpp", "plain"),
        "auto_vs_llamacpp_median_text": middle("text", "auto", "llama.cpp", "plain"),
        "auto_vs_llamacpp_lookup": together("auto", "llama.cpp", "lookup"),
        "streams8_vs_openvino": middle("8 streams", "none", "openvino", "plain"),
        "streams8_vs_llamacpp": middle("8 streams", "none", "llama.cpp", "plain"),
        "prefill_vs_openvino": middle(filling, "none", "openvino", "plain"),
        "prefill_vs_llamacpp": middle(filling, "none", "llama.cpp", "plain"),
    }
    if "llama.cpp" in engines:
        ratios["peak_memory_vs_llamacpp"] = engines["tandem"].peak_mb / engines["llama.cpp"].peak_mb
    same = {
        f"{name} {mode}": median(same_tokens(a.tokens[0], b.tokens[0]) for a, b in found)
        for workload, name, mode in results
        if workload == "text" and (found := pairs("text", "none", name, mode))
    }
    return {
        "ratios": {name: value for name, value in ratios.items() if value is not None},
        "tokens_per_s": [
            {"workload": w, "engine": n, "mode": m, "tokens_per_s": speed}
            for (w, n, m), speed in speeds.items()
        ],
        "roofline_share": speeds.get((decode, "tandem", "none"), 0.0) * weight_bytes / 1e9 / bandwidth,
        "read_gb_per_s": bandwidth,
        "same_tokens_as_tandem": same,
        "engines": {
            name: {"start_s": engine.start_seconds, "peak_mb": engine.peak_mb}
            for name, engine in engines.items()
        },
    }


def print_summary(summary: dict[str, Any], missing: dict[str, str]) -> None:
    """The table of speeds, then the rest line by line."""
    print_row(("workload", "engine", "mode", "tokens/s"), _WIDTHS)
    for row in summary["tokens_per_s"]:
        print_row((row["workload"], row["engine"], row["mode"], row["tokens_per_s"]), _WIDTHS)
    for name, engine in summary["engines"].items():
        print(f"{name}: ready in {engine['start_s']:.1f} s, peak memory {engine['peak_mb']:.0f} MB")
    for name, tokens in summary["same_tokens_as_tandem"].items():
        print(f"tokens in common with Tandem's plain texts, median: {name} {tokens:.0f}")
    print(
        f"plain decoding reads weights at {summary['roofline_share']:.0%} of the "
        f"{summary['read_gb_per_s']:.1f} GB/s measured"
    )
    for name, value in summary["ratios"].items():
        print(f"{name}: {value:.2f}")
    for name, reason in missing.items():
        print(f"missing: {name} ({reason})")


if __name__ == "__main__":
    sys.exit(run(compare_cpu))
