"""`tandem train-drafter`: the target writes text, and a drafter learns to foresee it."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from app.settings import EngineSettings, SettingsError
from app.terminal import started
from app.training_settings import TrainingSettings
from app.version import version
from containers.application import ApplicationContainer
from engine.chat_template import ChatTemplateError
from models.base import ModelError
from speculative.pairing import target_digest
from speculative.training.checkpoint import export
from speculative.training.data import DataError, Example, read_examples
from speculative.training.generate import SELF, Quota, Writing, write_out, writings
from speculative.training.report import Facts, write_card, write_plots
from speculative.training.start import decoder, shape_for, state_layer_ids, unused_token
from speculative.training.states import TargetStates
from speculative.training.trainer import Progress as TrainingProgress
from speculative.training.trainer import Trainer

RUN = "run"
_TELL = 20.0  # seconds between lines of a log


def train_drafter(settings: EngineSettings, training: TrainingSettings, out: Path) -> int:
    """Train, or go on training, the drafter in `out`; returns the exit code. Raises SettingsError."""
    run = out / RUN
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{out}: cannot be written to ({error.strerror})") from error
    console = Console(stderr=True)
    with started(without_speculation(settings)) as container:
        kept = [
            Path(source) for source in training.sources if training.keep_answers and source.endswith(".jsonl")
        ]
        written = [source for source in training.sources if Path(source) not in kept]
        options = training.options()
        try:
            # What cannot be trained is known before any text is written.
            shape_for(decoder(container.target.runner().model), options, options.mask_token_id or 0)
            # Another target's answers stay where they are and are not trained on.
            digest = target_digest(container.model_files())
            answers = run / f"answers-{digest[:12]}.jsonl"
            write(container, training, written, answers, settings.max_running_requests, console)
            limit = min(options.max_length, container.max_context_len())
            files = [*kept, *([answers] if written else [])]
            examples = list(read_examples(files, container.tokenizer(), limit))
            if training.minutes or training.steps:
                learn(
                    container, training, examples, out, digest, command_line(settings, training, out), console
                )
        except (ModelError, DataError, ChatTemplateError) as error:
            raise SettingsError(str(error)) from error
    return 0


def without_speculation(settings: EngineSettings) -> EngineSettings:
    """What a server was told of drafts, by its environment or its file, is of no matter to a target that writes."""
    names = [field.name for field in fields(settings) if field.name.startswith("speculative_")]
    defaults = {name: getattr(EngineSettings, name) for name in names}
    return replace(settings, **defaults | {"speculative_algorithm": "none"})


def write(
    container: ApplicationContainer,
    training: TrainingSettings,
    sources: Sequence[str],
    path: Path,
    concurrency: int,
    console: Console,
) -> None:
    """Have the target write what `path` lacks of `sources`, each text as soon as it is complete."""
    records = [json.loads(line) for line in _whole_lines(path)]
    done = {record["id"] for record in records}
    wanted = training.tokens if SELF in sources else 0
    quota = Quota(wanted, training.answer_tokens, concurrency)
    for record in records:
        if record["id"].startswith(SELF):
            quota.add(len(record["token_ids"]))

    def missing(source: str) -> Iterator[tuple[str, Writing]]:
        named = writings(source, container.tokenizer(), training.training_seed, training.answer_tokens)
        return ((name, writing) for name, writing in named if name not in done)

    submit = container.engine().submit
    given = chain.from_iterable(missing(source) for source in sources if source != SELF)
    texts = chain(
        write_out(given, submit, lambda: concurrency), write_out(missing(SELF), submit, quota.texts)
    )
    count = tokens = 0
    due = every(_TELL)
    with path.open("a", encoding="utf-8") as file, _bar(console) as bar:
        task = bar.add_task("writing", total=wanted or None, completed=quota.written)
        for record in texts:
            file.write(json.dumps(record) + "\n")
            file.flush()
            done.add(record["id"])
            count, tokens = count + 1, tokens + len(record["token_ids"])
            if record["id"].startswith(SELF):
                quota.add(len(record["token_ids"]))
            bar.update(task, completed=quota.written, description=f"writing: {len(done)} texts")
            if not console.is_terminal and due():
                console.print(f"writing: {count} texts, {tokens} tokens", markup=False, soft_wrap=True)
    if sources:
        console.print(f"wrote {count} texts, {tokens} tokens to {path}", markup=False, soft_wrap=True)


def every(seconds: float, clock: Callable[[], float] = time.monotonic) -> Callable[[], bool]:
    """Asks whether `seconds` have gone by since it last said so."""
    last = clock()

    def due() -> bool:
        nonlocal last
        now = clock()
        if now - last < seconds:
            return False
        last = now
        return True

    return due


def learn(
    container: ApplicationContainer,
    training: TrainingSettings,
    examples: Sequence[Example],
    out: Path,
    digest: str,
    command: str,
    console: Console,
) -> None:
    """Train; the best drafter so far is in `out` at any time. `digest` is the target's. Raises SettingsError for too
    few `examples`."""
    runner, options = container.target.runner(), training.options()
    files, tokenizer = container.model_files(), container.tokenizer()
    target = decoder(runner.model)
    mask = options.mask_token_id
    if mask is None:
        mask = unused_token(tokenizer.special_token_ids, examples, target.config.vocab_size)
    shape = shape_for(target, options, mask)
    states = TargetStates(
        runner, state_layer_ids(shape), examples, out / RUN / f"states-{digest[:12]}", options.cache_bytes
    )
    try:
        trainer = Trainer(target, shape, examples, states, out / RUN, options)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    answered = sum(int((example.ends > 0).sum()) for example in examples)
    facts = Facts(
        target=files.name,
        command=command,
        data=f"{len(examples):,} texts, {answered:,} tokens in the target's answers",
        version=version(),
    )

    began, before = trainer.progress.seconds, trainer.progress.anchors

    def describe(progress: TrainingProgress) -> str:
        speed = (progress.anchors - before) / max(progress.seconds - began, 1e-9)
        lengths = f"{progress.accept_lengths[-1][1]:.2f} ({progress.learned:.2f} where it has learned)"
        return (
            f"step {progress.step}, loss {progress.loss:.3f}, accept length {lengths}, {speed:.0f} blocks/s"
        )

    def keep(progress: TrainingProgress) -> None:
        if progress.is_best:
            extra = {"target_digest": digest, "accept_length": round(progress.best, 3)}
            export(out, trainer.drafter, trainer.draft_token_ids, options.weights, extra)
            write_card(out, trainer, facts)
        write_plots(out, progress)
        if not console.is_terminal:
            console.print(f"{progress.seconds / 60:.1f} minutes, {describe(progress)}")

    with _bar(console) as bar:
        task = bar.add_task("training", total=1.0)
        trainer.run(
            lambda progress: bar.update(task, completed=trainer.share_done, description=describe(progress)),
            keep,
        )
    console.print(f"accept length {trainer.progress.best:.2f} on held-out text; the drafter is in {out}")


def command_line(settings: EngineSettings, training: TrainingSettings, out: Path) -> str:
    """The command that trains so, wherever the settings came from."""
    words = ["tandem", "train-drafter", str(out)]
    for given in (training, settings):
        for field in fields(given):
            value = getattr(given, field.name)
            if value != field.default:
                flag = f"--{field.name.replace('_', '-')}"
                values = value if isinstance(value, list) else [value]
                words += [flag] if value is True else [word for each in values for word in (flag, str(each))]
    return shlex.join(words)


def _bar(console: Console) -> Progress:
    """What moves on a terminal; a log has lines of its own."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file that may not be there yet. One that was being written when its writer died is cut off."""
    if not path.is_file():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    return whole.decode().split("\n")[:-1]
