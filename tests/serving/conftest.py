"""Birds with parts and kinds, explained by the model that is shipped, and a server in a thread."""

import shutil
import warnings
from types import SimpleNamespace

import pytest
from live_case import seen_twice, served

import pace
from pace.images import Birds
from pace.serving import Session


@pytest.fixture(scope="session")
def birds():
    return Birds(n_per_class=8, size=112)


@pytest.fixture(scope="session")
def saved(birds, tmp_path_factory):
    """A run whose concepts are kinds of parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quick = {"covariance": "diag", "max_iter": 4, "n_init": 1, "progress": False, "device": "cpu"}
        explainer = pace.explain_model("birds", birds, 12, layer=3, class_names=birds.class_names, **quick)
    return explainer.save(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def run(saved, tmp_path_factory):
    """A copy of the run for the tests of one file, which leave no names in it."""
    return shutil.copytree(saved, tmp_path_factory.mktemp("copy") / "run")


@pytest.fixture(scope="module")
def session(run, birds):
    explainer = pace.load_run(run, device="cpu")
    shown = birds.subset(range(0, 60, 5))
    return Session(explainer, shown, seen_twice(explainer, shown), "Birds")


@pytest.fixture(scope="module")
def client(session):
    """Of a server that answers until the tests of one file end."""
    with served(session) as client:
        yield client


@pytest.fixture
def open_live(browser, client):
    """Opens the live page; nothing may fail, and nothing may be asked of anybody else."""
    complaints, contexts = [], []

    def open_live(fragment="", client=client, **options):
        context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"} | options
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        ours = (client.address, "data:")
        page.on("request", lambda sent: None if sent.url.startswith(ours) else complaints.append(sent.url))
        page.goto(client.address + fragment)
        return page

    yield SimpleNamespace(page=open_live, complaints=complaints)
    for context in contexts:
        context.close()
    assert not complaints
