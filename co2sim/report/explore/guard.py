"""Who may ask: only the page that this server gave out, in a browser on this machine."""

import secrets
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER: Final = "x-co2sim-token"
HOSTS: Final = ("127.0.0.1", "localhost")
_MOST_BYTES: Final = 1_000_000
"""Of a request."""

HEADERS: Final = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Guard:
    """Refuses requests without the token, from other origins, and large ones.

    The page is asked for with `?token=`; all else with a header, which no other site can send.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        refused = self._refused(request)
        answer = refused or self.app
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > _MOST_BYTES:
                raise TooLargeError
            return message

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), text.encode()) for name, text in HEADERS.items()]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        try:
            await answer(scope, counted, headed)
        except TooLargeError:
            large = PlainTextResponse(f"more than {_MOST_BYTES // 1000} kB", 413)
            await large(scope, receive, headed)

    def _refused(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if host.rpartition(":")[0] not in HOSTS and host not in HOSTS:
            return PlainTextResponse("this server answers to 127.0.0.1 and localhost only", 403)
        origin = request.headers.get("origin")
        strange = origin is not None and origin != f"http://{host}"
        if strange or request.headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
            return PlainTextResponse("this server answers its own page only", 403)
        given = request.query_params if request.method == "GET" else request.headers
        token = given.get("token" if request.method == "GET" else HEADER, "")
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            text = "the token is missing or wrong; open the address that `co2sim explore` printed"
            return PlainTextResponse(text, 403)
        return None


class TooLargeError(Exception):
    """A request that is larger than any that the page sends."""
