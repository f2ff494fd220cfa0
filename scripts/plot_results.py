"""Draw the chart of docs/results.md from the scores that a benchmark wrote.

    uv run python scripts/plot_results.py docs/assets/results.csv docs/assets/results.svg

One panel for each dataset: how well a method's explanation gives the prediction back, against how far a perturbed image lies
from its own original beside another image. Down and to the right is better; areas grow with the number of effective concepts.
"""

import argparse
import csv
from collections import defaultdict

from matplotlib.figure import Figure

TITLES = {
    "pace": "PACE", "last": "PACE, last block", "em": "PACE, EM only", "few": "PACE, K = 5",
    "craft-sobol": "CRAFT, Sobol",
    "pace-paper": "printed rules", "saliency": "Saliency",
    "shap": "SHAP", "lime": "LIME", "agi": "AGI", "craft": "CRAFT", "kmeans": "k-means", "gmm": "mixture",
    "embedding": "mean embedding", "true-colors": "true colours", "semi-nmf": "semi-NMF",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scores")
    parser.add_argument("picture")
    arguments = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    with open(arguments.scores, encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["method"] in TITLES and row["value"]:
                found[row["dataset"]][row["method"]][row["metric"]] = float(row["value"])
    figure = Figure(figsize=(11, 4), layout="constrained")
    shown = {}
    for axes, (dataset, methods) in zip(figure.subplots(1, len(found), sharey=True), found.items(), strict=True):
        for method, scores in methods.items():
            place = list(TITLES).index(method)
            shown[method] = axes.scatter(
                scores["faithfulness"], scores["stability_ratio"], 20 + scores["effective_concepts"] / 2,
                f"C{place % 10}", marker="os^DvP*"[place % 7], alpha=0.8, linewidths=0, label=TITLES[method],
            )  # fmt: skip
        axes.set(
            title=dataset.upper() if dataset == "cub" else dataset.title(), xlabel="faithfulness", xlim=(0.2, 1.05)
        )
        axes.axhline(1, color="0.8", zorder=0)
    figure.axes[0].set(ylabel="stability ratio", ylim=(0, None))
    figure.legend(
        handles=[shown[method] for method in TITLES if method in shown], loc="outside right center", fontsize=8
    )
    figure.savefig(arguments.picture, metadata={"Date": None})
    print(f"wrote {arguments.picture}")


if __name__ == "__main__":
    main()
