"""Attributions of the predicted class's logit to the channels of single tokens, by gradients: saliency and AGI. K = d.

AGI is adversarial gradient integration (Pan, Li & Zhu 2021), here in embedding space. For every other class i, walk from e by
steps of ε in the direction sign(∂p_i/∂e) until the model predicts i, and integrate the gradient of the predicted class's
probability p_t along the path:

    AGI = − Σ_i Σ_steps ∂p_t/∂e ∘ (step)

As ε shrinks, an image's attributions sum to how much p_t falls on the paths to the other classes.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pace.backbones import Backbone
from pace.baselines.explainer import Explainer, check_counts, point
from pace.baselines.head import Head, Part
from pace.explanation import Explanation
from pace.observations import Observations


class TokenAttribution(Explainer):
    """Attributions to the channels of single tokens, which are the patch level; θ is their mean over tokens.

    CLS is one of the tokens whether it counts as a patch or not: it often has all the weight, and that must be visible.
    """

    through_model = True

    def _fit(self, backbone: Backbone, train: Observations, perturbed: Observations | None, seed: int) -> None:
        self.head_ = Head(backbone, train)

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        head, (images, _, dim) = self.head_, observations.shape
        theta = np.empty((images, dim), np.float32)
        phi = np.zeros((images, head.n_tokens, dim), np.float32) if patches else None
        reads = head.reads.cpu().numpy()
        for part in head.parts(observations, head.rows(gradients=True)):
            found = self._attribute(part, seed)
            # Tokens that h does not read count as zeros.
            theta[part.images] = (found.sum(1) / head.n_tokens).cpu().numpy()
            if phi is not None:
                phi[part.images, reads] = found.cpu().numpy()
        return replace(point(theta, phi, observations), prefix_tokens=head.prefix_tokens)

    @abstractmethod
    def _attribute(self, part: Part, seed: int) -> Tensor:
        """(B, R, d)."""


class Saliency(TokenAttribution):
    """θ_mc = mean over tokens of |∂h_ŷ/∂e_mjc| (Simonyan, Vedaldi & Zisserman 2014). One gradient of h per image."""

    name = "saliency"

    def _attribute(self, part: Part, seed: int) -> Tensor:
        return part.gradient(part.tokens).abs()


class AGI(TokenAttribution):
    """θ is the mean over tokens of the integrated gradients, signed.

    Costs at most 2 · classes · max_steps gradients of h per image.

    Parameters
    ----------
    classes
        How many other classes to walk to; drawn with the seed, the same for all images.
    step, max_steps
        ε, in standard deviations of the training tokens, and the maximum number of steps to a class.
    """

    name = "agi"

    def __init__(self, classes: int = 20, step: float = 0.05, max_steps: int = 20) -> None:
        check_counts(classes=classes, max_steps=max_steps)
        if not step > 0:
            raise ValueError(f"step: expected more than 0; found {step!r}")
        self.classes, self.step, self.max_steps = classes, step, max_steps

    def _fit(self, backbone: Backbone, train: Observations, perturbed: Observations | None, seed: int) -> None:
        super()._fit(backbone, train, perturbed, seed)
        mean, total = self.head_.mean(train), 0.0
        for part in self.head_.parts(train, self.head_.rows()):
            total += float((part.tokens - mean).square().sum(dtype=torch.float64))
        # One scale for all channels, so that a step is equally long in each.
        self.scale_ = (total / (len(train) * mean.numel())) ** 0.5

    def _attribute(self, part: Part, seed: int) -> Tensor:
        order = np.random.default_rng(seed).permutation(self.head_.n_classes)
        # The first `classes` of the drawn order that are not the predicted one.
        rivals = np.stack([order[order != target][: self.classes] for target in part.targets.tolist()])
        total = torch.zeros_like(part.tokens)
        for rival in torch.from_numpy(rivals).to(part.targets.device).unbind(1):
            total += self._walk(part, rival)
        return total

    def _walk(self, part: Part, rival: Tensor) -> Tensor:
        found, place = torch.zeros_like(part.tokens), part.tokens
        for _ in range(self.max_steps):
            with torch.enable_grad():
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
