"""The server of `co2sim explore`, on this machine only: the page, and exact answers."""

import asyncio
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLateError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import uvicorn
from pebble import ProcessExpired, ProcessPool
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from co2sim.common.errors import Co2simError, OptionError, ResourceError, given
from co2sim.common.resources import share_memory
from co2sim.common.units import Seconds
from co2sim.prediction.step_factors import Goal
from co2sim.report.explore.asking import Asker, Files, PageView, Place, Positions, Text, catalog
from co2sim.report.explore.page import server_page

_NAME = re.compile(r"[\w][\w .()+-]{0,99}\.(toml|json)")
_MAX_BYTES = 255
"""Of a name in UTF-8, on nearly all file systems."""


class Upload(BaseModel):
    """A file of a user: a cluster or a model, as TOML, or the config.json of a model."""

    model_config = ConfigDict(extra="forbid")

    kind: Text
    name: Text
    text: str


def checked_name(upload: Upload) -> str:
    """The name of the file, without folders. Raises OptionError if it or the kind is none."""
    name = Path(upload.name).name
    if not _NAME.fullmatch(name):
        raise OptionError(f"{given(name)} is no name for a file; it must end in .toml or .json")
    size = len(name.encode())
    if size > _MAX_BYTES:
        raise OptionError(f"{given(name)} has {size} bytes; at most {_MAX_BYTES} are allowed")
    if upload.kind not in {"cluster", "model"}:
        raise OptionError(f"kind is {given(upload.kind)}; it must be cluster or model")
    return name


def kept(upload: Upload, name: str, folder: Path) -> Path:
    """Write the file below `folder`, which is new. Raises OptionError, without paths."""
    path = folder / Path(name).stem / name  # config.json has no name of its own
    try:
        path.parent.mkdir(parents=True)
        path.write_text(upload.text, "utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OptionError(f"{given(name)} cannot be kept: {reason.lower()}") from None
    return path


HOST = "127.0.0.1"
LIMIT: Seconds = 20.0
"""What an answer may take: a page that stands still for longer is of no use."""
_PATIENCE = 2
"""Times the limit that an answer may take with the time until it is begun."""
_PROCESSES = 2
_LONGEST = 300
"""Characters of an error."""
_ENDED = "the server is ending"
_MAX_FILES = 50


class Answers:
    """What the server knows: files, and processes that simulate."""

    def __init__(self, files: Files, goal: Goal, folder: Path, limit: Seconds = LIMIT) -> None:
        self.files, self.goal, self.folder, self.limit = files, goal, folder, limit
        self.pool = _pool()
        self.asked: set[Future[Any]] = set()
        self.uploads = 0
        self.ended = False

    async def ask(self, what: str, *arguments: Any) -> Any:
        """The answer of a method of `Asker`. Raises Co2simError, also where it takes too long."""
        if self.ended:
            raise OptionError(_ENDED)
        if not self.pool.active:  # Pebble gives up a pool when a process is killed that is idle
            self._renew()
        began = time.monotonic()
        future = self.pool.schedule(
            _answer, args=[self.files, self.goal, what, *arguments], timeout=self.limit
        )
        self.asked.add(future)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), _PATIENCE * self.limit)
        except asyncio.CancelledError:
            if not self.ended:
                raise
            raise OptionError(_ENDED) from None
        except (ProcessExpired, BrokenProcessPool):
            raise ResourceError("its process was killed, perhaps for want of memory") from None
        except TooLateError:
            if time.monotonic() - began >= _PATIENCE * self.limit:  # one was killed with a lock
                self._renew()
            raise OptionError(
                f"this takes longer than {self.limit:g} s; ask `co2sim run` on the command line"
            ) from None
        finally:
            self.asked.discard(future)

    def _renew(self) -> None:
        """Begin with other processes."""
        self.pool.stop()  # type: ignore[no-untyped-call]
        self.pool.join()
        self.pool = _pool()

    async def figures(self, view: PageView, settings: Sequence[Mapping[str, str]]) -> list[Any]:
        """Those of `Asker`, shared out: a single position by its strategies, else by positions."""
        places = range(len(view.strategies))
        alone = len(settings) == 1
        parts = await asyncio.gather(
            *(
                self.ask("figures", view, settings, places[part::_PROCESSES])
                if alone
                else self.ask("figures", view, settings[part::_PROCESSES], places)
                for part in range(_PROCESSES)
            )
        )
        if alone:
            return [[parts[index % _PROCESSES][0][index // _PROCESSES] for index in places]]
        return [parts[turn % _PROCESSES][turn // _PROCESSES] for turn in range(len(settings))]

    async def add(self, upload: Upload) -> str:
        """Keep a file, if a process can read it in time; its name. Raises Co2simError."""
        name = checked_name(upload)
        self._check_room(upload.kind, name)
        self.uploads += 1  # a path of its own: nothing that was read before is taken for it
        path = kept(upload, name, self.folder / f"{self.uploads}")
        try:
            await self.ask("check_file", upload.kind, str(path))
            changed = {**self._check_room(upload.kind, name), name: str(path)}
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, Co2simError):
                raise OptionError(str(error).replace(str(path), name)) from None
            raise
        if upload.kind == "cluster":
            self.files = replace(self.files, clusters=changed)
        else:
            self.files = replace(self.files, models=changed)
        return name

    def _check_room(self, kind: str, name: str) -> Mapping[str, str]:
        """The files of a kind. Raises OptionError if there are too many for one more."""
        files: Mapping[str, str] = getattr(self.files, f"{kind}s")
        if len(files) >= _MAX_FILES and name not in files:
            raise OptionError(f"there are {_MAX_FILES} files already; start again for more")
        return files

    def warm(self, view: PageView) -> None:
        """Let every process read and simulate what the page begins with, before it asks."""
        places = range(len(view.strategies))
        for _ in range(_PROCESSES):
            arguments: list[Any] = [self.files, self.goal, "figures", view, [{}], places]
            self.pool.schedule(_answer, args=arguments)

    def close(self) -> None:
        """End the processes, whatever they do, and all answers that are waited for."""
        self.ended = True
        for future in list(self.asked):
            future.cancel()
        self.pool.stop()  # type: ignore[no-untyped-call]
        self.pool.join()


class _Server(uvicorn.Server):
    """One that ends its processes first, so that no answer is waited for."""

    def __init__(self, config: uvicorn.Config, answers: Answers) -> None:
        super().__init__(config)
        self.answers = answers

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End."""
        await asyncio.to_thread(self.answers.close)
        await super().shutdown(sockets)


def _pool() -> ProcessPool:
    return ProcessPool(max_workers=_PROCESSES, initializer=share_memory, initargs=[_PROCESSES])


_askers: dict[str, Asker] = {}


def _answer(files: Files, goal: Goal, what: str, *arguments: Any) -> Any:
    """In a process: the asker is kept as long as the files are the same."""
    key = repr(files)
    if key not in _askers:
        _askers.clear()
        _askers[key] = Asker(files, goal)
    return getattr(_askers[key], what)(*arguments)


def application(answers: Answers, view: PageView, token: str) -> Starlette:
    """The server: `view` is what its page begins with."""

    async def page(_: Request) -> Response:
        listed_now = catalog()
        files_of = {"clusters": answers.files.clusters, "models": answers.files.models}
        listed = {kind: _with_files(files, listed_now[kind]) for kind, files in files_of.items()}
        return HTMLResponse(*server_page(view.model_dump(), listed_now | listed, token))

    async def begin(request: Request) -> Response:
        return JSONResponse(await answers.ask("begin", await _read(request, PageView)))

    async def check(request: Request) -> Response:
        await answers.ask("check", await _read(request, PageView))
        return JSONResponse({})

    async def figures(request: Request) -> Response:
        question = await _read(request, Positions)
        return JSONResponse(await answers.figures(question.view, question.settings))

    async def fitting(request: Request) -> Response:
        question = await _read(request, Place)
        return JSONResponse(
            await answers.ask("fitting", question.view, question.settings, question.place)
        )

    async def commands(request: Request) -> Response:
        question = await _read(request, Positions)
        return JSONResponse(await answers.ask("commands", question.view, question.settings[0]))

    async def report(request: Request) -> Response:
        question = await _read(request, Positions)
        return HTMLResponse(await answers.ask("report", question.view, question.settings[0]))

    async def upload(request: Request) -> Response:
        return JSONResponse({"name": await answers.add(await _read(request, Upload))})

    asking = (begin, check, figures, fitting, commands, report, upload)
    made = Starlette(
        routes=[
            Route("/", page),
            *(Route(f"/{handler.__name__}", handler, methods=["POST"]) for handler in asking),
        ],
        exception_handlers={
            Co2simError: _refused,
            ValidationError: _unreadable,
            Exception: _unexpected,
        },
    )
    made.add_middleware(Guard, token=token)
    return made


def _with_files(files: Iterable[str], listed: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names of the user's files first, then those of the catalog, with what they are."""
    return [*((name, "a file") for name in files if name not in dict(listed)), *listed]


async def _read(request: Request, kind: type[Any]) -> Any:
    return kind.model_validate_json(await request.body())


async def _refused(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": " ".join(str(error).split())}, 422)


async def _unreadable(_: Request, error: Exception) -> Response:
    assert isinstance(error, ValidationError)
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return JSONResponse({"error": f"{where or 'the request'}: {first['msg']}"}, 422)


async def _unexpected(_: Request, error: Exception) -> Response:
    """What is no fault of the user: a line; uvicorn writes the traceback to the terminal."""
    what = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
    text = f"co2sim itself failed ({what}); the server's terminal says where"
    return JSONResponse({"error": text}, 500)


def serve(
    files: Files, goal: Goal, view: PageView, token: str, port: int, say: Callable[[str], None]
) -> None:
    """Serve until control-C, or until the terminal closes.

    Raises OptionError for a port that is taken.
    """
    try:
        bound = socket.create_server((HOST, port))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OptionError(f"--port {port}: {reason}; 0 takes any that is free") from None
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # ended so, it tidies up as well
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    with bound, TemporaryDirectory(prefix="co2sim-") as folder:
        answers = Answers(files, goal, Path(folder))
        try:
            answers.warm(view)
            app = application(answers, view, token)
            config = uvicorn.Config(
                app,
                lifespan="off",
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=1,
            )
            address = f"http://{HOST}:{bound.getsockname()[1]}/?token={token}"
            say(f"open {address}\ncontrol-C ends it")
            _Server(config, answers).run(sockets=[bound])
        finally:
            answers.close()


HEADER: Final = "x-co2sim-token"
HOSTS: Final = ("127.0.0.1", "localhost")
_MAX_REQUEST_BYTES: Final = 1_000_000
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
            if seen > _MAX_REQUEST_BYTES:
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
            large = PlainTextResponse(f"more than {_MAX_REQUEST_BYTES // 1000} kB", 413)
            await large(scope, receive, headed)

    def _refused(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if host.rpartition(":")[0] not in HOSTS and host not in HOSTS:
            return PlainTextResponse("this server answers to 127.0.0.1 and localhost only", 403)
        origin = request.headers.get("origin")
        strange = origin is not None and origin != f"http://{host}"
        if strange or request.headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
            return PlainTextResponse("this server answers its own page only", 403)
        fields = request.query_params if request.method == "GET" else request.headers
        token = fields.get("token" if request.method == "GET" else HEADER, "")
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            text = "the token is missing or wrong; open the address that `co2sim explore` printed"
            return PlainTextResponse(text, 403)
        return None


class TooLargeError(Exception):
    """A request that is larger than any that the page sends."""
