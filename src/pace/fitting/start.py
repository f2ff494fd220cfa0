"""Where a fit begins: the best of several starts, and before that, if it is to be found, how many concepts there are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from pace.classifiers import logistic_regression
from pace.fitting.arguments import RANK, alpha_of, parts_of, prior_strength_of, prunes
from pace.fitting.loop import Course
from pace.model.concepts import Concepts, bound_of, update
from pace.model.gaussians import Prior
from pace.model.gaussians.family import NOT_POSITIVE
from pace.model.learning import Memory, expect_all, explain_batch
from pace.model.parting import LEAST_KIND_EFFECT, nested_start
from pace.model.seeding import Sample, cluster, draw_sample, place, within_covariance
from pace.model.selecting import Selection, first_guess, select
from pace.model.settings import Settings
from pace.observations import Observations

if TYPE_CHECKING:
    from pace.explainer import PACE

Say = Callable[[str], object]  # told what is going on

_TRIAL_EPOCHS = 3  # on a sample of the images, by which starts are compared
_FAR = 1000.0  # standard deviations
_TESTED = 1000  # images used to test whether concepts predict ŷ
_FAITHFUL = 0.99  # of them must be predicted right for few concepts to be enough


def find_start(
    model: PACE,
    observations: Observations,
    perturbed: Observations | None,
    settings: Settings,
    say: Say = lambda note: None,
    whole: bool = True,
    views_of_places: Observations | None = None,
) -> Course:
    """The best of several starts, by the bound after a few epochs on a sample of the images.

    `whole`: these are all the images there will be. `views_of_places` say what a change of view does, which tells no part.
    Ctrl-C settles for the best start so far, which is then marked as interrupted; before there is any it is raised.
    """
    return _Start(model, observations, settings, say).find(perturbed, whole, views_of_places)


@dataclass(frozen=True)
class _Start:
    """What a fit is to begin with."""

    model: PACE
    observations: Observations
    settings: Settings
    say: Say

    def find(self, perturbed: Observations | None, whole: bool, views_of_places: Observations | None) -> Course:
        model, observations, settings = self.model, self.observations, self.settings
        rng = np.random.default_rng(model.seed)
        selection: Selection | None = None
        if isinstance(model.n_concepts, str):
            selection = self._select()
            n_concepts = selection.n_concepts
        else:
            n_concepts = int(model.n_concepts)
            if prunes(model, observations, whole):
                selection = self._supported(n_concepts)
        sample = draw_sample(observations, n_concepts, settings, rng)
        nested = self._nested(n_concepts, selection, views_of_places)
        if nested is not None:
            return nested
        if selection is not None:
            clusters = [(selection.means.to(settings.device) - sample.offset, 0.0)]
        else:
            clusters = [cluster(sample, n_concepts, int(rng.integers(2**31))) for _ in range(model.n_init)]
        prior = self._prior(sample, min(clusters, key=lambda found: found[1])[0])
        alpha = alpha_of(model, n_concepts, observations, settings)
        if selection is not None:  # the others are in no image
            alpha[selection.n_concepts :] = settings.smallest_alpha
        starts = [
            self._placed(_filled_up(means, n_concepts, sample, prior), sample, prior, alpha) for means, _ in clusters
        ]
        best, best_bound = starts[0], -np.inf
        try:
            for start in starts if len(starts) > 1 else []:
                bound = self._trial(start, perturbed, sample, prior)
                if bound > best_bound:
                    best, best_bound = start, bound
        except KeyboardInterrupt:
            return Course(best, prior, selection, interrupted=True)
        return Course(best, prior, selection)

    def _nested(self, n_concepts: int, selection: Selection | None, perturbed: Observations | None) -> Course | None:
        """Parts and kinds, unless concepts are no kinds: asked for so, too few, or as many as the patches ask for."""
        model, observations, settings = self.model, self.observations, self.settings
        n_parts = parts_of(model, n_concepts, len(observations))
        pruned = selection is not None and selection.n_concepts < n_concepts
        if n_parts is None or (pruned and model.parts == "auto"):
            return None
        self.say("finding parts")
        alpha = alpha_of(model, n_parts, observations, settings)
        least = 0.0 if model.parts != "auto" else LEAST_KIND_EFFECT
        shape = n_parts, n_concepts, alpha, model.covariance, RANK
        found = nested_start(observations, perturbed, *shape, settings, model.seed, least)
        if found is None:
            return None
        concepts, covariance = found
        strength = prior_strength_of(model, observations, settings) * covariance.shape[0] / 2 / observations.dim
        return Course(concepts, Prior(covariance, max(strength, 1.0)), selection)

    def _select(self) -> Selection:
        """The number of concepts that the patches ask for; warns where it says little."""
        self.say("how many concepts?")
        most, seed = self.model.max_concepts, self.model.seed

        def report(number: int, bound: float) -> None:
            self.say(f"how many concepts: {number}, bound {bound:,.0f}")

        found = select(self.observations, self.settings, most=most, seed=seed, report=report)
        problem = None
        if found.n_concepts >= most:
            problem = f"the search stopped at its upper limit of {found.n_concepts} concepts; raise max_concepts"
        elif found.n_concepts == 1:
            problem = "these images ask for one concept only, which explains nothing; use more images"
        elif found.n_concepts > found.images:
            problem = (
                f"{found.n_concepts} concepts in {found.images} images: most will be of one image only; use more images"
            )
        if problem:
            warnings.warn(f"{problem}, or set n_concepts by hand", ConvergenceWarning, stacklevel=2)
        return found

    def _supported(self, n_concepts: int) -> Selection | None:
        """What the patches ask for, if that is less than half of what they are given.

        Patches need not form clusters, and then they ask for few. So with prune="auto" the prediction must also follow from
        those few: first from a quick guess, then from what a search finds. Where it follows from the guess, the search makes
        the guess better and not larger.
        """
        self.say("are there so many concepts?")
        automatic, seed = self.model.prune == "auto", self.model.seed

        def enough(means: Tensor) -> bool:
            return len(means) < n_concepts / 2 and (not automatic or self._suffice(means))

        guess = first_guess(self.observations, self.settings, n_concepts, seed)
        if not enough(guess):
            return None
        most = len(guess) if automatic else n_concepts
        found = select(self.observations, self.settings, most=most, seed=seed)
        return found if enough(found.means) else None

    def _suffice(self, means: Tensor) -> bool:
        """Whether concepts that start there predict ŷ."""
        rng = np.random.default_rng(self.model.seed)
        sample = draw_sample(self.observations, len(means), self.settings, rng)
        means = means.to(self.settings.device) - sample.offset
        alpha = alpha_of(self.model, len(means), self.observations, self.settings)
        concepts = self._placed(means, sample, self._prior(sample, means), alpha)
        return _predicts(self.observations, concepts, self.settings)

    def _placed(self, means: Tensor, sample: Sample, prior: Prior, alpha: Tensor) -> Concepts:
        return place(means, sample, prior, alpha, self.observations.n_classes, self.model.covariance, RANK)

    def _prior(self, sample: Sample, means: Tensor) -> Prior:
        covariance = within_covariance(sample, means)
        if not float(covariance.diagonal().min()) >= torch.finfo(self.settings.dtype).tiny:
            raise ValueError(NOT_POSITIVE)
        return Prior(covariance, prior_strength_of(self.model, self.observations, self.settings))

    def _trial(self, start: Concepts, perturbed: Observations | None, sample: Sample, prior: Prior) -> float:
        """The bound after a few epochs on the sample's images."""
        some = self.observations[sample.images]
        pair = None if perturbed is None else perturbed[sample.images]
        memory = Memory(1 if pair is None else 2, len(some), some.n_tokens, start, self.settings)

        def report(images: int) -> None:
            self.say("finding where to start")

        for _ in range(_TRIAL_EPOCHS):
            statistics = expect_all(some, pair, start, self.settings, memory, report)
            bound = bound_of(statistics, start, prior, float(statistics.images)).total
            start = update(start, statistics, prior, self.settings)
        return bound


def _predicts(observations: Observations, concepts: Concepts, settings: Settings) -> bool:
    """Whether ŷ can be read off the concepts as they are: learned on half of some images, tested on the other half."""
    some = observations[np.linspace(0, len(observations) - 1, min(_TESTED, len(observations))).astype(np.int64)]
    size = settings.images_per_batch(some.n_tokens, 1, concepts.gaussians)
    gammas, labels = [], []
    for _, batch in some.batches(size, settings.device, settings.dtype):
        assert batch.predictions is not None
        gammas.append(explain_batch(batch, concepts, settings, patches=False).gamma)
        labels.append(batch.predictions.argmax(1).cpu())
    theta, label = torch.nn.functional.normalize(torch.cat(gammas), p=1.0), torch.cat(labels).numpy()
    train, test = slice(0, None, 2), slice(1, None, 2)
    if len(np.unique(label[train])) < 2:
        return True
    classify = logistic_regression(theta[train], label[train])
    return float(np.mean(classify(theta[test]) == label[test])) >= _FAITHFUL


def _filled_up(means: Tensor, n_concepts: int, sample: Sample, prior: Prior) -> Tensor:
    """With further concepts out of any patch's reach."""
    far = means.new_zeros(n_concepts - len(means), means.shape[1])
    reach = 10 * float(sample.patches.square().sum(1).max().sqrt())
    far[:, 0] = max(_FAR * float(prior.covariance[0, 0].sqrt()), reach)
    return torch.cat([means, far])
