"""The application, as a table of contents: what there is, and what each part is given."""

from __future__ import annotations

from typing import Any

from dependency_injector import containers, providers

from backends.kv_pool import KVLayout
from containers.startup import StartUp
from containers.worker import WorkerContainer
from engine.allocator import SlotAllocator
from engine.engine import Engine
from engine.plain_worker import PlainWorker
from engine.radix_cache import RadixCache
from engine.scheduler import Scheduler
from engine.tokenizer import load_tokenizer
from models.loader import inspect_model
from speculative.adaptive import PayoffController
from speculative.drafters import make_drafter, offered
from speculative.drafting_worker import DraftingWorker
from speculative.history import NgramHistory
from speculative.pairing import inspect_drafter, scratch_slots, target_layer_ids


def draft_layouts(application: ApplicationContainer) -> list[KVLayout]:
    """What a slot holds in the pools of the workers that run beside the target."""
    return [runner.kv_layout for runner in application.runners()[1:]]


class ApplicationContainer(containers.DeclarativeContainer):
    """Build it with `settings=providers.Object(...)`. Nothing here is called once the engine steps."""

    settings: providers.Dependency[Any] = providers.Dependency()

    model_options = settings.provided.model_options.call()
    draft_model_options = settings.provided.draft_model_options.call()
    attention_options = settings.provided.attention_options.call()
    cache_options = settings.provided.cache_options.call()
    scheduler_options = settings.provided.scheduler_options.call()
    speculative_options = settings.provided.speculative_options.call()
    algorithm = speculative_options.algorithm
    workers = speculative_options.workers

    model_files = providers.Singleton(inspect_model, model_options)
    draft_model_files = providers.Singleton(inspect_drafter, draft_model_options, model_files, algorithm)

    __self__ = providers.Self()

    target = providers.Container(
        WorkerContainer,
        role="target",
        files=model_files,
        model_options=model_options,
        cache_options=cache_options,
        attention_options=attention_options,
        scheduler_options=scheduler_options,
        capture_layers=providers.Selector(
            workers, target=providers.Object(()), pair=providers.Callable(target_layer_ids, draft_model_files)
        ),
        draft_layouts=providers.Callable(draft_layouts, __self__),
    )
    draft = providers.Container(
        WorkerContainer,
        role="draft",
        files=draft_model_files,
        model_options=draft_model_options,
        cache_options=cache_options,
        attention_options=attention_options,
        scheduler_options=scheduler_options,
        target_runner=target.runner,
        scratch_slots=providers.Callable(
            scratch_slots,
            draft_model_files,
            speculative_options.num_draft_tokens,
            scheduler_options.max_running_requests,
        ),
    )
    # In the order of their start-up.
    runners = providers.Selector(
        workers, target=providers.List(target.runner), pair=providers.List(target.runner, draft.runner)
    )

    tokenizer = providers.Singleton(load_tokenizer, model_files, model_options.chat_template)
    plain_worker = providers.Singleton(PlainWorker, target.runner, tokenizer.provided.eos_token_ids)
    drafter = providers.Selector(
        workers,
        target=providers.Object(None),
        pair=providers.Singleton(
            make_drafter, draft.runner, speculative_options, model_files.provided.config.vocab_size
        ),
    )
    controller = providers.Singleton(PayoffController)
    history = providers.Singleton(NgramHistory, speculative_options.ngram_history)
    drafting_worker = providers.Singleton(
        DraftingWorker,
        target.runner,
        tokenizer.provided.eos_token_ids,
        options=speculative_options,
        controller=controller,
        history=history,
        drafter=drafter,
    )
    # What a request may ask for.
    algorithms = providers.Callable(offered, algorithm, drafter)
    worker = providers.Selector(
        algorithm,
        none=plain_worker,
        ngram=drafting_worker,
        dflash=drafting_worker,
        standalone=drafting_worker,
        eagle3=drafting_worker,
        mtp=drafting_worker,
        auto=drafting_worker,
    )

    # Made when the decode loop starts: the number of slots is known once the model is loaded.
    allocator = providers.Singleton(
        SlotAllocator, target.runner.provided.kv_pool.num_slots, cache_options.page_size
    )
    radix_cache = providers.Singleton(
        RadixCache,
        allocator,
        cache_options.enable_prefix_caching,
        target.runner.provided.make_checkpoints.call(),
    )
    scheduler = providers.Singleton(
        Scheduler,
        scheduler_options,
        allocator,
        radix_cache,
        target.runner.provided.slot_table,
        usable_prefix=worker.provided.usable_prefix,
        before_release=worker.provided.before_release,
        resume=target.runner.provided.resume_state,
        recomputes_exactly=target.runner.provided.recomputes_exactly,
    )
    max_context_len = target.runner.provided.max_context_len

    engine = providers.Singleton(
        Engine,
        worker=worker,
        scheduler=scheduler.provider,
        tokenizer=tokenizer,
        vocab_size=model_files.provided.config.vocab_size,
        max_context_len=max_context_len.provider,
        max_queued_requests=scheduler_options.max_queued_requests,
    )
    startup = providers.Singleton(StartUp, runners.provider, worker.provider)
