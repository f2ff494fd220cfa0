"""Where a fit begins: the best of several starts, and before that, if it is to be found, how many concepts there are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from pace.fitting.loop import Start, bound_of, prediction_follows
from pace.fitting.parameters import alpha_of, prior_strength_of, prunes
from pace.model.gaussians import Prior
from pace.model.learning import Concepts, Memory, Settings, pass_over, update
from pace.model.seeding import Sample, cluster, draw_sample, place, within_covariance
from pace.model.selecting import Selection, first_guess, select
from pace.observations import Observations

if TYPE_CHECKING:
    from pace.explainer import PACE

_TRIAL_EPOCHS = 3  # epochs on the sample by which starts are compared
_FAR = 1000.0  # standard deviations


def find_start(
    model: PACE,
    observations: Observations,
    perturbed: Observations | None,
    settings: Settings,
    report: Callable[[str], object] = lambda note: None,
    whole: bool = True,
) -> Start:
    """The best of several starts, by the bound after a few epochs on a sample of the images.

    `whole`: these are all images there will be. Ctrl-C settles for the best so far, and is then reported; before there is any
    it is raised.
    """
    rng = np.random.default_rng(model.seed)
    selection = None
    if isinstance(model.n_concepts, str):
        selection = _select(model, observations, settings, report)
        n_concepts = selection.n_concepts
    else:
        n_concepts = int(model.n_concepts)
        if prunes(model, observations, whole):
            selection = _supported(model, n_concepts, observations, settings, report)
    sample = draw_sample(observations, n_concepts, settings, rng)
    if selection is not None:
        clusters = [(selection.means.to(settings.device) - sample.offset, 0.0)]
    elif isinstance(model.init, str):
        clusters = [cluster(sample, n_concepts, int(rng.integers(2**31))) for _ in range(model.n_init)]
    else:
        means = torch.as_tensor(np.asarray(model.init)).to(settings.device, settings.dtype)
        if means.shape != (n_concepts, observations.dim):
            expected = (n_concepts, observations.dim)
            raise ValueError(f"init: expected means of shape {expected}; found {tuple(means.shape)}")
        clusters = [(means - sample.offset, 0.0)]
    tightest = min(clusters, key=lambda found: found[1])[0]
    prior = Prior(within_covariance(sample, tightest), prior_strength_of(model, observations, settings))
    alpha = alpha_of(model, n_concepts, observations, settings)
    if selection is not None:  # the others are in no image
        alpha[selection.n_concepts :] = settings.smallest_alpha
    starts = [
        place(
            _filled_up(means, n_concepts, sample, prior),
            sample,
            prior,
            alpha,
            observations.n_classes,
            model.covariance,
            model.rank,
        )
        for means, _ in clusters
    ]
    best, best_bound = starts[0], -np.inf
    try:
        for start in starts if len(starts) > 1 else []:
            bound = _trial(start, observations, perturbed, sample, prior, settings, report)
            if bound > best_bound:
                best, best_bound = start, bound
    except KeyboardInterrupt:
        return Start(best, prior, selection, interrupted=True)
    return Start(best, prior, selection)


def _select(model: PACE, observations: Observations, settings: Settings, report: Callable[[str], object]) -> Selection:
    report("how many concepts?")
    found = select(
        observations,
        settings,
        most=model.max_concepts,
        seed=model.seed,
        report=lambda move: report(f"how many concepts: {move.number}, bound {move.bound:,.0f}"),
    )
    if found.n_concepts >= model.max_concepts:
        message = (
            f"the search stopped at {found.n_concepts} concepts, the most it looks for; raise max_concepts, or set "
            "n_concepts by hand"
        )
        warnings.warn(message, ConvergenceWarning, stacklevel=2)
    elif found.n_concepts == 1:
        message = (
            "these images ask for one concept alone, which explains nothing; look at more, or set n_concepts by hand"
        )
        warnings.warn(message, ConvergenceWarning, stacklevel=2)
    if found.n_concepts > found.images:
        message = (
            f"{found.n_concepts} concepts in {found.images} images: most will be of one image alone; look at more, or set "
            "n_concepts by hand"
        )
        warnings.warn(message, ConvergenceWarning, stacklevel=2)
    return found


def _supported(
    model: PACE, n_concepts: int, observations: Observations, settings: Settings, report: Callable[[str], object]
) -> Selection | None:
    """What the patches ask for, if that is less than half of what they are given.

    Patches need not lie in clouds, and then they ask for few. So unless told to prune, it must also be that the prediction
    follows from those few: first from a quick guess, then from what a search finds. Where it follows from the guess, the search
    makes that better and not larger.
    """
    report("are there so many concepts?")

    def enough(means: Tensor) -> bool:
        return len(means) < n_concepts / 2 and (model.prune != "auto" or _suffice(model, means, observations, settings))

    guess = first_guess(observations, settings, n_concepts, model.seed)
    if not enough(guess):
        return None
    most = len(guess) if model.prune == "auto" else n_concepts
    found = select(observations, settings, most=most, seed=model.seed)
    return found if enough(found.means) else None


def _suffice(model: PACE, means: Tensor, observations: Observations, settings: Settings) -> bool:
    """Whether the prediction can be read off concepts that start there."""
    sample = draw_sample(observations, len(means), settings, np.random.default_rng(model.seed))
    means = means.to(settings.device) - sample.offset
    prior = Prior(within_covariance(sample, means), prior_strength_of(model, observations, settings))
    alpha = alpha_of(model, len(means), observations, settings)
    concepts = place(means, sample, prior, alpha, observations.n_classes, model.covariance, model.rank)
    return prediction_follows(observations, concepts, settings)


def _filled_up(means: Tensor, n_concepts: int, sample: Sample, prior: Prior) -> Tensor:
    """With concepts out of any patch's reach."""
    far = means.new_zeros(n_concepts - len(means), means.shape[1])
    far[:, 0] = max(
        _FAR * float(prior.covariance[0, 0].sqrt()), 10 * float(sample.patches.square().sum(1).max().sqrt())
    )
    return torch.cat([means, far])


def _trial(
    start: Concepts,
    observations: Observations,
    perturbed: Observations | None,
    sample: Sample,
    prior: Prior,
    settings: Settings,
    report: Callable[[str], object],
) -> float:
    some = observations[sample.images]
    pair = None if perturbed is None else perturbed[sample.images]
    memory = Memory(1 if pair is None else 2, len(some), len(start), some.n_tokens, settings)
    for _ in range(_TRIAL_EPOCHS):
        statistics = pass_over(some, pair, start, settings, memory, lambda images: report("finding where to start"))
        bound = bound_of(statistics, start, prior, float(statistics.images)).total
        start = update(start, statistics, prior, settings)
    return bound
