"""The server: a page, pictures to explain, and concepts to take away. One thread does the model's work, the rest waits."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pace.files import expect
from pace.serving.security import Guard, refusal
from pace.serving.session import LARGEST, Refused, Session

_WAITING = 32  # requests; more are refused
_LARGEST_JSON = 64 << 10  # bytes
_BACKLOG = 1024  # connections that the system keeps until they are answered
_PATIENCE = 1  # seconds that requests have to end after Ctrl-C


class Queue:
    """Tasks, one at a time in the order they came, in a thread of their own."""

    def __init__(self) -> None:
        self._worker, self._waiting = ThreadPoolExecutor(1, "pace-model"), 0

    @contextmanager
    def place(self) -> Iterator[Callable[..., Awaitable[Any]]]:
        """A place in the queue, taken before a picture is received: so many are in memory at most."""
        if self._waiting >= _WAITING:
            raise Refused(f"{_WAITING} requests are waiting already; try again in a moment", 503)
        self._waiting += 1
        try:
            yield partial(asyncio.get_running_loop().run_in_executor, self._worker)
        except asyncio.CancelledError:  # by Ctrl-C; what has not begun is then not done
            raise Refused("pace serve was ended", 503) from None
        finally:
            self._waiting -= 1


def application(session: Session, token: str, port: int) -> Guard:
    queue = Queue()

    async def page(request: Request) -> Response:
        with queue.place() as run:
            return Response(await run(session.page), media_type="text/html; charset=utf-8")

    async def add(request: Request) -> Response:
        with queue.place() as run:
            file = await _body(request, LARGEST)
            return JSONResponse(await run(session.add, request.query_params.get("name", ""), file))

    def question(task: Callable[..., Any], pattern: dict[str, Any]) -> Route:
        """`task` is given what the JSON that is asked with has."""

        async def answer(request: Request) -> Response:
            with queue.place() as run:
                asked = await _asked(request, pattern)
                made = request.headers.get("revision", str(session.revision))
                return JSONResponse(await run(partial(answered, made, task, {name: asked[name] for name in pattern})))

        return Route(f"/{task.__name__}", answer, methods=["POST"])

    def answered(made: str, task: Callable[..., Any], asked: dict[str, Any]) -> dict[str, Any]:
        """`made` is the revision of the page that asks: its concepts may not be those of now."""
        found: dict[str, Any] = task(**asked) if made == str(session.revision) else {"outdated": True}
        return found

    def current() -> dict[str, Any]:
        return {}

    routes = [
        Route("/", page),
        Route("/add", add, methods=["POST"]),
        question(session.without, {"picture": int, "concepts": [int], "compare": bool}),
        question(current, {}),
        question(session.change, {"do": str, "what": [int | str], "name": str}),
    ]
    handlers = {Refused: _said, HTTPException: _said_by_http, ClientDisconnect: _gone, Exception: _unexpected}
    app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
    app.router.redirect_slashes = False
    return Guard(app, token, port)


async def _body(request: Request, most: int) -> bytes:
    """All of it, or a refusal as soon as it is too long, whatever its header says."""
    too_long = Refused(f"too large: more than {most / 1e6:.3g} MB", 413)
    length = request.headers.get("content-length", "0")
    if not length.isdigit() or int(length) > most:
        raise too_long
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise too_long
    return bytes(body)


async def _asked(request: Request, pattern: dict[str, Any]) -> dict[str, Any]:
    try:
        asked: dict[str, Any] = json.loads(await _body(request, _LARGEST_JSON))
        expect(asked, pattern, "request")
    except Refused:
        raise
    except (ValueError, RecursionError) as error:
        raise Refused(f"this cannot be understood: expected JSON with {', '.join(pattern)}") from error
    return asked


async def _said(request: Request, error: Refused) -> Response:
    return refusal(str(error), error.status)


async def _said_by_http(request: Request, error: HTTPException) -> Response:
    return refusal(error.detail, error.status_code)


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=400)


async def _unexpected(request: Request, error: Exception) -> Response:
    return refusal("something unexpected happened; the terminal of pace serve says what", 500)


def server_of(session: Session, token: str, port: int) -> uvicorn.Server:
    how: dict[str, Any] = {
        "http": "h11",
        "ws": "none",
        "lifespan": "off",
        "proxy_headers": False,
        "server_header": False,
    }
    how |= {"access_log": False, "log_level": "error", "timeout_graceful_shutdown": _PATIENCE}
    return uvicorn.Server(uvicorn.Config(application(session, token, port), **how))


@contextmanager
def listening(port: int) -> Iterator[socket.socket]:
    """On this machine alone; port 0 is any free one."""
    with socket.socket() as listener:
        if (
            os.name == "posix"
        ):  # else a port that was in use a moment ago could not be used; elsewhere others could share it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(f"port {port} cannot be used ({error.strerror}); choose another one") from None
        listener.listen(_BACKLOG)
        yield listener


def serve(session: Session, listener: socket.socket, announce: Callable[[str], None]) -> None:
    """Answer at an address that `announce` is told, until Ctrl-C, which is passed on."""
    port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
    announce(f"http://127.0.0.1:{port}/{token}/")
    server_of(session, token, port).run(sockets=[listener])
