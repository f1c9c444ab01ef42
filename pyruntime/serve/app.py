"""The service's addresses: OpenAI's completions and models, and what else there is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from pyruntime.errors import EngineError, OutOfMemoryError, PyruntimeError
from pyruntime.serve.answers import Answer, dumped, event
from pyruntime.serve.protocol import (
    Asked,
    Limits,
    RequestError,
    read_completion,
    read_ids,
    read_json,
    read_text,
)
from pyruntime.serve.sequence import Sequence
from pyruntime.serve.texts import Texts, joined
from pyruntime.serve.wall import measured_wall, read_wall
from pyruntime.serve.worker import Job, QueueFullError, StoppedError, Worker

T = TypeVar("T")

RETRY_SECONDS = 1
ASIDE_BYTES = 1 << 14  # a body of more is read in another thread, lest others wait for it
ASIDE_NUMBERS = 1 << 13  # an answer of more log-probabilities is put together in one, too
AT_WORK = 0.002  # seconds after which the engine is at work on a request that did not have to wait
STALLED = 10  # seconds for which nothing of a body may come: a server that stops waits for it
DRAINED = 4  # times the largest body: so much is read to refuse a body in so many words
# The page reaches nothing but this server, whatever is in the model's text.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
)


def create_app(worker: Worker, texts: Texts, name: str, created: int, limits: Limits) -> FastAPI:
    """The application that serves a worker's engine as the model `name`, loaded at `created`."""
    service = _Service(worker, texts, name, created, limits)
    app = FastAPI(title="pyruntime", openapi_url=None)
    for method, path, endpoint in (
        ("GET", "/v1/models", service.models),
        ("GET", "/v1/models/{model:path}", service.model),
        ("POST", "/tokenize", service.tokenize),
        ("POST", "/detokenize", service.detokenize),
        ("GET", "/tokenizer_info", service.tokenizer_info),
        ("POST", "/wall", service.wall),
        ("GET", "/health", service.health),
        ("GET", "/metrics", service.metrics),
        ("GET", "/", service.page),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    # Not through FastAPI, whose part in a request takes 60 us.
    app.add_route("/v1/completions", service.completions, methods=["POST"])
    for kind in (PyruntimeError, ClientDisconnect, TimeoutError, HTTPException, Exception):
        app.add_exception_handler(kind, service.failed)
    return app


class _Service:
    def __init__(
        self, worker: Worker, texts: Texts, name: str, created: int, limits: Limits
    ) -> None:
        self._worker, self._texts, self._name, self._limits = worker, texts, name, limits
        self._created = created
        self._page = page()

    # OpenAI's

    async def completions(self, request: Request) -> Response:
        deadline = asyncio.get_running_loop().time() + self._limits.seconds
        async with asyncio.timeout_at(deadline):
            body = await self._body(request)
            aside = len(body) > ASIDE_BYTES
            counts = self._worker.counts
            (asked, answer), spent = await _run(_timed, self._read, body, aside=aside)
            counts.read_seconds += spent
            if asked.stream:
                return self._streamed(asked, answer, deadline)
            job = Job(answer.sequences)
            await self._done(request, job, None if aside else answer.prepare)
            aside = answer.numbers > ASIDE_NUMBERS
            told, spent = await _run(_timed, answer.whole, job.timings, aside=aside)
            counts.write_seconds += spent
            return _json(told)

    async def models(self) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, model: str) -> Response:
        if model != self._name:
            raise RequestError(
                f"the model {model!r} does not exist here; there is {self._name!r}",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._name, "object": "model", "created": self._created, "owned_by": "pyruntime"
        }  # fmt: skip

    def _read(self, body: bytes) -> tuple[Asked, Answer]:
        config = self._worker.engine.config
        record = read_json(body)
        asked = read_completion(record, self._name, self._texts, config.vocab, self._limits)
        return asked, Answer(asked, self._texts, self._name)

    def _streamed(self, asked: Asked, answer: Answer, deadline: float) -> Response:
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[bytes | None] = asyncio.Queue()

        def put(chunk: bytes | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        def progress(sequence: Sequence) -> None:
            if chunk := answer.chunk(sequence):
                put(chunk)

        job = Job(answer.sequences, progress=progress)
        self._submit(job)
        job.done.add_done_callback(lambda _: put(None))
        return StreamingResponse(
            self._events(job, answer, chunks, deadline), media_type="text/event-stream"
        )

    async def _events(
        self,
        job: Job,
        answer: Answer,
        chunks: asyncio.Queue[bytes | None],
        deadline: float,
    ) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        try:
            while chunk := await asyncio.wait_for(chunks.get(), deadline - clock()):
                yield event(chunk)
            job.done.result()
            for chunk in answer.last_chunks():
                yield event(chunk)
            yield event(b"[DONE]")
        except Exception as error:  # the head of the answer has been sent
            yield event(dumped(self._told(error).record()))
        finally:
            self._worker.drop(job)

    # vLLM's, which lm-evaluation-harness takes for its tokenizer

    async def tokenize(self, request: Request) -> Response:
        record = read_json(await self._body(request))
        ids = await _run(read_text, record, self._texts, aside=True)
        limit = self._limits.prompt_tokens
        return _json({"tokens": ids.tolist(), "count": len(ids), "max_model_len": limit})

    async def detokenize(self, request: Request) -> Response:
        ids = read_ids(read_json(await self._body(request)), self._worker.engine.config.vocab)
        return _json({"prompt": joined(self._texts.pieces(ids))})

    async def tokenizer_info(self) -> Response:
        tokenizer = self._texts.tokenizer
        if tokenizer is None:
            raise RequestError("this model has no vocabulary", status=404)
        named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        special = {name: None if id is None else tokenizer.token(id) for name, id in named.items()}
        return _json({**special, "chat_template": tokenizer.chat_template})

    # Ours

    async def wall(self, request: Request) -> Response:
        engine = self._worker.engine
        nt = read_wall(read_json(await self._body(request)), engine)
        try:
            found = await self._done(request, Job(task=lambda engine: measured_wall(engine, nt)))
        except EngineError as error:
            raise RequestError(str(error), status=501, kind="not_available") from None
        return _json(found)

    async def health(self) -> Response:
        if not self._worker.alive:
            raise StoppedError("the server is stopping")
        engine = self._worker.engine
        return _json(
            {
                "status": "ok",
                "model": self._name,
                "name": engine.config.name,
                "device": engine.path,
                "vocabulary": self._texts.tokenizer is not None,
                "prompt_tokens": self._limits.prompt_tokens,
            }
        )

    async def metrics(self) -> Response:
        record = self._worker.record()
        return _json({**record, "passes": vars(self._worker.engine.stats())})

    async def page(self) -> Response:
        return HTMLResponse(self._page, headers={"content-security-policy": PAGE_POLICY})

    # What all have in common

    async def _body(self, request: Request) -> bytes:
        """The body. Raises RequestError for one that is too large, or stops coming."""
        most, size = self._limits.body_bytes, 0
        parts: list[bytes] = []
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(STALLED) as stalled:
                async for part in request.stream():
                    stalled.reschedule(clock() + STALLED)
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                    elif size > DRAINED * most:
                        break
        except TimeoutError:
            raise RequestError(f"the body stopped coming, for {STALLED} s", status=408) from None
        if size > most:
            raise RequestError(f"the body has over {most} bytes (--max-body)", status=413)
        return b"".join(parts)

    def _submit(self, job: Job) -> None:
        try:
            self._worker.submit(job)
        except QueueFullError as error:
            retry = {"retry-after": str(RETRY_SECONDS)}
            raise RequestError(
                str(error), status=429, kind="overloaded", code="queue_full", headers=retry
            ) from None

    async def _done(
        self, request: Request, job: Job, meanwhile: Callable[[], object] | None = None
    ) -> Any:
        """The result of a job, of which nothing is left if the client goes before that.

        `meanwhile` is called if it takes longer than it takes to get an engine to work.
        """
        self._submit(job)
        done = asyncio.wrap_future(job.done)
        gone = asyncio.ensure_future(_disconnected(request))
        first = asyncio.FIRST_COMPLETED
        try:
            if meanwhile:
                over, _ = await asyncio.wait((done, gone), timeout=AT_WORK, return_when=first)
                if not over:
                    meanwhile()
            await asyncio.wait((done, gone), return_when=first)
            if not done.done():
                raise ClientDisconnect
            return done.result()
        finally:
            gone.cancel()
            self._worker.drop(job)

    async def failed(self, request: Request, error: Exception) -> Response:
        told = self._told(error)
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            asked = f"{request.method} {request.url.path}"
            text = f"{asked} is not served; what is: {_addresses(request.app)}"
            told = RequestError(text, status=error.status_code, headers=error.headers)
        return Response(dumped(told.record()), told.status, told.headers, "application/json")

    def _told(self, error: Exception) -> RequestError:
        """How a client is told of an error."""
        match error:
            case RequestError():
                return error
            case HTTPException():
                return RequestError(
                    str(error.detail), status=error.status_code, headers=error.headers
                )
            case ClientDisconnect():
                return RequestError("the client has left", status=499)
            case TimeoutError():
                text = f"not answered within {self._limits.seconds:g} s (--timeout)"
                return RequestError(text, status=504, kind="timeout")
            case OutOfMemoryError() | MemoryError() | StoppedError():
                text = str(error) or "out of host memory"
                return RequestError(text, status=503, kind="server_error")
        return RequestError(f"{type(error).__name__}: {error}", status=500, kind="server_error")


def _addresses(app: FastAPI) -> str:
    """All of them, with their methods."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    return ", ".join(
        f"{' '.join(sorted((route.methods or set()) - {'HEAD'}))} {route.path.replace(':path', '')}"
        for route in routes
    )


def page() -> str:
    """The page at the root."""
    return files("pyruntime.serve").joinpath("page.html").read_text("utf-8")


async def _run(call: Callable[..., T], *arguments: Any, aside: bool) -> T:
    """The result of a call: `aside`, in another thread, if it may take long."""
    return await asyncio.to_thread(call, *arguments) if aside else call(*arguments)


def _timed(call: Callable[..., T], *arguments: Any) -> tuple[T, float]:
    """The result of a call, and its seconds."""
    began = time.perf_counter()
    return call(*arguments), time.perf_counter() - began


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(record: dict[str, Any] | bytes) -> Response:
    body = record if isinstance(record, bytes) else dumped(record)
    return Response(body, media_type="application/json")
