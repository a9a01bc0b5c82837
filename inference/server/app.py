"""The routes, as an ASGI app behind the Guard."""

import asyncio
from contextlib import asynccontextmanager
from importlib import metadata

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from .answer import too_late
from .chat import ChatAnswer
from .completions import CompletionAnswer
from .connection import ClientLeft, read_body, unless_client_leaves
from .door.access_log import AccessLog
from .door.page import PAGE, PAGE_HEADERS
from .errors import FAILED, ApiError, json_response
from .fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    TokenizeChatFields,
    TokenizeTextFields,
    parse,
)
from .figures import CONTENT_TYPE
from .guard import Guard

NOBODY = 499  # nginx's status of a request whose client left; nobody reads it


def make_app(service):
    """The ASGI app of a Service."""

    @asynccontextmanager
    async def lifespan(_):
        await service.client.start()
        yield

    app = FastAPI(title="headstart", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    routes = dict.fromkeys(f"{sorted(route.methods)[-1]} {route.path}" for route in app.routes)

    @app.exception_handler(ApiError)
    async def told(_, error):
        return error.response()

    @app.exception_handler(HTTPException)
    async def not_found(_, error):
        told = f"{error.detail}: this server answers {', '.join(routes)}"
        return ApiError(error.status_code, told, headers=error.headers).response()

    @app.exception_handler(ClientLeft)
    async def left(*_):
        return Response(status_code=NOBODY)

    @app.exception_handler(Exception)
    async def failed(*_):
        return ApiError(500, FAILED).response()

    return _behind_the_door(app, service.options)


def _behind_the_door(app, options):
    """The app behind what every request passes: access log, CORS, Guard."""
    app = Guard(app, options)
    if options.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=["X-Request-Id"],
        )
    return AccessLog(app, options.access_log_file) if options.access_log == "json" else app


def _add_generation(app, service):
    asker = service.asker

    async def answer(request, fields_kind, prompts_of, answer_kind):
        loop, seconds = asyncio.get_running_loop(), service.options.request_timeout
        deadline = None if seconds is None else loop.time() + seconds
        fields = parse(fields_kind, await read_body(request, service.options))
        service.check_model(fields)
        try:
            async with asyncio.timeout_at(deadline):
                checking = loop.run_in_executor(service.thread_for(fields), prompts_of, fields)
                prompts = await unless_client_leaves(request.receive, checking)
        except TimeoutError:
            raise too_late(service.options) from None
        answer = answer_kind(service, fields, prompts, request.state.request_name)
        request.state.counts = answer.counts  # for the access log
        return await answer.respond(request.receive, deadline)

    @app.post("/v1/completions")
    async def completions(request: Request):
        return await answer(request, CompletionFields, asker.completion_prompts, CompletionAnswer)

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        service.check_tokenizer()
        return await answer(request, ChatFields, asker.chat_prompts, ChatAnswer)


def _add_tokens(app, service):
    asker = service.asker

    @app.post("/tokenize")
    async def tokenize(request: Request):
        service.check_tokenizer()
        body = await read_body(request, service.options)
        # A conversation is told by its field; the other kind then refuses what does not belong to it.
        fields = parse(
            TokenizeChatFields if b'"messages"' in body and b'"prompt"' not in body else TokenizeTextFields, body
        )
        service.check_model(fields)

        def work():
            if isinstance(fields, TokenizeChatFields):
                return asker.tokens(asker.render(fields), bool(fields.add_special_tokens))
            return asker.tokens(fields.prompt, fields.add_special_tokens is not False)

        tokens = await asyncio.to_thread(work)
        names = service.tokenizer.convert_ids_to_tokens(tokens) if fields.return_token_strs else None
        counts = {"count": len(tokens), "max_model_len": service.max_model_len}
        return json_response({**counts, "tokens": tokens, "token_strs": names})

    @app.post("/detokenize")
    async def detokenize(request: Request):
        service.check_tokenizer()
        fields = parse(DetokenizeFields, await read_body(request, service.options))
        service.check_model(fields)
        if not all(0 <= token < asker.vocab_size for token in fields.tokens):
            raise ApiError(400, f"tokens must be ids from 0 to {asker.vocab_size - 1}", param="tokens")
        return json_response({"prompt": await asyncio.to_thread(service.decode, fields.tokens)})

    if service.options.tokenizer_info:

        @app.get("/tokenizer_info")
        async def tokenizer_info():
            service.check_tokenizer()
            return json_response(service.tokenizer_info())


def _add_state(app, service):
    def get(path):
        """A route that can also be asked for its headers only, as readers of /metrics and load balancers do."""
        return app.api_route(path, methods=["GET", "HEAD"])

    @get("/")
    async def page():
        return Response(PAGE, headers=PAGE_HEADERS)

    def card(name):
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "headstart",
            "root": service.root,
            "parent": None,
            "max_model_len": service.max_model_len,
            "permission": [],
        }

    @get("/v1/models")
    async def models():
        return json_response({"object": "list", "data": [card(name) for name in service.names]})

    @get("/v1/models/{name:path}")
    async def model(name: str):
        service.check_name(name)
        return json_response(card(name))

    @get("/health")
    @get("/ping")
    @app.post("/ping")
    async def health():
        if service.client.failure:
            return ApiError(503, service.client.failure, code="unavailable").response()
        return Response()

    @get("/version")
    async def version():
        return json_response({"version": metadata.version("headstart")})

    @get("/metrics")
    async def metrics():
        return Response(service.figures.page(), headers={"Content-Type": CONTENT_TYPE})
