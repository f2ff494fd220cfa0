"""The server and those who mean it harm: other pages, other names for this machine, and files made to break it."""

import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from live_case import TOKEN, as_file

from pace.serving import application as serving
from pace.serving.session import LARGEST

PATHS = ("", "add?name=bird.png", "without", "change")


def everything(answer):
    return repr(answer.headers) + answer.body.decode(errors="replace")


def until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def bomb(width, height):
    """A PNG that says it has so many pixels."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(100_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_the_page_is_there_for_whoever_has_the_token(client):
    page = client.get()
    assert page.status == 200
    assert b"<title>Birds</title>" in page.body
    for name, value in {
        "content-security-policy": "frame-ancestors 'none'",
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-resource-policy": "same-origin",
    }.items():
        assert page.headers[name] == value
    assert "access-control-allow-origin" not in page.headers
    assert "server" not in page.headers


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "token", ["", "wrong", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper(), f"/{TOKEN}", f"x/../{TOKEN}", "ü%ff"]
)
def test_without_the_token_there_is_nothing(client, path, token):
    method = "GET" if path == "" else "POST"
    answer = client.ask(method, path, b"{}" if path else None, token=token.encode("ascii", "ignore").decode())
    assert answer.status == 404
    assert "open the address that pace serve printed" in answer.error
    assert TOKEN not in everything(answer)


def test_the_token_alone_without_its_slash_is_not_enough(client):
    assert client.ask("GET", token=f"{TOKEN}?").status == 404


@pytest.mark.parametrize(
    "host", [None, "evil.example", "127.0.0.1", "127.0.0.1:1", "0.0.0.0:{port}", "evil.example:{port}", "[::1]:{port}"]
)
def test_another_name_for_this_machine_is_refused(client, host):
    given = None if host is None else host.format(port=client.port)
    answer = client.get(Host=given)
    assert answer.status in (400, 403)  # HTTP itself wants a host
    assert b"<title>" not in answer.body
    localhost = f"localhost:{client.port}"
    assert client.get(Host=localhost, Origin=f"http://{localhost}").status == 200


@pytest.mark.parametrize(
    "origin",
    [
        None,
        "null",
        "https://evil.example",
        "http://127.0.0.1",
        "https://127.0.0.1:{port}",
        "http://evil.example:{port}",
    ],
)
def test_another_page_can_ask_for_nothing(client, origin):
    given = None if origin is None else origin.format(port=client.port)
    for path in PATHS[1:]:
        answer = client.post(path, b"{}", Origin=given)
        assert (answer.status, answer.error) == (403, "only the page itself may ask for this")
    if origin is not None:  # a browser sends none with what is typed into the address bar
        assert client.get(Origin=given).status == 403
    assert client.ask("OPTIONS", "add", Origin=given, **{"Access-Control-Request-Method": "POST"}).status == 403


@pytest.mark.parametrize(
    "path",
    [
        "../../etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "add/../../run.json",
        "static/live.js",
        "names.json",
        "%00",
        "./",
        "add/",
    ],
)
def test_no_path_leads_to_a_file(client, path):
    assert client.get(path).status in (404, 405)
    assert client.post(path, b"{}").status in (404, 405)


def test_wrong_methods_are_refused(client):
    for method in ("POST", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "PROPFIND"):
        assert client.ask(method).status == 405
    for path in PATHS[1:]:
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert client.ask(method, path).status == 405


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"picture": "0", "concepts": [], "compare": true}', b"[" * 60_000,
     b'{"picture": 0, "concepts": [1.5], "compare": false}', b'{"picture": 0, "concepts": [0]}',
     b'{"picture": NaN, "concepts": [0], "compare": false}', b'{"picture": {"$gt": ""}, "concepts": {}, "compare": 1}'],
    ids=range(11),
)  # fmt: skip
def test_json_that_is_none_or_something_else_is_refused(client, body):
    for path, names in (("without", "picture, concepts, compare"), ("change", "do, what, name")):
        answer = client.post(path, body)
        assert (answer.status, answer.error) == (400, f"this cannot be understood: expected JSON with {names}")


def test_numbers_that_are_none_of_the_page_are_refused(client):
    for picture, concepts, status in (
        (0, [99], 400),
        (0, [-1], 400),
        (0, [10**30], 400),
        (99, [0], 404),
        (-1, [0], 404),
    ):
        asked = {"picture": picture, "concepts": concepts, "compare": False}
        answer = client.post("without", asked)
        assert (answer.status, bool(answer.error)) == (status, True)
    many = {"picture": 0, "concepts": [0] * 20_000, "compare": False}
    assert client.post("without", many).status == 200  # once is enough


def test_what_is_too_large_is_refused_whatever_its_header_says(client):
    assert client.post("add", bytes(10), **{"Content-Length": str(LARGEST + 1)}).status == 413
    assert client.post("without", b" " * 100_000).status == 413
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    body = chunk * (LARGEST // 0x10000 + 2) + b"0\r\n\r\n"
    try:
        answer = client.post("add", body, **{"Content-Length": None, "Transfer-Encoding": "chunked"})
    except (BrokenPipeError, ConnectionResetError):  # it was not read to its end
        pass
    else:
        assert answer.status == 413
    assert client.get().status == 200


@pytest.mark.filterwarnings("ignore:Image size")  # Pillow's own
def test_pictures_that_are_bombs_are_refused_and_the_page_goes_on(client):
    for width, height in ((100_000, 100_000), (2**31 - 1, 1), (12_000, 9_000), (1, 80_000)):
        answer = client.post("add?name=bomb.png", bomb(width, height))
        assert answer.status == 415
        assert answer.error.startswith("bomb.png: ")
    assert client.get().status == 200


def test_a_name_with_markup_or_a_path_is_a_name(client, birds):
    file = as_file(birds[0])
    found = client.post("add?name=..%2F..%2F%3Cscript%3Ealert(1)%3C%2Fscript%3E%0A%1b[31m.png", file)
    assert found.status == 200
    assert found.said["name"] == "script>\ufffd\ufffd[31m.png"
    assert found.headers["content-type"] == "application/json"
    assert client.post("add?name=" + "x" * 1000, file).said["name"] == "x" * 120
    assert client.post("add", file).said["name"] == "picture"
    page = client.get().body.decode()
    assert "<script>alert" not in page


def test_no_answer_names_a_folder_of_the_disk(client, run, birds):
    answers = [
        client.get(), client.post("add?name=a.png", as_file(birds[0])), client.post("add?name=a.png", b"no picture"),
        client.post("without", {"picture": 0, "concepts": [0], "compare": False}),
        client.post("change", {"do": "hide", "what": [1], "name": ""}), client.get("../run.json"),
        client.post("change", {"do": "undo", "what": [], "name": ""}),
        client.post("change", {"do": "undo", "what": [], "name": ""}),
    ]  # fmt: skip
    for answer in answers:
        assert str(run.parent) not in everything(answer)
        assert "site-packages" not in everything(answer)


def test_what_nobody_expected_is_said_in_a_line_and_the_server_goes_on(client, session, monkeypatch):
    monkeypatch.setattr(session, "_shown", lambda number: 1 / 0)
    answer = client.post("without", {"picture": 0, "concepts": [0], "compare": False})
    assert (answer.status, answer.error) == (500, "something unexpected happened; the terminal of pace serve says what")
    assert client.get().status == 200


def test_hundreds_of_requests_at_once_are_answered_or_told_to_wait(client, birds, monkeypatch):
    monkeypatch.setattr(serving, "_WAITING", 8)
    file = as_file(birds[0])

    def ask(number):
        if number % 3 == 0:
            return client.post(f"add?name={number}.png", file)
        if number % 3 == 1:
            return client.get()
        return client.post("without", {"picture": number % 12, "concepts": [number % 12], "compare": True})

    with ThreadPoolExecutor(60) as pool:
        answers = list(pool.map(ask, range(300)))
    assert {answer.status for answer in answers} == {200, 503}
    full = next(answer for answer in answers if answer.status == 503)
    assert full.error == "8 requests are waiting already; try again in a moment"
    numbers = [
        answer.said["number"] for number, answer in enumerate(answers) if number % 3 == 0 and answer.status == 200
    ]
    assert len(set(numbers)) == len(numbers)
    assert client.get().status == 200  # and nobody's place in the queue was lost
    assert client.post("add", file).status == 200


def test_who_hangs_up_while_sending_leaves_the_queue(client, birds, monkeypatch):
    monkeypatch.setattr(serving, "_WAITING", 1)
    head = f"POST /{TOKEN}/add HTTP/1.1\r\nHost: {client.host}\r\nOrigin: http://{client.host}\r\nContent-Length: 1000\r\n\r\n"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", client.port)) as half:
            half.sendall(head.encode() + bytes(10))
            until(lambda: client.get().status == 503)  # it has the only place
        until(lambda: client.get().status == 200)  # it is heard that it has gone
    assert client.post("add", as_file(birds[0])).status == 200


def test_one_thing_at_a_time_is_asked_of_the_session(client, session, monkeypatch):
    inside, most, lock = 0, 0, threading.Lock()
    real = session.page

    def page():
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.01)
        with lock:
            inside -= 1
        return real()

    monkeypatch.setattr(session, "page", page)
    with ThreadPoolExecutor(10) as pool:
        assert {answer.status for answer in pool.map(lambda _: client.get(), range(20))} == {200}
    assert most == 1
