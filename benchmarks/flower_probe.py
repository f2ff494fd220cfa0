"""End to end on real images: a frozen backbone, Oxford 102 Flower, and a linear probe on the CLS token.

    uv run python benchmarks/flower_probe.py --data-root DIR --weights FILE [--device cuda]

Extracts the official training (1,020) and test (6,149) images with `Backbone.observe`, fits scikit-learn's logistic
regression on the standardised CLS tokens of the former and scores it on the latter. The default architecture is a ViT-S/14
with four registers.
"""

import argparse
import time

from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pace import Backbone
from pace.backbones import load
from pace.images import Flower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--model", default="vit_small_patch14_reg4_dinov2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=64)
    arguments = parser.parse_args()

    model = load(arguments.weights, model=arguments.model, img_size=224).float().to(arguments.device)
    backbone = Backbone(model)
    features, labels = {}, {}
    for split in ("official-train", "official-test"):
        images = Flower(arguments.data_root, split)
        start = time.perf_counter()
        observations = backbone.observe(images, batch_size=arguments.batch_size)
        seconds = time.perf_counter() - start
        print(f"{split}: {observations}, {len(images) / seconds:.0f} images a second from JPEG files", flush=True)
        features[split], labels[split] = observations.embeddings[:, 0], images.labels
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    probe.fit(features["official-train"], labels["official-train"])
    accuracy = probe.score(features["official-test"], labels["official-test"])
    print(f"linear probe on CLS: {100 * accuracy:.1f} % of {len(labels['official-test'])} test images right")


if __name__ == "__main__":
    main()
