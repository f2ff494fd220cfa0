"""Small reports, one of them with hostile names, and a real browser to open them in."""

from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from planted import planted
from report_case import HOSTILE, HOSTILE_FILE, HOSTILE_TITLE, AsIs, Drawn, fit

from pace.metrics.scores import Score, Scores
from pace.naming import concept_names
from pace.showing.report import write_report


@pytest.fixture(scope="session")
def case():
    """24 images of 6 x 6 patches and CLS, 3 classes, 8 concepts of which the last two are not in use."""
    known = planted(k=5, images=24, d=12)
    known.perturbed.crops = np.float32([[1, 0, 0, 1]] * 24)  # mirrored
    names = [HOSTILE_FILE, *(f"folder/picture {number:02d}.jpg" for number in range(1, 24))]
    images = Drawn(names, np.arange(24) % 3, [HOSTILE, "rose & <b>thorn</b>", "003.old_oak"])
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
            Score("of_a_plugin", "A score of one's own", float("nan"), None, None, None, (0, 1), "Unknown here."),
        ],
        warnings=[f"The explanation has collapsed to one concept. {HOSTILE}"],
        verdict=f"Believe the image level. {HOSTILE}",
    )
    return SimpleNamespace(
        observations=known.observations,
        perturbed=known.perturbed,
        images=images,
        perturbed_images=255 - images.pixels,
        model=model,
        explanation=type(explanation)(explanation.theta, explanation.gamma, phi, explanation.grid, 1),
        scores=scores,
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
        preprocessing=AsIs(),
        title=HOSTILE_TITLE,
    )


@pytest.fixture(scope="session")
def pruned(case, tmp_path_factory):
    """A report of a model that left empty most of the 30 concepts it was given; the first four have patches of one colour."""
    model = fit(case.observations, n_concepts=30, prune=True, max_iter=4)
    paint = np.array([[200, 20, 20], [20, 160, 40], [230, 220, 20], [10, 10, 20], *[[128, 128, 128]] * 26], np.uint8)
    main = model.explain(case.observations).phi[:, 1:].argmax(2)
    path = tmp_path_factory.mktemp("pruned") / "report.html"
    write_report(path, model, paint[main].reshape(24, 6, 6, 3).repeat(8, 1).repeat(8, 2), case.observations)
    return SimpleNamespace(path=path, model=model, used=30 - len(model.empty_concepts_), paint=paint)


@pytest.fixture(scope="session")
def bare(case, tmp_path_factory):
    """A report of a model without classes, with perturbed observations but no perturbed pictures, and without scores."""
    observations, perturbed = (
        type(some)(some.embeddings, some.attention, None, some.grid, some.prefix_tokens)
        for some in (case.observations, case.perturbed)
    )
    model = fit(observations, n_concepts=3, max_iter=2)
    path = tmp_path_factory.mktemp("bare") / "report.html"
    return write_report(path, model, case.images.pixels, observations, perturbed=perturbed)


@pytest.fixture(scope="session")
def kinds(case, tmp_path_factory):
    """A report whose concepts are kinds of three parts; the last two kinds, of the last part and the first, are not in use."""
    part_of = np.array([0, 1, 2, 0, 1, 0, 2, 0])
    model = copy(case.model)
    names = concept_names(part_of, model.concept_weights_)
    model.explain = lambda observations: replace(
        case.model.explain(observations), part_of=part_of, weights=None, prior=None, called=names
    )
    explanation = replace(case.explanation, part_of=part_of, called=names)
    classes = explanation.theta.argmax(1) % 3  # so that classes differ in their kinds
    observations, perturbed = (
        type(some)(some.embeddings, some.attention, np.eye(3)[classes], some.grid, some.prefix_tokens, crops=some.crops)
        for some in (case.observations, case.perturbed)
    )
    path = tmp_path_factory.mktemp("kinds") / "report.html"
    write_report(
        path,
        model,
        case.images,
        observations,
        perturbed=perturbed,
        perturbed_images=case.perturbed_images,
        explanation=explanation,
        scores=case.scores,
        preprocessing=AsIs(),
        title=HOSTILE_TITLE,
    )
    return SimpleNamespace(path=path, explanation=explanation, names=names, classes=classes)


@pytest.fixture(scope="session")
def tabs(browser):
    """Pages by their options, used again by every test, and what they complained of."""
    pages, complaints = {}, []

    def tab(**options):
        key = str(options)
        if key not in pages:
            pages[key] = page = browser.new_context(reduced_motion="reduce", **options).new_page()
            page.set_default_timeout(10_000)
            page.on("console", lambda message: complaints.append(f"console: {message.text}"))
            page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
            page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
            page.on("request", lambda request: complaints.append(f"request: {request.url[:200]}"))
        return pages[key]

    return SimpleNamespace(open=tab, complaints=complaints)


@pytest.fixture
def open_page(tabs):
    """Opens a report at a fragment; nothing may fail, and nothing may be requested but the file itself."""
    opened = ["data:", "about:blank"]

    def open_page(path, fragment="", **options):
        page = tabs.open(**{"viewport": {"width": 1280, "height": 900}, **options})
        opened.append(path.as_uri())
        page.goto("about:blank")
        page.goto(path.as_uri() + fragment)
        return page

    yield open_page
    complaints = [line for line in tabs.complaints if not line.removeprefix("request: ").startswith(tuple(opened))]
    tabs.complaints.clear()
    assert not complaints
