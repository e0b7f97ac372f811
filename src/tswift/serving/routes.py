"""The HTTP interface: OpenAI's completions, chat completions and models,
and runs that outlive their connections.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers.convert_slow_tokenizer import bytes_to_unicode

import tswift
from tswift.decoding.text import TextRules, TextStream
from tswift.errors import InputError, Object
from tswift.jobs.folder import FAILED, FINISHED
from tswift.sampling.rule import row_type
from tswift.serving.config import ServeConfig
from tswift.serving.requests import Refused, parse_body
from tswift.serving.run import ApiRun
from tswift.serving.service import Service

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_BODY = 8_000_000  # bytes: some two million tokens
_BODY_SECONDS = 30.0  # for a request's body
_IDLE_SECONDS = 30  # between two requests of a connection
_LOOK_SECONDS = 0.02  # between two looks of a reader at its run
_KEEP_ALIVE_SECONDS = 10.0
_NO_RETRY = {"X-Should-Retry": "false"}  # OpenAI's client would repeat the request, as a new run
_STOP_SECONDS = 3.0  # for readers to hear that the server stops
_MAX_CONNECTIONS = 512  # in all
_MAX_HEADERS = 32_768  # bytes
_EVENT_ID = re.compile(r"(\d{1,15}):(\d{1,15})")
_PAGE = Path(__file__).with_name("page.html")
_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def _error_body(error: Refused) -> Object:
    """An error in OpenAI's format."""
    kind = _TYPES.get(
        error.status, "invalid_request_error" if error.status < 500 else "server_error"
    )
    return {
        "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    }


def _error(error: Refused, headers: Mapping[str, str] | None = None) -> Response:
    of_a_run = _NO_RETRY if error.status == 409 else {}
    return JSONResponse(
        _error_body(error), error.status, {**error.headers, **of_a_run, **(headers or {})}
    )


def authorize(app: ASGIApp, host: str, key: str | None) -> ASGIApp:
    """Let requests in that come to a name of this server, with its key if it has one.

    Without a key the server listens on this machine only. A page of the web could still let a
    browser ask there, as another site or under a name of its own that leads to 127.0.0.1; so only
    names of this machine are answered, and no page of another site.
    """
    names = ("localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host.lower())

    def refusal(request: HttpRequest) -> Refused | None:
        if key is None:
            asked = request.headers.get("host", "").lower()
            name = re.sub(r":\d*$", "", asked)
            if name not in names:
                return Refused(403, f"Host {name!r:.80} is not served", code="wrong_host")
            origin = request.headers.get("origin")
            elsewhere = origin is not None and origin.partition("://")[2] != asked
            if elsewhere or request.headers.get("sec-fetch-site") == "cross-site":
                return Refused(
                    403,
                    "a page of another site cannot ask a server without a key",
                    code="wrong_origin",
                )
        elif request.scope["path"] not in ("/health", "/"):
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                given.strip().encode(), key.encode()
            ):
                message = "a wrong API key, or none; it is sent as Authorization: Bearer KEY"
                return Refused(401, message, code="invalid_api_key")
        return None

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        refused = refusal(HttpRequest(scope)) if scope["type"] == "http" else None
        await (app if refused is None else _error(refused))(scope, receive, send)

    return answer


class Api:
    """The routes; with a demo page, ``/`` shows a text being written."""

    def __init__(self, service: Service, config: ServeConfig, demo_page: bool) -> None:
        self._service = service
        self._model = service.model
        self._started = int(time.time())
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/v1/completions", partial(self._create, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", partial(self._create, chat=True), methods=["POST"]),
            Route("/v1/runs", self._list),
            Route("/v1/runs/{id}", self._show),
            Route("/v1/runs/{id}/events", self._follow),
            Route("/v1/runs/{id}/resume", self._resume, methods=["POST"]),
            Route("/v1/runs/{id}/cancel", self._cancel, methods=["POST"]),
        ]
        if demo_page:
            routes.append(Route("/", self._page))
        handlers: dict[Any, Any] = dict.fromkeys(
            (Refused, HTTPException, ClientDisconnect, Exception), _failed
        )
        app = Starlette(routes=routes, exception_handlers=handlers)
        self.app = authorize(app, config.host, config.api_key)

    # --- what is there

    async def _health(self, request: HttpRequest) -> Response:
        decodes = self._service.thread.is_alive()
        about = {
            "status": "ok" if decodes else "the thread that decodes has ended",
            "model": self._service.model_id,
        }
        return JSONResponse({**about, "version": tswift.__version__}, 200 if decodes else 503)

    def _page(self, request: HttpRequest) -> Response:
        policy = (
            "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
            "connect-src 'self'"
        )
        return HTMLResponse(_PAGE.read_text(), headers={"Content-Security-Policy": policy})

    async def _models(self, request: HttpRequest) -> Response:
        about = {
            "id": self._service.model_id,
            "object": "model",
            "created": self._started,
            "owned_by": "tswift",
        }
        about["max_model_len"] = self._model.target.max_positions
        name = request.path_params.get("name")
        if name not in (None, self._service.model_id):
            raise Refused(
                404, f"the model {name!r:.80} is not served here", "model", "model_not_found"
            )
        return JSONResponse({"object": "list", "data": [about]} if name is None else about)

    # --- texts

    async def _create(self, request: HttpRequest, chat: bool) -> Response:
        if "last-event-id" in request.headers:
            message = (
                "goes with GET /v1/runs/ID/events or POST /v1/runs/ID/resume: this would be a new "
                "run"
            )
            raise Refused(400, f"Last-Event-ID {message}", "Last-Event-ID")
        body = await run_in_threadpool(parse_body, await _body(request))
        runs = await run_in_threadpool(self._service.accept, body, chat)
        stream, leaving = runs[0].wants("stream"), runs[0].wants("cancel_on_disconnect")
        return await self._answer(request, runs, stream, leaving=leaving)

    async def _answer(
        self,
        request: HttpRequest,
        runs: Sequence[ApiRun],
        stream: bool,
        have: tuple[int, int] | None = None,
        leaving: bool = False,
    ) -> Response:
        """Follow runs to their end, or to the end of the connection; which, ``leaving``,
        cancels them.

        Where they are not streamed they come whole. A reader who comes again says what they
        ``have`` of a run: tokens and bytes.
        """
        ids = {"X-Run-Id": ", ".join(run.id for run in runs)}
        if stream:
            # a run that is done stays done
            then = BackgroundTask(self._cancel_all, runs) if leaving else None
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **ids}
            return StreamingResponse(
                self._events(runs, have), 200, headers, "text/event-stream", then
            )
        gone = asyncio.ensure_future(_gone(request.receive))
        try:
            while any(run.open for run in runs) and not gone.done():
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            gone.cancel()
        if leaving and any(run.open for run in runs):
            await run_in_threadpool(self._cancel_all, runs)
        for run in runs:
            if run.state != FINISHED:
                return _error(_failure(run), {**ids, **_NO_RETRY})
        choices = [self._choice(index, run) for index, run in enumerate(runs)]
        whole = {**self._head(runs[0]), "choices": choices, "usage": _usage(runs)}
        return JSONResponse({**whole, **_figures(runs[0])}, headers=ids)

    def _cancel_all(self, runs: Sequence[ApiRun]) -> None:
        for run in runs:
            self._service.cancel(run)

    def _choice(self, index: int, run: ApiRun) -> Object:
        tokenizer = self._model.tokenizer
        text = run.echo(tokenizer) + run.text.decode(errors="replace")
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": index,
            **({"message": message} if run.wants("chat") else {"text": text}),
            "logprobs": Logprobs(run, tokenizer, 0).up_to(run.stats.tokens),
            "finish_reason": run.finish_reason,
        }

    async def _events(
        self, runs: Sequence[ApiRun], have: tuple[int, int] | None
    ) -> AsyncIterator[str]:
        """Runs' texts as server-sent events, one after the other."""
        # lines without an empty one behind them: OpenAI's client, once it knows an id, takes that
        # for an event without data, and so each ping of sse-starlette 3.7
        yield "retry: 1000\n"
        head = self._head(runs[0], ".chunk")
        usage = runs[0].wants("include_usage")
        if usage:
            head["usage"] = None
        for index, run in enumerate(runs):
            async for event in self._events_of(run, index, head, have, len(runs) > 1):
                yield event
            if run.state != FINISHED:
                yield f"data: {json.dumps(_error_body(_failure(run)))}\n\n"
                return
        if usage:
            name = "" if len(runs) > 1 else f"id: {runs[0].stats.tokens}:{len(runs[0].text)}\n"
            last = {**head, "choices": [], "usage": _usage(runs)}
            yield f"{name}data: {json.dumps(last)}\n\n"
        yield "data: [DONE]\n\n"

    async def _events_of(
        self, run: ApiRun, index: int, head: Object, have: tuple[int, int] | None, several: bool
    ) -> AsyncIterator[str]:
        """The events of one run's text; an event's id says how many tokens and bytes came so far,
        unless there are ``several`` runs.
        """
        tokens, start = have or (0, 0)
        logprobs = Logprobs(run, self._model.tokenizer, tokens)
        chat = run.wants("chat")

        def event(text: str | None, reason: str | None = None, **delta: str) -> str:
            rest: Object = {"logprobs": logprobs.up_to(tokens), "finish_reason": reason}
            if chat:
                own: Object = {"delta": {**delta, **({} if text is None else {"content": text})}}
            else:
                own = {"text": text or ""}
            chunk = {**head, "choices": [{"index": index, **own, **rest}]}
            if text or reason:
                chunk |= _figures(run)
            name = "" if several else f"id: {tokens}:{start}\n"
            return f"{name}data: {json.dumps(chunk)}\n\n"

        if chat and have is None:
            yield event("", role="assistant")
        elif have is None and (echo := run.echo(self._model.tokenizer)):
            yield event(echo)
        last = time.monotonic()
        while True:
            whole = not run.open
            piece = run.read(tokens, start)
            if piece is not None:
                text, tokens, start = piece
                yield event(text)
                last = time.monotonic()
            elif whole:
                break
            elif time.monotonic() - last > _KEEP_ALIVE_SECONDS:
                yield f": {run.state}\n"
                last = time.monotonic()
            await asyncio.sleep(0 if whole else _LOOK_SECONDS)
        if run.state == FINISHED:
            tokens = max(tokens, run.stats.tokens)  # those that end a text are no part of it
            yield event(None, run.finish_reason)

    def _head(self, run: ApiRun, part: str = "") -> Object:
        kind = f"chat.completion{part}" if run.wants("chat") else "text_completion"
        return {
            "id": run.id,
            "object": kind,
            "created": run.created,
            "model": self._service.model_id,
        }

    # --- runs

    def _list(self, request: HttpRequest) -> Response:
        # in a thread of its own, as all that are not async
        limit = request.query_params.get("limit", "100")
        if not re.fullmatch(r"\d{1,4}", limit) or not 1 <= int(limit) <= 1000:
            raise Refused(400, "limit must be between 1 and 1,000", "limit")
        return JSONResponse({"object": "list", "data": self._service.newest(int(limit))})

    def _show(self, request: HttpRequest) -> Response:
        run = self._service.find(request.path_params["id"])
        about = {
            **run.brief(),
            "created": run.created,
            "reason": run.reason or None,
            "seed": run.config.text.seed,
            "finish_reason": run.finish_reason,
            "figures": run.figures(),
            "usage": _usage([run]),
            "text": bytes(run.text).decode(errors="replace"),
        }
        return JSONResponse(about)

    async def _follow(self, request: HttpRequest) -> Response:
        have = _have(request)
        run = await run_in_threadpool(self._service.find, request.path_params["id"])
        if not run.open and run.state != FINISHED:
            raise Refused(409, _failure(run).message, "id", "run_not_running")
        return await self._answer(request, [run], True, have)

    async def _resume(self, request: HttpRequest) -> Response:
        have = _have(request)
        data = await _body(request, optional=True)
        body = await run_in_threadpool(parse_body, data) if data else {}
        for name in body:
            if name not in ("stream", "max_tokens"):
                raise Refused(
                    400,
                    f"there is no field {name!r:.60}; there are stream and max_tokens",
                    name[:60],
                )
        stream = body.get("stream")
        if stream is not None and not isinstance(stream, bool):
            raise Refused(400, "stream must be true or false", "stream")
        run = await run_in_threadpool(
            self._service.resume, request.path_params["id"], body.get("max_tokens")
        )
        if stream is None:
            stream = have is not None or run.wants("stream")
        return await self._answer(request, [run], stream, have)

    async def _cancel(self, request: HttpRequest) -> Response:
        run = await run_in_threadpool(self._service.find, request.path_params["id"])
        await run_in_threadpool(self._service.cancel, run)
        while run.open:
            await asyncio.sleep(_LOOK_SECONDS)
        return JSONResponse(run.brief())


class Logprobs:
    """Log-probabilities of a run's tokens, but those ``given`` before, in OpenAI's format.

    They are by the model's own distribution; ``drawn_logprob`` is by the one that the token was
    drawn from.
    """

    def __init__(self, run: ApiRun, tokenizer: PreTrainedTokenizerBase, given: int) -> None:
        self._run = run
        self._tokenizer = tokenizer
        self._given = given
        self._stream = TextStream(tokenizer, TextRules(skip_special=run.config.skip_special_tokens))
        self._offset: int | None = None  # of the first token to give, once it is made

    def up_to(self, tokens: int) -> Object | None:
        """Those of the tokens that were not given yet; None if there are none."""
        config = self._run.config
        ids = self._run.ids[self._given : tokens].tolist()
        if self._run.request is None or config.logprobs is None or not ids:
            return None
        if self._offset is None:
            self._offset = len(self._stream.add(self._run.ids[: self._given].tolist()))
        kind = row_type(config.logprobs)
        held = self._run.rows[self._given * kind.itemsize : tokens * kind.itemsize]
        rows = np.frombuffer(bytes(held), kind)
        self._given = tokens
        content = []
        for token, row in zip(ids, rows, strict=True):
            near = (
                zip(row["raw_ids"].tolist(), row["raw_top"].tolist(), strict=True)
                if config.logprobs
                else ()
            )
            others = [self._entry(*each) for each in near]
            own = {**self._entry(token, float(row["raw"])), "drawn_logprob": float(row["warped"])}
            content.append({**own, "top_logprobs": others})
        if self._run.wants("chat"):
            return {"content": content, "refusal": None}
        offsets = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._stream.add([token]))
        likeliest = [_likeliest([*each["top_logprobs"], each]) for each in content]
        return {
            "tokens": [each["token"] for each in content],
            "token_logprobs": [each["logprob"] for each in content],
            "drawn_logprobs": [each["drawn_logprob"] for each in content],
            "top_logprobs": likeliest if config.logprobs else None,
            "text_offset": offsets,
        }

    def _entry(self, token: int, log: float) -> Object:
        backend = self._tokenizer.backend_tokenizer
        text = str(backend.decode([token], skip_special_tokens=False))
        broken = "\N{REPLACEMENT CHARACTER}" in text
        held = _bytes_of(backend.id_to_token(token)) if broken else list(text.encode())
        return {"token": text, "logprob": log, "bytes": held}


def _bytes_of(word: str) -> list[int] | None:
    """The bytes of a token that is a part of a character, by its name in a vocabulary of bytes."""
    if re.fullmatch("<0x[0-9A-F]{2}>", word):
        return [int(word[3:5], 16)]
    found = [_BYTES[letter] for letter in word if letter in _BYTES]
    return found if len(found) == len(word) else None


def _likeliest(near: Sequence[Object]) -> dict[str, float]:
    """Tokens' texts, likeliest first; of tokens with the same text, such as parts of characters,
    the likeliest.
    """
    found: dict[str, float] = {}
    for each in near:
        found.setdefault(each["token"], each["logprob"])
    return found


def _failure(run: ApiRun) -> Refused:
    """Why a run has ended before its text."""
    where = f"{run.id} has {run.stats.tokens:,} tokens, and POST /v1/runs/{run.id}/resume goes on"
    status = 400 if run.refusal else 500 if run.state == FAILED else 503
    reason = run.reason or f"the run is {run.state}"
    return Refused(status, f"{reason}; {where}", code=f"run_{run.state}".replace(" ", "_"))


def _figures(run: ApiRun) -> Object:
    return {"figures": run.figures()} if run.wants("figures") else {}


def _usage(runs: Sequence[ApiRun]) -> Object:
    """Tokens as OpenAI counts them, of runs with the same prompt; predicted ones are those that
    were drafted.
    """
    figures = [run.figures() for run in runs]
    prompt = runs[0].prompt_tokens
    made = sum(run.stats.tokens for run in runs)
    accepted, drafted = (sum(each[name] for each in figures) for name in ("accepted", "drafted"))
    details = {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": max(0, drafted - accepted),
    }
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": min(prompt, runs[0].copied)},
        "completion_tokens_details": details,
    }


async def _gone(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _have(request: HttpRequest) -> tuple[int, int] | None:
    """Tokens and bytes that a reader has, by the id of the last event that it saw."""
    name = request.headers.get("last-event-id")
    if not name:
        return None
    found = _EVENT_ID.fullmatch(name)
    if found is None:
        raise Refused(
            400,
            f"Last-Event-ID must be the id of an event, TOKENS:BYTES, got {name!r:.40}",
            "Last-Event-ID",
        )
    return int(found[1]), int(found[2])


async def _body(request: HttpRequest, optional: bool = False) -> bytes:
    """A request's body, if it is JSON, not too large, and comes in time."""
    length = request.headers.get("content-length", "0")
    empty = optional and length == "0" and "transfer-encoding" not in request.headers
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not empty:
        raise Refused(
            415,
            f"the body must be application/json, got {kind or 'nothing'!r:.60}",
            code="unsupported_media_type",
        )
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, "a compressed body is not served", code="unsupported_media_type")
    too_large = Refused(413, f"the body has more than {_MAX_BODY:,} bytes", code="body_too_large")
    if not length.isdigit() or int(length) > _MAX_BODY:
        raise too_large

    async def read() -> bytes:
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > _MAX_BODY:
                raise too_large
        return bytes(data)

    try:
        return await asyncio.wait_for(read(), _BODY_SECONDS)
    except TimeoutError:
        raise Refused(
            408, f"the body did not come within {_BODY_SECONDS:g} seconds", code="timeout"
        ) from None


async def _failed(request: HttpRequest, error: Exception) -> Response:
    """The answer to a request that raised an error."""
    if isinstance(error, ClientDisconnect):  # nobody hears it
        return Response(status_code=400)
    if isinstance(error, Refused):
        return _error(error)
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.scope['path'][:200]}: {error.detail}"
        return _error(Refused(error.status_code, message), error.headers)
    return _error(Refused(500, f"unexpected {type(error).__name__}; a mistake in tswift"))


class Server(uvicorn.Server):
    """The server; what it is asked to stop by stops the decoding first,
    so that readers are told.
    """

    service: Service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: readers hear of it, and those that do not listen are cut off."""
        self.service.close()
        until = time.monotonic() + _STOP_SECONDS
        while self.server_state.tasks and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await super().shutdown(sockets)


def serve(service: Service, config: ServeConfig, sock: socket.socket, demo_page: bool) -> None:
    """Answer until a signal comes, which is raised again then."""
    settings = uvicorn.Config(
        Api(service, config, demo_page).app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        limit_concurrency=_MAX_CONNECTIONS + 1,  # the one that asks is counted
        h11_max_incomplete_event_size=_MAX_HEADERS,
    )
    server = Server(settings)
    server.service = service
    with suppress(asyncio.CancelledError):
        server.run([sock])


def listen(config: ServeConfig) -> socket.socket:
    """A socket that listens where it is asked for;
    refused where others can reach it and no key is asked for.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"{config.host!r:.80} is no address ({getattr(error, 'strerror', error)})", "host"
        ) from None
    if (
        config.api_key is None
        and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    ):
        raise InputError(
            f"{config.host} can be reached by other machines: `api_key` has to be given", "host"
        )
    dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(address, family=family, backlog=128, dualstack_ipv6=dual)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise InputError(
            f"{config.host} port {config.port} cannot be listened on ({reason})", "port"
        ) from None
