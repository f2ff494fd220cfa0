"""What the tests of the live page share: a client that can be hostile, and pictures as files."""

import io
import json
import socket
import threading
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import NamedTuple

import numpy as np
from PIL import Image

from pace.images import ByName, Perturbation
from pace.observing.extract import observe_pair
from pace.serving.application import server_of

TOKEN = "token-of-the-tests"
HOSTILE = "<img src=x onerror=\"document.title='broken'\">"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def said(self):
        return json.loads(self.body)

    @property
    def error(self):
        """The one line that a refusal is."""
        assert self.status >= 400, self.body[:300]
        assert self.said.keys() == {"error"}
        assert "\n" not in self.said["error"]
        return self.said["error"]


class Client:
    """Requests as a page sends them, unless a test says otherwise; None leaves a header out."""

    def __init__(self, port):
        self.port, self.host = port, f"127.0.0.1:{port}"
        self.address = f"http://{self.host}/{TOKEN}/"

    def ask(self, method, path="", body=None, token=TOKEN, **headers):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest(method, f"/{token}/{path}", skip_host=True)
        given = {"Host": self.host, "Origin": f"http://{self.host}"} | headers
        if body is not None:
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
            given = {"Content-Length": str(len(body))} | given
        for name, value in given.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        found = Answer(answer.status, dict(answer.getheaders()), answer.read())
        connection.close()
        return found

    def get(self, path="", **how):
        return self.ask("GET", path, **how)

    def post(self, path, body=b"", **how):
        return self.ask("POST", path, body, **how)


@contextmanager
def served(session):
    """A client of a server that answers as long as this lasts."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.listen(512)
        server = server_of(session, TOKEN, port)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield Client(port)
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def seen_twice(explainer, images):
    """As they are, and perturbed."""
    perturb = ByName(Perturbation(), images.names)
    return observe_pair(explainer.backbone, images, perturb=perturb, progress=False)


def as_file(pixels, kind="PNG", **options):
    """A picture (3, h, w), or an array, as the bytes of a file."""
    array = pixels.permute(1, 2, 0).numpy() if hasattr(pixels, "permute") else np.asarray(pixels)
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind, **options)
    return file.getvalue()
