"""How long pace serve takes for a picture, and for concepts that are switched off, as a browser would see it.

    uv run python benchmarks/serving.py [--model vit_small_patch16_224] [--concepts 50] [--threads 2]

Weights are random: speed does not depend on them. The picture is a JPEG file of 12 million pixels, as phones make them. The
processor's time, of all threads together, says what a machine without other work would do.
"""

import argparse
import io
import json
import socket
import statistics
import threading
import time
import warnings
from http.client import HTTPConnection

import timm
import torch
from PIL import Image

import pace
from pace.images import Birds, ByName, Perturbation
from pace.observing.extract import observe_pair
from pace.serving import Session
from pace.serving.application import server_of

_SIZE = (4000, 3000)
_TOKEN = "token"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224", help="a timm model")
    parser.add_argument("--size", type=int, default=224, help="pixels per side that it takes")
    parser.add_argument("--concepts", type=int, default=50)
    parser.add_argument("--per-class", type=int, default=5, help="images of each of ten classes; four fifths are used")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    images, quick = (
        Birds(n_per_class=args.per_class, size=args.size),
        {"max_iter": 1, "n_init": 1, "covariance": "diag"},
    )
    explainer = pace.explain_model(timm.create_model(args.model), images, args.concepts, layer=-2, **quick)
    views = observe_pair(explainer.backbone, images, perturb=ByName(Perturbation(), images.names))
    session = Session(explainer, images, views, "Birds")
    third = list(range(args.concepts // 3))
    others = [k + len(third) for k in third]
    file = io.BytesIO()
    Image.fromarray(images[0].permute(1, 2, 0).numpy()).resize(_SIZE).save(file, "JPEG", quality=90)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        server = server_of(session, _TOKEN, port)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        times: dict[str, list[tuple[float, float]]] = {}

        def ask(name: str, path: str, body: bytes) -> dict:
            began = time.perf_counter(), time.process_time()
            connection = HTTPConnection("127.0.0.1", port)
            connection.request("POST", f"/{_TOKEN}/{path}", body, {"Origin": f"http://127.0.0.1:{port}"})
            found = json.loads(connection.getresponse().read())
            times.setdefault(name, []).append((time.perf_counter() - began[0], time.process_time() - began[1]))
            return found

        for _ in range(args.repeats + 1):
            picture = ask("a picture", "add", file.getvalue())["number"]
            for name, concepts in (
                ("a third of the concepts off", third),
                ("another third off", others),
            ):
                for compare in (False, True):
                    asked = {"picture": picture, "concepts": concepts, "compare": compare}
                    ask(f"{name}{', then compared' * compare}", "without", json.dumps(asked).encode())
        server.should_exit = True
        thread.join()
    print(f"{args.model}, {args.concepts} concepts, {args.threads} threads\n")
    print("| | median | slowest | of the processor |\n|---|---|---|---|")
    for name, found in times.items():
        wall, own = zip(*found[1:], strict=True)  # the first is to warm up
        print(f"| {name} | {statistics.median(wall):.2f} s | {max(wall):.2f} s | {statistics.median(own):.2f} s |")


if __name__ == "__main__":
    main()
