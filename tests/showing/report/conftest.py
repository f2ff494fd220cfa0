"""A small report with hostile names, and a real browser to open it in."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from planted import planted
from report_case import HOSTILE, HOSTILE_FILE, HOSTILE_TITLE, AsIs, Drawn, fit

from pace.metrics.scores import Score, Scores
from pace.showing.report import write_report


@pytest.fixture(scope="session")
def case():
    """24 images of 6 x 6 patches and CLS, 3 classes, 8 concepts of which the last two are not in use."""
    known = planted(k=5, images=24, d=12)
    names = [HOSTILE_FILE, *(f"folder/picture {number:02d}.jpg" for number in range(1, 24))]
    images = Drawn(names, np.arange(24) % 3, [HOSTILE, "rose & <b>thorn</b>", "oak"])
    model = fit(known.observations, known.perturbed, n_concepts=8, max_iter=6)
    explanation = model.explain(known.observations)
    phi = explanation.phi.copy()
    phi[:, :, 0] += phi[:, :, 6:].sum(2)  # to one of them: the page keeps four concepts of a patch
    phi[:, :, 6:] = 0
    scores = Scores(
        [
            Score("faithfulness", "Faithfulness", 0.9, 0.8, 0.95, "higher", (0, 1), "Right predictions."),
            Score("stability", "Stability", 0.5, None, None, "lower", (0, np.inf), "Movement under perturbation."),
            Score("stability_ratio", "Stability ratio", 0.7, 0.6, 0.8, "lower", (0, np.inf), "Against strangers."),
            Score("n_concepts", "Concepts", 8.0, None, None, "lower", (1, np.inf), "All of them."),
            Score("effective_concepts", "Effective concepts", 1.2, 1.1, 1.3, None, (1, np.inf), "In use."),
            Score("of_a_plugin", "A figure of one's own", float("nan"), None, None, None, (0, 1), "Unknown here."),
        ],
        warnings=[f"The explanation has collapsed to one concept. {HOSTILE}"],
    )
    return SimpleNamespace(
        observations=known.observations,
        perturbed=known.perturbed,
        images=images,
        perturbed_images=255 - images.pixels,
        model=model,
        explanation=type(explanation)(explanation.theta, explanation.gamma, phi, explanation.grid, 1),
        scores=scores,
        preprocessing=AsIs(),
    )


@pytest.fixture(scope="session")
def report(case, tmp_path_factory):
    return write_report(
        tmp_path_factory.mktemp("report") / "report.html",
        case.model,
        case.images,
        case.observations,
        perturbed=case.perturbed,
        perturbed_images=case.perturbed_images,
        explanation=case.explanation,
        scores=case.scores,
        preprocessing=case.preprocessing,
        title=HOSTILE_TITLE,
    )


@pytest.fixture(scope="session")
def counted(case, tmp_path_factory):
    """A report of a model that found the number of its concepts, and the model."""
    model = fit(case.observations, n_concepts="auto", max_iter=2)
    path = tmp_path_factory.mktemp("counted") / "report.html"
    write_report(path, model, case.images.pixels, case.observations, scores=case.scores)
    return SimpleNamespace(path=path, model=model)


@pytest.fixture(scope="session")
def many(case, tmp_path_factory):
    """A report with more concepts in an image than there are colours."""
    rng = np.random.default_rng(0)
    model = fit(case.observations, n_concepts=14, max_iter=1)
    explanation = model.explain(case.observations)
    phi = rng.dirichlet(np.full(14, 0.02), explanation.phi.shape[:2])
    explanation = type(explanation)(explanation.theta, explanation.gamma, phi, explanation.grid, 1)
    path = tmp_path_factory.mktemp("many") / "report.html"
    write_report(path, model, case.images.pixels, case.observations, explanation=explanation)
    return SimpleNamespace(path=path, explanation=explanation)


@pytest.fixture(scope="session")
def pruned(case, tmp_path_factory):
    """A report of a model that was given 30 concepts and left those empty that the patches do not ask for."""
    model = fit(case.observations, n_concepts=30, prune=True, max_iter=4)
    path = tmp_path_factory.mktemp("pruned") / "report.html"
    write_report(
        path,
        model,
        case.images.pixels,
        case.observations,
        perturbed=case.perturbed,
        perturbed_images=case.perturbed_images,
    )
    return SimpleNamespace(path=path, model=model, used=30 - len(model.empty_concepts_))


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on PATH")
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"] if root else [])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens a file at a fragment; afterwards nothing may have failed, and nothing may have been asked of a network."""
    contexts, complaints = [], []

    def open_page(path: Path, fragment="", **options):
        options = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **options}
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda request: (
                request.url.startswith("data:")
                or request.url.split("#")[0] == path.as_uri()
                or complaints.append(f"request: {request.url[:80]}")
            ),
        )
        page.goto(path.as_uri() + fragment)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints
