"""The one schema of settings: flags, environment and file are read into it, and the options of the parts come out.

Nothing heavy is imported here, so that `tandem --help` answers at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from backends.options import AttentionOptions, SpeculativeAttentionMode
from engine.options import STATE_CHUNK, CacheOptions, KVCacheDtype, SchedulerOptions
from models.options import Dtype, ModelOptions, Quantization
from speculative.options import Algorithm, SpeculativeOptions

_MODEL = Group.create_ordered("Model")
_ATTENTION = Group.create_ordered("Attention")
_MEMORY = Group.create_ordered("Memory")
_SCHEDULING = Group.create_ordered("Scheduling")
_SPECULATION = Group.create_ordered("Speculation")
_PROCESS = Group.create_ordered("Process")
_SERVER = Group.create_ordered("Server")

_POSITIVE = Number(gte=1)
_ATTENTION_OPTIONS, _CACHE = AttentionOptions(), CacheOptions()
_SCHEDULER, _SPECULATIVE = SchedulerOptions(), SpeculativeOptions()

LogLevel = Literal["debug", "info", "warning", "error"]


class SettingsError(ValueError):
    """Settings that cannot be used. The text names the setting, and what to do."""


def _is_text(value: object) -> bool:
    return not isinstance(value, str) or value == value.encode(errors="replace").decode()


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What every command that runs the engine takes. Raises SettingsError where settings contradict each other."""

    model: Annotated[
        str | None,
        Parameter(
            group=_MODEL,
            help="A .gguf file, a Hugging Face folder, or a hub id (default: the bundled SmolLM2-135M-Instruct).",
        ),
    ] = None
    dtype: Annotated[
        Dtype,
        Parameter(group=_MODEL, help="What weights are held and computed in. auto: the checkpoint's own."),
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        Parameter(group=_MODEL, help="Hold a float checkpoint's matrices in so many bits. CPU only."),
    ] = None
    device: Annotated[
        str, Parameter(group=_MODEL, help="auto, cpu or cuda. auto: the GPU where there is one.")
    ] = "auto"
    tp_size: Annotated[
        int, Parameter(group=_MODEL, validator=_POSITIVE, help="Devices that a model is split over: 1.")
    ] = 1
    context_length: Annotated[
        int | None,
        Parameter(
            group=_MODEL,
            validator=_POSITIVE,
            help="Tokens of a prompt and its answer together (default: what the model was made for).",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Parameter(group=_MODEL, help="A Jinja file that replaces the model's own chat template."),
    ] = None

    attention_backend: Annotated[
        str | None, Parameter(group=_ATTENTION, help="Attention backend (default: the best for the device).")
    ] = None
    prefill_attention_backend: Annotated[
        str | None,
        Parameter(group=_ATTENTION, help="The same, for prompts alone; goes before the general one."),
    ] = None
    decode_attention_backend: Annotated[
        str | None,
        Parameter(group=_ATTENTION, help="The same, for decoding alone; goes before the general one."),
    ] = None
    speculative_draft_attention_backend: Annotated[
        str | None,
        Parameter(group=_ATTENTION, help="The same, for all that the drafter does (default: as the target)."),
    ] = None
    speculative_attention_mode: Annotated[
        SpeculativeAttentionMode,
        Parameter(
            group=_ATTENTION,
            help="Which backend verifies, where prompts and decoding have different ones. "
            "decode keeps a speculated text the same, to the bit, as a plain one.",
        ),
    ] = _ATTENTION_OPTIONS.speculative_attention_mode
    enable_pdmux: Annotated[
        bool,
        Parameter(
            group=_ATTENTION, help="Decode on backends apart from those of prompts, one a group of SMs."
        ),
    ] = False
    sm_group_num: Annotated[
        int | None,
        Parameter(
            group=_ATTENTION,
            validator=_POSITIVE,
            help=f"Groups of SMs for --enable-pdmux (default: {_ATTENTION_OPTIONS.sm_group_num}).",
        ),
    ] = None
    enable_two_batch_overlap: Annotated[
        bool,
        Parameter(group=_ATTENTION, help="Attend in two halves of the batch, each by a backend of its own."),
    ] = False

    mem_fraction_static: Annotated[
        float,
        Parameter(
            group=_MEMORY,
            validator=Number(gt=0, lte=1),
            help="Share of the memory left after loading that the KV cache may take.",
        ),
    ] = _CACHE.mem_fraction_static
    max_total_tokens: Annotated[
        int | None,
        Parameter(
            group=_MEMORY,
            validator=_POSITIVE,
            help="Exact size of the KV cache (default: by available memory).",
        ),
    ] = None
    page_size: Annotated[
        int, Parameter(group=_MEMORY, validator=_POSITIVE, help="Tokens in a page of the KV cache.")
    ] = _CACHE.page_size
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Parameter(
            group=_MEMORY,
            help="What keys and values are held in. auto: as computed. A token takes half as much memory in fp8 "
            "and int8 as in bfloat16, with some error.",
        ),
    ] = _CACHE.kv_cache_dtype
    speculative_draft_kv_cache_dtype: Annotated[
        KVCacheDtype | None,
        Parameter(group=_MEMORY, help="The same, for the drafter (default: as the target)."),
    ] = None
    disable_prefix_caching: Annotated[
        bool, Parameter(group=_MEMORY, help="Compute every prompt anew, even where its beginning is cached.")
    ] = False

    mamba_track_interval: Annotated[
        int,
        Parameter(
            group=_MEMORY,
            validator=_POSITIVE,
            help="Tokens between the checkpoints of recurrent state that the prefix cache keeps of a hybrid model, "
            f"a multiple of {STATE_CHUNK}.",
        ),
    ] = _CACHE.mamba_track_interval

    max_running_requests: Annotated[
        int, Parameter(group=_SCHEDULING, validator=_POSITIVE, help="Requests that share a step.")
    ] = _SCHEDULER.max_running_requests
    max_queued_requests: Annotated[
        int,
        Parameter(
            group=_SCHEDULING,
            validator=_POSITIVE,
            help="Requests that may wait; the next one is answered with 429.",
        ),
    ] = _SCHEDULER.max_queued_requests
    chunked_prefill_size: Annotated[
        int,
        Parameter(
            group=_SCHEDULING, validator=_POSITIVE, help="Prompt tokens in a step, of all requests together."
        ),
    ] = _SCHEDULER.chunked_prefill_size

    speculative_algorithm: Annotated[
        Algorithm,
        Parameter(group=_SPECULATION, help="How tokens are drafted. The text is the same with any of them."),
    ] = _SPECULATIVE.algorithm
    speculative_draft_model_path: Annotated[
        str | None,
        Parameter(
            group=_SPECULATION,
            help="The drafter: a Hugging Face folder, a hub id, or a .gguf file (mtp: the model's own head; default: "
            "that of the default model).",
        ),
    ] = None
    speculative_draft_model_quantization: Annotated[
        Quantization | None,
        Parameter(group=_SPECULATION, help="--quantization of the drafter."),
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None,
        Parameter(
            group=_SPECULATION,
            validator=Number(gte=2, lte=64),
            help="Most tokens that are verified at once for a request, its last token included "
            f"(default: {_SPECULATIVE.num_draft_tokens}).",
        ),
    ] = None
    speculative_draft_window_size: Annotated[
        int | None,
        Parameter(
            group=_SPECULATION,
            validator=_POSITIVE,
            help="Most tokens of context that a DFlash drafter looks at (default: all).",
        ),
    ] = None
    speculative_ngram_min_match: Annotated[
        int,
        Parameter(
            group=_SPECULATION,
            validator=_POSITIVE,
            help="Tokens that must recur before n-gram drafts from them.",
        ),
    ] = _SPECULATIVE.ngram_min_match
    speculative_ngram_max_match: Annotated[
        int,
        Parameter(
            group=_SPECULATION, validator=_POSITIVE, help="The longest recurrence that n-gram looks for."
        ),
    ] = _SPECULATIVE.ngram_max_match
    speculative_ngram_history: Annotated[
        int,
        Parameter(
            group=_SPECULATION,
            validator=Number(gte=0, lte=1 << 28),
            help="Entries of 8 bytes, four a token, in which n-gram remembers answers, to draft for later requests (0: "
            "each request drafts from its own text alone).",
        ),
    ] = _SPECULATIVE.ngram_history

    threads: Annotated[
        int | None,
        Parameter(
            group=_PROCESS,
            validator=Number(gte=1, lte=1024),
            help="CPU threads (default: one a physical core).",
        ),
    ] = None
    log_level: Annotated[LogLevel, Parameter(group=_PROCESS, help="How much is logged.")] = "info"
    config: Annotated[
        Path | None,
        Parameter(group=_PROCESS, help="A YAML or TOML file of settings, named as the flags are."),
    ] = None

    def __post_init__(self) -> None:
        # An empty value is a variable that was never set, not a wish: no key, any address, this folder.
        if empty := next((name for name in self.__dataclass_fields__ if getattr(self, name) == ""), None):
            raise SettingsError(f"--{empty.replace('_', '-')} is empty: give it a value, or leave it out")
        # Bytes of a command line or a variable that are no UTF-8; nothing that they name could be said in an answer.
        if broken := next(
            (name for name in self.__dataclass_fields__ if not _is_text(getattr(self, name))), None
        ):
            raise SettingsError(f"--{broken.replace('_', '-')} is not valid Unicode")
        if self.tp_size != 1:
            raise SettingsError(
                f"--tp-size {self.tp_size} is not supported: a model runs on one device. Leave it out, and start a "
                "server on each device"
            )
        pool, page, context = self.max_total_tokens, self.page_size, self.context_length
        if pool is not None and pool < page:
            raise SettingsError(
                f"--max-total-tokens {pool} is less than one page (--page-size {page}): raise it, or lower --page-size"
            )
        if pool is not None and context is not None and context > pool:
            raise SettingsError(
                f"--context-length {context} does not fit in --max-total-tokens {pool}: "
                "lower the one or raise the other"
            )
        if self.mamba_track_interval % STATE_CHUNK:
            raise SettingsError(
                f"--mamba-track-interval {self.mamba_track_interval} is not a multiple of {STATE_CHUNK}"
            )
        if self.sm_group_num is not None and not self.enable_pdmux:
            raise SettingsError("--sm-group-num has no meaning without --enable-pdmux: give both or neither")
        if self.enable_pdmux and self.enable_two_batch_overlap:
            raise SettingsError(
                "--enable-pdmux and --enable-two-batch-overlap cut a batch in different ways: leave one of them out"
            )
        if self.speculative_algorithm == "none" and self.speculative_num_draft_tokens is not None:
            raise SettingsError(
                "--speculative-num-draft-tokens has no meaning with --speculative-algorithm none: leave one of them out"
            )
        if (
            self.speculative_algorithm in ("none", "ngram", "mtp")
            and self.speculative_draft_model_path is not None
        ):
            raise SettingsError(
                "--speculative-draft-model-path has no meaning with --speculative-algorithm "
                f"{self.speculative_algorithm}: leave one of them out"
            )
        if self.speculative_draft_model_path is None and not self.drafts_by_default:
            of_drafters = ["speculative_draft_window_size", "speculative_draft_model_quantization"]
            if self.speculative_algorithm != "mtp":  # whose drafter is in the target's own checkpoint
                of_drafters += ["speculative_draft_attention_backend", "speculative_draft_kv_cache_dtype"]
            for name in of_drafters:
                if getattr(self, name) is not None:
                    raise SettingsError(
                        f"--{name.replace('_', '-')} has no meaning without --speculative-draft-model-path: "
                        "give both or neither"
                    )
        if self.speculative_ngram_min_match > self.speculative_ngram_max_match:
            raise SettingsError(
                f"--speculative-ngram-min-match {self.speculative_ngram_min_match} is more than "
                f"--speculative-ngram-max-match {self.speculative_ngram_max_match}: lower the one or raise the other"
            )
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise SettingsError(f"--chat-template {self.chat_template}: no such file")

    def model_options(self) -> ModelOptions:
        """Raises ModelError if no model is named and the default one is not installed."""
        model = self.model
        if model is None:
            from models.default import default_model_path

            model = str(default_model_path())
        return ModelOptions(
            model=model,
            dtype=self.dtype,
            quantization=self.quantization,
            device=self.device,
            context_length=self.context_length,
            chat_template=self.chat_template,
        )

    @property
    def drafts_by_default(self) -> bool:
        """Whether the drafter that comes with the default model is the one to use."""
        ours = self.model is None and self.speculative_algorithm in ("auto", "dflash")
        return ours and self.speculative_draft_model_path is None

    def draft_model_options(self) -> ModelOptions:
        """Raises SettingsError if no drafter is named. An MTP head is the target's own."""
        if self.speculative_algorithm == "mtp":
            return self.model_options()
        path = self.speculative_draft_model_path
        if self.drafts_by_default:
            from models.default import default_drafter_path

            path = str(default_drafter_path())
        if path is None:
            raise SettingsError(
                f"--speculative-algorithm {self.speculative_algorithm} needs a drafter: name it with "
                "--speculative-draft-model-path"
            )
        return ModelOptions(
            model=path,
            dtype=self.dtype,
            quantization=self.speculative_draft_model_quantization,
            device=self.device,
            context_length=self.context_length,
        )

    def attention_options(self) -> AttentionOptions:
        return AttentionOptions(
            attention_backend=self.attention_backend,
            prefill_attention_backend=self.prefill_attention_backend,
            decode_attention_backend=self.decode_attention_backend,
            speculative_draft_attention_backend=self.speculative_draft_attention_backend,
            speculative_attention_mode=self.speculative_attention_mode,
            enable_pdmux=self.enable_pdmux,
            sm_group_num=self.sm_group_num or _ATTENTION_OPTIONS.sm_group_num,
            enable_two_batch_overlap=self.enable_two_batch_overlap,
        )

    def cache_options(self) -> CacheOptions:
        return CacheOptions(
            mem_fraction_static=self.mem_fraction_static,
            max_total_tokens=self.max_total_tokens,
            page_size=self.page_size,
            kv_cache_dtype=self.kv_cache_dtype,
            speculative_draft_kv_cache_dtype=self.speculative_draft_kv_cache_dtype,
            enable_prefix_caching=not self.disable_prefix_caching,
            mamba_track_interval=self.mamba_track_interval,
        )

    def scheduler_options(self) -> SchedulerOptions:
        return SchedulerOptions(
            max_running_requests=self.max_running_requests,
            max_queued_requests=self.max_queued_requests,
            chunked_prefill_size=self.chunked_prefill_size,
        )

    def speculative_options(self) -> SpeculativeOptions:
        return SpeculativeOptions(
            algorithm=self.speculative_algorithm,
            has_drafter=self.speculative_draft_model_path is not None
            or self.drafts_by_default
            or self.speculative_algorithm in ("dflash", "standalone", "eagle3", "mtp"),
            num_draft_tokens=self.speculative_num_draft_tokens or _SPECULATIVE.num_draft_tokens,
            ngram_min_match=self.speculative_ngram_min_match,
            ngram_max_match=self.speculative_ngram_max_match,
            ngram_history=self.speculative_ngram_history,
            draft_window_size=self.speculative_draft_window_size,
        )


@dataclass(frozen=True, kw_only=True)
class ServerSettings(EngineSettings):
    """What `tandem serve` takes."""

    host: Annotated[str, Parameter(group=_SERVER, help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int,
        Parameter(
            group=_SERVER, validator=Number(gte=0, lte=65535), help="Port to listen on. 0: any free one."
        ),
    ] = 8000
    served_model_name: Annotated[
        str | None,
        Parameter(group=_SERVER, help="Name of the model in the API (default: of its file or folder)."),
    ] = None
    api_key: Annotated[
        str | None,
        Parameter(group=_SERVER, help="Ask for this bearer token on every route but the probes."),
    ] = field(default=None, repr=False)
    drain_timeout: Annotated[
        float,
        Parameter(
            group=_SERVER,
            validator=Number(gte=0, lt=math.inf),
            help="Seconds that requests in flight have to finish after SIGTERM.",
        ),
    ] = 30.0
    stream_interval: Annotated[
        int,
        Parameter(
            group=_SERVER,
            validator=_POSITIVE,
            help="Tokens that a stream sends together, unless they would wait for 0.2 s: more in one cost less.",
        ),
    ] = 1
    max_request_bytes: Annotated[
        int, Parameter(group=_SERVER, validator=_POSITIVE, help="The largest request body that is read.")
    ] = 8 * 1024 * 1024  # reading one holds everything up, in the worst case for a second or two
