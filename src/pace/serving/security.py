"""Who may ask: a browser on this machine that was given the address with its token, and no page from elsewhere.

A page of another site can make a browser send requests to 127.0.0.1. It does not know the token, the `Origin` that the browser
tells is its own, and a name of its own that leads here is told by `Host`.
"""

from __future__ import annotations

import secrets
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def refusal(line: str, status: int) -> JSONResponse:
    return JSONResponse({"error": line}, status)


class Guard:
    """Lets through what comes with the token, from the page itself; the application sees paths without the token."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        refused = self._refused(scope)
        if refused is None:
            path = scope["path"][len(self._token) + 1 :]
            await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, guarded)
        else:
            await refused(scope, receive, guarded)

    def _refused(self, scope: Scope) -> JSONResponse | None:
        headers: dict[str, Any] = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if headers.get("host") not in self._hosts:
            return refusal("this is not the address that pace serve printed", 403)
        token = scope["path"][1 : len(self._token) + 2]
        if not secrets.compare_digest(token.encode(), f"{self._token}/".encode()):
            return refusal("open the address that pace serve printed, with all that stands in it", 404)
        origin = headers.get("origin")
        changes = scope["method"] not in ("GET", "HEAD")
        if (origin is None and changes) or (origin is not None and origin.removeprefix("http://") not in self._hosts):
            return refusal("only the page itself may ask for this", 403)
        return None
