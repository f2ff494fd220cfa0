"""AGI, adversarial gradient integration (Pan, Li & Zhu 2021), in embedding space.

For every other class i, walk from e by steps of ε in the direction sign(∂p_i/∂e) until the model predicts i, and integrate the
gradient of the predicted class's probability p_t along the path:

    AGI = − Σ_i Σ_steps ∂p_t/∂e ∘ (step)

As ε shrinks, an image's attributions sum to how much p_t falls on the paths to the other classes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pace.baselines.attribution import TokenAttribution, training_mean
from pace.baselines.explainer import SplitModel, check_counts
from pace.baselines.head import Part
from pace.baselines.tokens import differentiable
from pace.explanation import Array
from pace.observations import Observations


class AGI(TokenAttribution):
    """θ is the mean over tokens of the integrated gradients, signed.

    Costs at most 2 · classes · max_steps gradients of h per image.

    Parameters
    ----------
    classes
        How many other classes to walk to; drawn with the seed, the same for all images.
    step
        ε, in standard deviations of the training tokens.
    max_steps
        Maximum number of steps to a class.
    """

    name = "agi"

    def __init__(
        self, classes: int = 20, step: float = 0.05, max_steps: int = 20, batch_size: int | None = None
    ) -> None:
        super().__init__(batch_size)
        check_counts(classes=classes, max_steps=max_steps)
        if not step > 0:
            raise ValueError(f"step: expected more than 0; found {step!r}")
        self.classes, self.step, self.max_steps = classes, step, max_steps

    def _fit(self, backbone: SplitModel, train: Observations, perturbed: Observations | None, seed: int) -> None:
        super()._fit(backbone, train, perturbed, seed)
        mean, total = training_mean(self.head_, train), 0.0
        for part in self.head_.parts(train, self.head_.rows()):
            total += float((part.tokens - mean).square().sum(dtype=torch.float64))
        # One scale for all channels, so that a step is equally long in each.
        self.scale_ = (total / (len(train) * mean.numel())) ** 0.5

    def _attribute(self, part: Part, seed: int) -> Tensor:
        n_classes = self.head_.n_classes
        order = np.random.default_rng(seed).permutation(n_classes)
        # The first `classes` of the drawn order that are not the predicted one.
        rivals = np.stack([order[order != target][: self.classes] for target in range(n_classes)])[
            part.targets.cpu().numpy()
        ]
        total = torch.zeros_like(part.tokens)
        for rival in rivals.T:
            total += self._walk(part, rival)
        return total

    def _walk(self, part: Part, rivals: Array) -> Tensor:
        found, place = torch.zeros_like(part.tokens), part.tokens
        with differentiable():
            rival = torch.from_numpy(rivals.copy()).to(part.targets.device)
        for _ in range(self.max_steps):
            with differentiable():
                here = place.clone().requires_grad_()
                logits = part.logits(here)
                # sign ∂p_i = sign ∂ log p_i, which does not underflow
                towards = logits.log_softmax(1).gather(1, rival[:, None]).sum()
                confidence = logits.softmax(1).gather(1, part.targets[:, None]).sum()
                (ascent,) = torch.autograd.grad(towards, here, retain_graph=True)
                (gradient,) = torch.autograd.grad(confidence, here)
            going = logits.argmax(1) != rival
            if not going.any():
                break
            step = self.step * self.scale_ * ascent.sign() * going[:, None, None]
            found, place = found - gradient * step, place + step
        return found
