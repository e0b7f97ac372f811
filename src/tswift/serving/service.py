"""Requests as runs: a bounded queue, one thread that decodes some of them side by side,
and texts that any number of readers follow.

Every request is a run's folder, written and resumed by the code of ``tswift generate``. The thread
knows no reader: it appends to a run's text, and readers look there as often as they like.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from queue import Empty, SimpleQueue

from tswift.decoding.kept import KeptCaches
from tswift.decoding.stats import DecodeStats
from tswift.decoding.text import text_of
from tswift.decoding.work import Work, side_by_side, texts_at_once
from tswift.drafting.methods import resolve
from tswift.errors import DecodeError, InputError, Object
from tswift.jobs.config import RunConfig, Text
from tswift.jobs.folder import (
    BROKEN,
    FAILED,
    FINISHED,
    INTERRUPTED,
    KILLED,
    LOGPROBS,
    RECORD,
    REQUEST,
    RUNNING,
    create_folder,
    default_path,
    inspect_run,
    read_json,
    read_own,
    read_run,
    read_saved,
    reading,
)
from tswift.jobs.job import Job, row_bytes, start, with_sampling
from tswift.jobs.resuming import resume
from tswift.loading.model import LoadedModel
from tswift.machine import ran_out
from tswift.memory import NoRoom, refuse_ids
from tswift.options import Values, changed, of_json
from tswift.sampling.generation_config import usual_source
from tswift.serving.config import ServeConfig
from tswift.serving.config import job as job_of
from tswift.serving.requests import ApiRequest, Refused, each_alone, parse, refused
from tswift.serving.run import CANCELLED, IN_USE, MODEL_OPTIONS, QUEUED, ApiRun, RunStopped

_EOS = "eos"
_COMMAND = ("tswift", "serve")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")


class Service:
    """The model, the runs' folder, whose lock the caller has, and the thread that decodes.

    ``typed`` are options that were typed, as which the model was loaded: the defaults of requests.
    ``say`` prints a line for people.
    """

    def __init__(
        self, model: LoadedModel, config: ServeConfig, typed: Values, say: Callable[[str], None]
    ) -> None:
        self.model = model
        self.model_id = config.model_id(model.name)
        self._config = config
        self._say = say
        # as from other servers, completions get the sampling of chats
        usual = usual_source(model.target.model.generation_config)
        self._typed = dict(typed) if "preset" in typed else {"sampling_from": usual, **typed}
        # of a request that says nothing
        _, self.sampling = with_sampling(job_of(self._typed, {}, "-", chat=False), model)
        self._typed_model = {name: value for name, value in typed.items() if name in MODEL_OPTIONS}
        self._guard = threading.Lock()
        self._accepting = threading.Lock()
        self._runs: dict[str, ApiRun] = {}  # that are open, in the order of their turns
        self._turns: SimpleQueue[ApiRun | None] = SimpleQueue()
        self._width = texts_at_once(model.target, config.parallel)
        if config.keep_caches and model.target.fixed_rows is None:
            raise InputError("must be 0, as passes are not exact here", "keep_caches")
        self._begun = 0  # runs whose caches have been allocated
        self._closing = False
        self._unwritten: dict[str, Object] = {}  # what ``request.json`` had no room for, by ids
        self._speed = 0.0  # of the last run, in tokens/s
        self._kept = KeptCaches(config.keep_caches)
        self._recover()
        self.thread = threading.Thread(target=self._work, name="decoding")
        self.thread.start()

    def close(self) -> None:
        """Stop the run that decodes, with everything saved.

        What is open goes on when a server starts again.
        """
        with self._guard:
            self._closing = True
            for run in self._runs.values():
                run.stopping = run.stopping or INTERRUPTED
                if run.state == QUEUED:
                    run.state = INTERRUPTED
        self._turns.put(None)

    # --- what clients ask for

    def accept(self, body: Values, chat: bool) -> list[ApiRun]:
        """Queue a request: a run for each of its texts."""
        request = parse(body, chat, self._typed, self.model_id)
        if request.count > self._config.queue + self._width:
            most = f"{self._config.queue + self._width:,} texts at a time"
            raise Refused(400, f"n: the server's queue has room for {most}", "n")
        self._refuse_full(request.count)
        runs: list[ApiRun] = []
        try:
            for own in each_alone(request):
                runs.append(self.accept_one(own, chat))
        except Refused:
            for run in runs:
                self.cancel(run)
            raise
        return runs

    def accept_one(self, body: Values, chat: bool) -> ApiRun:
        """Queue a request for one text."""
        request = parse(body, chat, self._typed, self.model_id)
        self._refuse_full()
        with self._accepting:  # one at a time: prompts of megabytes take memory
            config, prompt = self._fitted(request)
            run = ApiRun(
                default_path(config.method, self._config.runs),
                config,
                request,
                int(time.time()),
                prompt,
            )
            run.prompt_tokens = len(prompt)
            with self._guard:
                self._refuse_full()
                self._runs[run.id] = run
            try:
                with create_folder(run.path):
                    run.store()
            except (InputError, OSError) as error:
                with self._guard:
                    del self._runs[run.id]
                raise Refused(507, f"the run's folder cannot be written: {error}") from None
            self._turns.put(run)
        return run

    def find(self, name: str) -> ApiRun:
        """The run of an id."""
        run = self._runs.get(name)
        path = self._config.runs / name
        if run is not None:
            return run
        reason = ""
        if _ID.fullmatch(name) and path.is_dir() and not path.is_symlink():
            try:
                return self._read(path)
            except InputError as error:
                reason = f": {error}"
        raise Refused(404, f"there is no run {name!r:.80}{reason}", "id", "run_not_found")

    def newest(self, most: int) -> list[Object]:
        """What a list says of the newest runs."""
        return [self._listed(path) for path in self._paths()[: -most - 1 : -1]]

    def _paths(self) -> list[Path]:
        """The folders of runs, in the order in which they came."""
        return sorted(
            path
            for path in self._config.runs.iterdir()
            if _ID.fullmatch(path.name) and not path.is_symlink()
            if any(os.path.lexists(path / name) for name in (RECORD, REQUEST))
        )

    def _listed(self, path: Path) -> Object:
        try:
            return (self._runs.get(path.name) or self._read(path, whole=False)).brief()
        except InputError:
            rest = dict.fromkeys(("max_tokens", "method", "tokens_per_second"))
            return {"id": path.name, "object": "run", "state": BROKEN, "tokens": 0, **rest}

    def resume(self, name: str, length: int | None = None) -> ApiRun:
        """Go on with a run, or follow it if it is open already;
        a larger length goes on with a finished one.
        """
        run = self.find(name)
        if run.state == IN_USE:
            raise Refused(409, f"another process is writing {name}", "id", IN_USE)
        if run.open and length is not None:
            raise Refused(
                409,
                f"{name} is {run.state}; max_tokens can be raised when it is done",
                "max_tokens",
            )
        if run.open or (run.state == FINISHED and length is None):
            return run
        if length is not None:
            self._refuse_length(run, length)
            run.config = changed(run.config, {"length": length})
        with self._guard:
            if name in self._runs:
                return self._runs[name]
            self._refuse_full()
            again = self._again(run)
            self._note(again)
        return again

    def _again(self, run: ApiRun) -> ApiRun:
        """Queue a run that is not open."""
        again = ApiRun(
            run.path, run.config, run.request, run.created, prompt_tokens=run.prompt_tokens
        )
        again.stats = run.stats
        self._runs[run.id] = again
        self._turns.put(again)
        return again

    def cancel(self, run: ApiRun) -> None:
        """Stop an open run, for good: it goes on only if somebody asks for that."""
        with self._guard:
            if not run.open:
                return
            run.stopping = CANCELLED
            if run.state == QUEUED:
                run.state = CANCELLED
                self._runs.pop(run.id, None)
                self._note(run, CANCELLED)

    # --- accepting

    def _refuse_full(self, more: int = 1) -> None:
        if self._closing:
            raise Refused(503, "the server is stopping", code="stopping", wait=5)
        runs = list(self._runs.values())
        if len(runs) + more > self._config.queue + self._width:
            first = runs[0]
            speed = first.stats.tokens_per_second or self._speed
            wait = (first.config.text.length - first.stats.tokens) / speed if speed else 10
            message = f"{len(runs):,} requests are decoded or waiting; the queue takes no more"
            raise Refused(429, message, code="queue_full", wait=min(3600, max(1, round(wait))))

    def _refuse_length(self, run: ApiRun, length: object) -> None:
        """Refuse a length that a run cannot be given."""
        if type(length) is not int or length < max(1, run.stats.tokens):
            raise Refused(
                400,
                f"max_tokens must be an integer, at least {max(1, run.stats.tokens):,}",
                "max_tokens",
            )
        if run.state == FINISHED and run.end != "length":
            ended = "an end-of-text token" if run.end == _EOS else "a stop string"
            message = f"{run.id} ended at {ended}: max_tokens cannot make it longer"
            raise Refused(409, message, "max_tokens", "run_ended")
        prompt = run.prompt_tokens
        if not prompt and run.request is not None:  # it was never begun
            with self._accepting:
                prompt = len(self._fitted(run.request)[1])
        self._refuse_excess(prompt, length, "max_tokens")

    def _refuse_excess(self, prompt: int, length: int, param: str) -> None:
        if prompt + length > (most := self.model.target.max_positions):
            sizes = (
                f"{prompt:,} prompt tokens and {length:,} new ones need more than the model's "
                f"{most:,} positions"
            )
            raise Refused(400, f"{param}: {sizes}", param, "context_length_exceeded")

    def _fitted(self, request: ApiRequest) -> tuple[RunConfig, Sequence[int]]:
        """A request's job, of a length that the model has room for, and its prompt's token ids."""
        target = self.model.target
        model = self.model
        config = request.config
        chat = "chat" in request.wants
        try:
            ids: Sequence[int] = request.prompt
            if chat:
                ids = Text("chat", "", messages=request.prompt).encode(model, chat)
            elif isinstance(request.prompt, str):
                ids = model.encode(request.prompt)
            if not ids:
                raise InputError("must have tokens", "prompt")
            self._refuse_excess(len(ids), 1, "prompt")
            if request.limit is not None:
                self._refuse_excess(len(ids), config.text.length, request.limit)
            named = {
                name: getattr(config.sampling, name) for name in ("logit_bias", "stop_token_ids")
            }
            refuse_ids(target.vocab_size, prompt=ids, **named)
            beside = model.draft is not None
            resolve(config.method, target, model.heads, config.drafting, beside)
        except InputError as error:
            names = {"draft_model": "method"}
            raise refused(error, names, "messages" if chat else "prompt") from None
        length = min(config.text.length, target.max_positions - len(ids))
        return changed(config, {"length": length}), ids

    # --- decoding

    def _work(self) -> None:
        side_by_side(self._next, self._width)

    def _next(self, begun: int) -> Work[None] | None:
        """The run whose turn it is; one is waited for where none was begun."""
        while True:
            try:
                run = self._turns.get(block=not begun)
            except Empty:
                return None
            if run is None:  # for good
                self._turns.put(None)
                return None
            with self._guard:
                if run.state == QUEUED:
                    run.state = RUNNING
                    return self._made(run)

    def _made(self, run: ApiRun) -> Work[None]:
        state = yield from self._decode(run)
        if state in (FAILED, CANCELLED):
            self._note(run, state)
        with self._guard:
            self._runs.pop(run.id, None)
        self._speed = run.stats.tokens_per_second or self._speed
        run.state = state  # from here on, readers know that the text is whole
        run.prompt = None
        figures = f"{run.stats.tokens:,} tokens, {run.stats.tokens_per_second:,.1f} tokens/s"
        self._say(f"{run.id} {state}: {run.reason or figures}")
        self._kept.settle()

    def _begin(self, run: ApiRun) -> Work[Job | None]:
        """The job of a run, once memory has room beside the others'; None if it is finished."""
        while True:
            try:
                if (run.path / RECORD).exists():
                    length = {"length": run.config.text.length}
                    return resume(
                        run.path, length, False, _COMMAND, loaded=self.model, kept=self._kept
                    )
                assert run.request is not None
                if run.request.model != self.model_id:
                    asked = run.request.model
                    served = self.model_id
                    raise InputError(
                        f"this run was requested for model {asked}; this server serves {served}",
                        "model",
                    )
                # a server that was killed accepted it
                ids = run.prompt or self._fitted(run.request)[1]
                own = replace(run.config, out=run.path)
                return start(own, _COMMAND, loaded=self.model, ids=ids, kept=self._kept)
            except NoRoom:
                if not (begun := self._begun):
                    raise
            while self._begun >= begun:  # until one has ended; no other overtakes it meanwhile
                run.show_prefill(0, 0)
                yield None

    def _decode(self, run: ApiRun) -> Work[str]:
        """Make a run's text, all of it; returns its state."""
        try:
            job = yield from self._begin(run)
            if job is None:  # finished, and its request was not
                stored = self._read(run.path)
                for name in ("ids", "rows", "text", "tokens", "ends", "stats", "end"):
                    setattr(run, name, getattr(stored, name))
                return FINISHED
            run.prompt_tokens = len(job.prompt)
            run.copied = job.generation.decoding.copied
            self._begun += 1
            try:
                yield from job.running(run.follow(job), run.show_prefill)
            finally:
                self._begun -= 1
                if job.state != FAILED:  # it ended, or stopped between two passes
                    self._kept.keep(job.generation.decoding)
                del job  # and with it the caches
            return FINISHED
        except RunStopped:
            return run.stopping
        except (InputError, Refused) as error:
            run.refusal = True
            run.reason = str(error)
            if isinstance(error, InputError) and error.field == "model":
                # it waits for a server of its own model
                return INTERRUPTED
        except DecodeError as error:
            run.reason = str(error)
        except Exception as error:
            run.reason = (
                "no memory is left"
                if ran_out(error)
                else f"unexpected {type(error).__name__}: {error}"
            )
        return FAILED

    def _note(self, run: ApiRun, state: str = "") -> None:
        try:
            run.store(state)
            self._unwritten.pop(run.id, None)
        except (OSError, InputError):
            self._unwritten[run.id] = {"state": state, "reason": run.reason}

    # --- folders

    def _recover(self) -> None:
        """Queue what another server left unfinished, in the order in which it came."""
        for path in self._paths():
            if not (path / REQUEST).exists():
                continue
            try:
                run = self._read(path, whole=False)
            except InputError as error:
                self._say(f"{path.name} is left alone: {error}")
                continue
            longer = (
                run.state == FINISHED
                and run.end == "length"
                and run.stats.tokens < run.config.text.length
            )
            if longer or run.state in (INTERRUPTED, KILLED):
                self._say(f"{run.id} goes on, {run.stats.tokens:,} tokens are there")
                self._again(run)

    def _requested(self, path: Path) -> ApiRun | None:
        """A run as ``request.json`` in its folder says, with the state that this says;
        None if there is none.
        """
        file = path / REQUEST
        if not file.exists():
            return None
        content = read_json(file)
        try:
            typed = {**self._typed_model, **of_json(content["typed"])}
            request = parse(content["body"], content["chat"], typed, content["model"])
            run = ApiRun(
                path,
                changed(request.config, {"length": int(content["length"])}),
                request,
                int(content["created"]),
            )
            last = self._unwritten.get(path.name, content)
            run.state = str(last.get("state", ""))
            run.reason = str(last.get("reason", ""))
        except (KeyError, TypeError, ValueError, AttributeError, Refused) as error:
            raise InputError(f"{file} is broken: {error!r:.200}") from None
        return run

    def _read(self, path: Path, whole: bool = True) -> ApiRun:
        """A run that is not open, from its folder, with its text if ``whole``.

        InputError if there is none, or its files are broken.
        """
        run = self._requested(path)
        ended = ""
        if run is not None:
            ended = run.state
            run.state = run.state or INTERRUPTED
        if not (path / RECORD).exists():
            if run is None:
                raise InputError(f"{path.name} holds no run")
            return run
        entry, record, last = inspect_run(path)
        if record is None:
            raise InputError(entry.reason or f"{path.name} holds no run")
        with reading(path / RECORD):
            config = RunConfig.from_record(record.options, record.model, record.drafting)
            run = run or ApiRun(
                path, config, created=int(datetime.fromisoformat(record.started).timestamp())
            )
            run.prompt_tokens = int(record.prompt["tokens"])
            figures = record.figures or {}
            depth = int(figures.get("drafted_per_path", 0))
            run.copied = int(figures.get("prefill_copied", 0))
            run.stats = DecodeStats.counted(depth, last.tokens, last.counters)
            ended_at = (record.end or {}).get("reason", "length")
            run.end = ended_at if entry.state == FINISHED else None
        if ended or run.stats.tokens > run.config.text.length:
            # else it is to come to what was asked last
            run.config = config
        stopped = ended and entry.state in (INTERRUPTED, KILLED)
        run.state = ended if stopped else IN_USE if entry.state == RUNNING else entry.state
        run.reason = entry.reason or run.reason
        if not whole:
            return run
        made = read_run(path)
        saved = read_saved(path, made.prompt, row_bytes(config))
        ids = saved.tokens[: run.stats.tokens]
        fault = saved.damage
        if entry.state == FINISHED and not fault:
            fault = made.text_fault(self.model.tokenizer)
        if fault:
            raise InputError(fault)
        text = text_of(self.model.tokenizer, ids, made.rules)
        if run.request is not None and config.logprobs is not None and ids:
            run.rows += read_own(path / LOGPROBS)
            run.ids.extend(ids)
        run.grow(text, run.stats.tokens)
        return run
