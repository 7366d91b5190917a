"""The server of `co2sim explore`: who may ask, what may be read, and exact answers."""

import errno
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from html_pages import policy_of
from places import ROOT

pytest.importorskip("altair", reason="the extra `report` is not installed")
pytest.importorskip("vl_convert", reason="the extra `report` is not installed")
pytest.importorskip("httpx2", reason="httpx2 is not installed")
pytest.importorskip("pebble", reason="the extra `explore` is not installed")
pytest.importorskip("starlette", reason="the extra `explore` is not installed")
pytest.importorskip("uvicorn", reason="the extra `explore` is not installed")

import psutil
from starlette.testclient import TestClient

from co2sim import simulate
from co2sim.prediction.driver import make_case, run
from co2sim.prediction.goodput import goodput_of
from co2sim.prediction.step_factors import NO_GOAL
from co2sim.report.explore import asking
from co2sim.report.explore.asking import Files, PageView
from co2sim.report.explore.server import HEADER, HEADERS, Answers, application
from co2sim.training.memory import GIB

TOKEN = "a-token"  # noqa: S105 - of this test
ADDRESS = "http://127.0.0.1"
VIEW = {
    "cluster": "cloud-100g",
    "model": "gpt2-small",
    "strategies": ["ddp", "co2:tau=12,delay=1,worker=node"],
    "gpus": 16,
}
CLUSTERS = Path("co2sim/catalog/clusters")
ASKING = ("begin", "check", "figures", "commands", "report", "upload")


@contextmanager
def serving(folder: Path, **changes: Any) -> Iterator[TestClient]:
    """A client of a server in this process, which sends the token."""
    limit = changes.pop("limit", 60.0)
    files = Files(clusters={}, models={}, **changes)
    answers = Answers(files, NO_GOAL, folder, limit)
    app = application(answers, PageView.model_validate(VIEW), TOKEN)
    try:
        with TestClient(app, base_url=ADDRESS, headers={HEADER: TOKEN}) as client:
            yield client
    finally:
        answers.close()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A server for all tests that leave it as it was."""
    with serving(tmp_path_factory.mktemp("files")) as made:
        yield made


def error(answer: Any) -> str:
    """The words of an answer that refuses; they are one line."""
    assert answer.status_code == 422, answer.text
    words = str(answer.json()["error"])
    assert "\n" not in words
    return words


@pytest.mark.slow
def test_a_server_whose_processes_were_killed_goes_on(tmp_path: Path) -> None:
    """Idle ones are replaced; who waits for one that is at work gets a line."""
    before = set(psutil.Process().children())
    with serving(tmp_path, limit=1.0) as client:
        _until_answered(lambda: client.post("/check", json=VIEW))
        simulating = set(psutil.Process().children()) - before
        assert simulating
        for process in simulating:
            process.kill()
        psutil.wait_procs(simulating, 10)
        _until_answered(lambda: client.post("/check", json=VIEW))


def _until_answered(ask: Callable[[], Any]) -> None:
    for _ in range(30):
        answer = ask()
        if answer.status_code == 200:
            return
        assert error(answer)
    pytest.fail("30 times there was no answer")


# ---- who may ask


def test_the_page_needs_the_token_and_brings_it(client: TestClient) -> None:
    """In the address, as it is printed; not in a header, which a browser's address line lacks."""
    assert client.get(f"/?token={TOKEN}").status_code == 200
    for query in (
        "",
        "?token=",
        "?token=a-toke",
        f"?token={TOKEN}x",
        f"?Token={TOKEN}",
        "?token=ü",
    ):
        answer = client.get(f"/{query}")
        assert answer.status_code == 403
        assert "open the address that" in answer.text
        assert TOKEN not in answer.text


def test_every_question_needs_the_token_in_a_header(client: TestClient) -> None:
    """A form of another site can send a query and a body, but no such header."""
    for name in ASKING:
        for token in (b"", b"wrong", b"\xfc"):
            answer = client.post(f"/{name}", json=VIEW, headers={HEADER: token})  # type: ignore[dict-item]
            assert answer.status_code == 403, (name, token)
        query = client.post(f"/{name}?token={TOKEN}", json=VIEW, headers={HEADER: ""})
        assert query.status_code == 403, name


def test_other_sites_are_refused(client: TestClient) -> None:
    """A name that is bound to this machine, another origin, another port: with the token, too."""
    for name, texts in {
        "host": (
            *("evil.example", "127.0.0.1.evil.example", "evil.example:80", "192.0.2.1", ""),
            "localhost.evil.example:8000",
        ),
        "origin": ("http://evil.example", "https://127.0.0.1", "http://127.0.0.1:1", "null"),
        "sec-fetch-site": ("cross-site", "same-site"),
    }.items():
        for text in texts:
            headers = {name: text}
            assert client.get(f"/?token={TOKEN}", headers=headers).status_code == 403, headers
            assert client.post("/begin", json=VIEW, headers=headers).status_code == 403, headers


def test_a_body_above_a_megabyte_is_refused(client: TestClient) -> None:
    """Whatever it says about its length, before it is read whole."""
    large = b" " * 1_000_001
    assert client.post("/begin", content=large).status_code == 413
    answer = client.post("/upload", content=large)
    assert answer.status_code == 413
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_headers_and_the_policy_of_the_page(client: TestClient) -> None:
    """Each script is named by its hash; nothing else runs, and nothing but the server is asked."""
    answer = client.get(f"/?token={TOKEN}")
    for given in (answer, client.get("/"), client.post("/check", json=VIEW)):
        assert {name: given.headers.get(name) for name in HEADERS} == HEADERS
        assert "access-control-allow-origin" not in given.headers
        assert "server" not in given.headers
    policy = answer.headers["content-security-policy"]
    inside, hashes = policy_of(answer.text)
    assert inside in policy
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    assert len(hashes) == 3
    assert rules["script-src"].split() == hashes
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"


# ---- what is asked


def test_what_is_no_question_is_refused_in_a_line(client: TestClient) -> None:
    """Broken JSON, unknown fields, wrong kinds, what is too long."""
    for body, words in (
        ("", "JSON"),
        ("{", "JSON"),
        ("[1]", "object"),
        ("[" * 100_000, "JSON"),
        (json.dumps({**VIEW, "nonsense": 1}), "nonsense"),
        (json.dumps({**VIEW, "cluster": None}), "cluster"),
        (json.dumps({**VIEW, "model": "x" * 2000}), "model"),
        (json.dumps({**VIEW, "strategies": ["ddp"] * 1000}), "strategies"),
        (json.dumps({"cluster": "cloud-100g"}), "model"),
    ):
        for name in ("begin", "check"):
            assert words in error(client.post(f"/{name}", content=body)), body[:100]


def test_wrong_words_are_answered_as_on_the_command_line(client: TestClient) -> None:
    """The same functions read them: units are checked, and the nearest name is said."""
    for changes, words in (
        ({"cluster": "cloud-100"}, "'cloud-100g'"),
        ({"strategies": ["zer03"]}, "'zero3'"),
        ({"strategies": []}, "0 strategies"),
        ({"strategies": ["ddp", "ddp"]}, "twice"),
        ({"strategies": [f"co2.published:tau={i}" for i in range(1, 14)]}, "1 to 12"),
        ({"set": {"inter.bandwidth": "25"}}, "no unit"),
        ({"options": {"recompute": "all"}}, "recompute"),
        ({"options": {"cluster": "cloud-25g"}}, "'cluster'"),
        ({"gpus": 12}, "12 GPUs"),
        ({"tokens": 0}, "tokens is 0"),
    ):
        for name in ("check", "begin"):
            assert words in error(client.post(f"/{name}", json={**VIEW, **changes})), changes


# ---- what may be read


def test_only_the_catalog_is_read(client: TestClient) -> None:
    """A path is an unknown name, wherever it stands, whether there is such a file or not."""
    for name in (
        *("/etc/passwd", "../x.toml", "./cloud-100g.toml", "..", "", "cloud-100g/../cloud-25g"),
        *("co2sim/catalog/clusters/cloud-25g.toml", "cloud-100g\0"),
    ):
        for changes in ({"cluster": name}, {"model": name}):
            kind = next(iter(changes))
            said = error(client.post("/begin", json={**VIEW, **changes}))
            assert f"unknown {kind} {name!r}" in said
        for path in ("gpu", "failures"):
            changed = {**VIEW, "set": {path: name}}
            assert f"unknown {path} {name!r}" in error(client.post("/begin", json=changed))
        for path in ("cluster", "model", "strategy"):
            changed = {**VIEW, "set": {path: name}}
            assert error(client.post("/begin", json=changed)).startswith(
                f"{path} has its own field"
            )
            for asked in ("figures", "commands", "report"):
                body = {"view": VIEW, "settings": [{path: name}]}
                assert error(client.post(f"/{asked}", json=body)).startswith(
                    f"{path} has its own field"
                )


def upload(client: TestClient, name: str, text: str, kind: str = "cluster") -> Any:
    """The answer to a file."""
    return client.post("/upload", json={"kind": kind, "name": name, "text": text})


OWN = (CLUSTERS / "cloud-25g.toml").read_text("utf-8")


def test_a_file_of_the_users_can_be_asked_about(tmp_path: Path) -> None:
    """It answers as the command line does about the same file, also when it is given anew."""
    with serving(tmp_path) as client:
        assert upload(client, "mine.toml", OWN).json() == {"name": "mine.toml"}
        view = {**VIEW, "cluster": "mine.toml"}
        first = client.post("/figures", json={"view": view, "settings": [{}]}).json()
        expected = simulate("cloud-25g", "gpt2-small", "ddp", gpus=16)
        assert first[0][0]["tokens_per_s"] == expected.tokens_per_s
        faster = OWN.replace('bandwidth = "25 Gbit/s"', 'bandwidth = "50 Gbit/s"')
        assert faster != OWN
        upload(client, "mine.toml", faster)
        second = client.post("/figures", json={"view": view, "settings": [{}]}).json()
        assert second[0][0]["tokens_per_s"] > first[0][0]["tokens_per_s"]


def test_an_upload_stays_in_its_folder(tmp_path: Path) -> None:
    """Only the last part of a path is a name."""
    folder = tmp_path / "files"
    folder.mkdir()
    with serving(folder) as client:
        for name in ("../x.toml", "/etc/x.toml", "a/b/../../../x.toml", "x/../y.toml"):
            assert upload(client, name, OWN).json() == {"name": Path(name).name}
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in found} == {"x.toml", "y.toml"}
    assert all(folder in path.parents for path in found)


def test_what_cannot_be_written_is_refused_without_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, for instance."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x.toml"))

    with serving(tmp_path) as client:
        monkeypatch.setattr(Path, "write_text", full)
        said = error(upload(client, "x.toml", OWN))
    assert "no space left" in said
    assert str(tmp_path) not in said


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """By its name, not by the path where it was put; a file may not name files of this machine."""
    gpu = "(?m)^gpu = .*$"
    files = {
        "": "empty",
        "nodes = ": "x.toml",
        "\0": "x.toml",
        "[[[[": "x.toml",
        "a = 1": "x.toml",
        re.sub(gpu, 'gpu = "/etc/passwd"', OWN): "'/etc/passwd'",
        re.sub(gpu, 'gpu = "../secret.toml"', OWN): "'../secret.toml'",
        re.sub(gpu, 'gpu = { value = "/etc/passwd", source = "x" }', OWN): "'/etc/passwd'",
        'failures = "./secret.toml"\n' + OWN: "'./secret.toml'",
    }
    with serving(tmp_path) as client:
        for text, words in files.items():
            said = error(upload(client, "x.toml", text))
            assert words in said
            assert str(tmp_path) not in said
            assert "root:" not in said
    assert list(tmp_path.rglob("*.toml")) == []


def test_files_do_not_pile_up(tmp_path: Path) -> None:
    """Fifty of a kind; each of them may still be changed."""
    model = Path("co2sim/catalog/models/gpt2-small.toml").read_text("utf-8")
    with serving(tmp_path) as client:
        for place in range(50):
            assert upload(client, f"m{place}.toml", model, "model").status_code == 200
        assert "50 files" in error(upload(client, "more.toml", model, "model"))
        assert upload(client, "m0.toml", model, "model").status_code == 200


# ---- answers


def test_figures_are_the_simulators(client: TestClient) -> None:
    """To the last digit, at every position that is asked for, in their order."""
    view = {**VIEW, "set": {"failures": "meta-rsc-1"}, "options": {"micro_batch": "2"}}
    settings = [
        {},
        {"gpus": "8"},
        {"inter.bandwidth": "25 Gbit/s", "strategy.tau": "4"},
        {"failures.node": "30 days"},
    ]
    answer = client.post("/figures", json={"view": view, "settings": settings})
    assert answer.status_code == 200
    for one, found in zip(settings, answer.json(), strict=True):
        tau = one.get("strategy.tau", "12")
        for strategy, shown in zip(
            ("ddp", f"co2:tau={tau},delay=1,worker=node"), found, strict=True
        ):
            overrides = {path: text for path, text in one.items() if path.startswith(("in", "fa"))}
            options = {"gpus": int(one.get("gpus", 16)), "micro_batch": 2}
            options |= {"overrides": {"failures": "meta-rsc-1", **overrides}}
            case = make_case("cloud-100g", "gpt2-small", strategy, **options)
            result = run(case)
            kept = goodput_of(result, *(entry.value for entry in case.load()))
            assert shown["tokens_per_s"] == result.tokens_per_s
            assert shown["exposed"] == result.exposed_share
            assert shown["memory"] == result.memory_bytes_per_gpu["total"] / GIB
            assert shown["fits"] == result.fits_in_memory
            assert shown["memory_fit"] == result.memory_word
            assert shown["memory_low"] == result.memory_bytes_low / GIB
            assert shown["memory_high"] == result.memory_bytes_high / GIB
            assert shown["lost"] == 1 - kept.useful


@pytest.mark.slow
def test_what_takes_too_long_ends_and_the_server_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a line that says where to ask; the next question has its answer."""
    real = asking.Asker.check

    def check(self: asking.Asker, view: PageView) -> None:
        if view.model == "llama-7b":
            Event().wait()
        real(self, view)

    monkeypatch.setattr(asking.Asker, "check", check)
    with serving(tmp_path, limit=1.0) as client:
        said = error(client.post("/check", json={**VIEW, "model": "llama-7b"}))
        assert "1 s" in said
        assert "`co2sim run`" in said
        assert client.post("/check", json=VIEW).status_code == 200


@pytest.mark.slow
def test_what_fails_in_the_simulator_is_a_line_and_a_traceback_for_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page gets one line; the error goes on to uvicorn, which writes where it came from."""

    def wrong(_: asking.Asker, view: PageView) -> None:
        if view.model == "llama-7b":
            os._exit(1)
        raise KeyError("two\nlines")

    monkeypatch.setattr(asking.Asker, "check", wrong)
    with serving(tmp_path) as client:
        with pytest.raises(KeyError) as raised:
            client.post("/check", json=VIEW)
        assert "in wrong" in str(raised.value.__cause__)
        headers = {HEADER: TOKEN}
        quiet = TestClient(client.app, ADDRESS, raise_server_exceptions=False, headers=headers)
        answer = quiet.post("/check", json=VIEW)
        assert answer.status_code == 500
        said = answer.json()["error"]
        assert "KeyError" in said
        assert "\n" not in said
        assert "killed" in error(client.post("/check", json={**VIEW, "model": "llama-7b"}))


# ---- the process


class Served:
    """A real server, and how it ended."""

    def __init__(self, folder: Path, *more: str, gpus: int = 8) -> None:
        root = str(ROOT)
        given = f"explore -c cloud-100g -m gpt2-small -s ddp -g {gpus}".split()
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "co2sim", *given, *more],
            cwd=root,
            env={**os.environ, "PYTHONPATH": root, "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        first = self.process.stdout.readline()
        assert first.startswith("open http://127.0.0.1:"), first
        self.address = first.split()[1]
        self.port = urlsplit(self.address).port or 0
        self.token = parse_qs(urlsplit(self.address).query)["token"][0]

    def post(self, name: str, body: object, timeout: float = 600.0) -> tuple[int, Any]:
        """The answer to a question."""
        asking = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        asking.request("POST", f"/{name}", json.dumps(body), {HEADER: self.token})
        answer = asking.getresponse()
        found = answer.status, json.loads(answer.read())
        asking.close()
        return found

    def end(self, by: signal.Signals = signal.SIGINT) -> int:
        """The exit code; nothing of it may be left."""
        workers = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(by)
        self.process.communicate(timeout=600)
        assert not any(one.is_running() and one.status() != "zombie" for one in workers)
        assert list(self.folder.iterdir()) == []
        return self.process.returncode


@pytest.mark.slow
@pytest.mark.parametrize(
    "by",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param(signal.SIGHUP, marks=pytest.mark.nightly),
    ],
)
def test_a_real_server_answers_and_ends_without_a_trace(tmp_path: Path, by: signal.Signals) -> None:
    """On loopback only; it ends as every command does, and leaves no process and no folder."""
    server = Served(tmp_path)
    assert len(server.token) >= 32
    found = psutil.Process(server.process.pid).net_connections(kind="inet")
    assert {one.laddr for one in found if one.status == "LISTEN"} == {("127.0.0.1", server.port)}
    status, figures = server.post("figures", {"view": {**VIEW, "gpus": 8}, "settings": [{}]})
    assert status == 200
    expected = simulate("cloud-100g", "gpt2-small", "ddp", gpus=8)
    assert figures[0][0]["tokens_per_s"] == expected.tokens_per_s
    status, made = server.post("upload", {"kind": "cluster", "name": "x.toml", "text": OWN})
    assert (status, made) == (200, {"name": "x.toml"})
    assert list(tmp_path.rglob("x.toml"))
    assert server.end(by) == (143 if by == signal.SIGTERM else 130)
