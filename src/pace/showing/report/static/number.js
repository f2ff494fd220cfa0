// Number: for models that found their number of concepts. The bound for every number tried, and each concept's evidence.

const NEAR = 3; // concepts more or fewer than were found

const nats = (value) => `${figure(value)} nats`;

const numberView = {
  title: "Number",
  render() {
    const { images, concepts, evidence: strengths, numbers } = data.selection;
    const pruned = strengths.length < concepts;
    return h("div", { class: "page" },
      h("header", { class: "lead" }, h("h1", {}, plural(strengths.length, "concept was", "concepts were"), " found"),
        note(pruned ? `${concepts} were asked for; the others stay empty. ` : "The number was not given. ", "The bound weighs how well the concepts fit the patches against how many there are; of all numbers tried, this one is best. ",
          `${plural(images, "image was", "images were")} used. `,
          strengths.length === Math.max(...numbers) && " Larger numbers were not tried, so there may be more.",
          heldCount + mergedCount !== strengths.length && ` After the fit, ${plural(heldCount + mergedCount, "concept holds", "concepts hold")} patches.`)),
      h("section", { class: "card warning", "aria-labelledby": "sure" },
        h("h2", { id: "sure" }, "Do not rely on the exact number"),
        h("p", {}, "The bound treats patches as independent draws from Gaussians. Those of a real transformer are neither, so small differences count too much, and the number may be too large. ",
          "Trust it if another seed finds the same number and the weakest concepts below mean something to you; otherwise ", pruned ? "use all that you ask for (prune=False, or --no-prune)." : "set the number by hand.")),
      byNumber(), byEvidence(strengths));
  },
};

function byNumber() {
  const { numbers, bounds, evidence: strengths } = data.selection;
  const best = Math.max(...bounds);
  const all = numbers.map((number, index) => ({ number, below: best - bounds[index] }));
  const near = all.filter(({ number }) => Math.abs(number - strengths.length) <= NEAR);
  const drawn = [["All numbers tried", all], ["Near the number found", near]].slice(0, near.length < all.length ? 2 : 1);
  return h("section", { class: "card", "aria-labelledby": "numbers" },
    h("h2", { id: "numbers" }, "The bound against the number of concepts"),
    note("In nats below the best; higher is better. A steep fall on both sides of the line supports the number that was found; with a flat top, other numbers would do as well."),
    h("div", { class: "charts" }, drawn.map(([title, shown]) => numberChart(title, shown, strengths.length))),
    h("table", { class: "numbers" },
      h("caption", { class: "unseen" }, "The bound near the number found"),
      h("thead", {}, h("tr", {}, ["concepts", "bound below the best"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, near.map(({ number, below }) => h("tr", { class: number === strengths.length && "found" },
        h("th", { scope: "row" }, String(number), number === strengths.length && h("span", { class: "unseen" }, ", found")),
        h("td", { class: "figure" }, nats(below)))))));
}

function numberChart(title, shown, found) {
  const first = shown[0], last = shown.at(-1);
  const points = shown.map(({ number, below }) => [number, 0 - below]);
  const label = `${title}: ${nats(first.below)} below the best with ${plural(first.number, "concept")}, best with ${found}, ${nats(last.below)} below with ${last.number}`;
  return h("figure", { class: "chart" },
    h("figcaption", {}, h("b", {}, title)),
    plot(points, label, found),
    h("p", { class: "ends quiet" }, h("span", {}, plural(first.number, "concept")), h("span", {}, plural(last.number, "concept"))));
}

/** The fit began with the concepts in this order, so their names are their ranks. */
function byEvidence(strengths) {
  const most = Math.max(...strengths);
  return h("section", { class: "card", "aria-labelledby": "worth" },
    h("h2", { id: "worth" }, "The concepts by their evidence"),
    note("What the bound loses when a concept is merged with the neighbour that fits it best, measured before the fit. Whether to keep a concept with little evidence is a matter of taste."),
    h("ol", { class: "rows mixture worth", "aria-label": "Concepts, those with most evidence first" }, strengths.map((value, k) => h("li", {},
      face(k), h("a", { href: link.concept(k) }, conceptName(k)),
      h("span", { class: "bar", "aria-hidden": "true" }, h("span", { style: { width: `${value === null ? 100 : Math.max(0.5, (100 * value) / (most || 1))}%` } })),
      h("span", { class: "figure" }, value === null ? "the only one" : nats(value))))));
}
