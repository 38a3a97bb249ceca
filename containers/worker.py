"""One worker's scope: its model's files in, its runner and everything that runner owns out.

Every part is a singleton of this scope, so a worker has exactly one of each and shares none with another worker.
"""

from __future__ import annotations

from typing import Any

from dependency_injector import containers, providers

from backends.kv_pool import KVPool
from backends.options import AttentionOptions
from backends.setup import build_attention_backends
from backends.state_pool import StatePool
from engine.graphs import capture
from engine.options import CacheOptions, SchedulerOptions
from engine.runner import ModelRunner
from models.loader import ModelFiles, load_drafter, load_model
from models.options import ModelOptions


class WorkerContainer(containers.DeclarativeContainer):
    """The target's parts, or the drafter's. The runner makes them by these providers, in its start-up hooks."""

    role = providers.Dependency(instance_of=str)
    files: providers.Dependency[ModelFiles] = providers.Dependency()
    model_options: providers.Dependency[ModelOptions] = providers.Dependency()
    cache_options: providers.Dependency[CacheOptions] = providers.Dependency()
    attention_options: providers.Dependency[AttentionOptions] = providers.Dependency()
    scheduler_options: providers.Dependency[SchedulerOptions] = providers.Dependency()

    # What the two know of each other: the target what the drafter reads and what a slot costs it, the drafter
    # whom it serves.
    capture_layers: providers.Provider[Any] = providers.Object(())
    draft_layouts: providers.Provider[Any] = providers.Object(())
    target_runner: providers.Provider[ModelRunner | None] = providers.Object(None)
    scratch_slots: providers.Provider[int] = providers.Object(0)

    model = providers.Selector(
        role, target=providers.Singleton(load_model), draft=providers.Singleton(load_drafter)
    )
    kv_pool = providers.Singleton(KVPool)
    state_pool = providers.Singleton(StatePool)
    attention_backends = providers.Singleton(build_attention_backends)
    graphs = providers.Singleton(capture)

    runner = providers.Singleton(
        ModelRunner,
        role=role,
        files=files,
        model_options=model_options,
        cache_options=cache_options,
        attention_options=attention_options,
        max_running_requests=scheduler_options.provided.max_running_requests,
        capture_layers=capture_layers,
        draft_layouts=draft_layouts.provider,
        target=target_runner,
        scratch_slots=scratch_slots,
        load_weights=model.provider,
        make_kv_pool=kv_pool.provider,
        make_state_pool=state_pool.provider,
        build_backends=attention_backends.provider,
        capture_graph=graphs.provider,
    )
