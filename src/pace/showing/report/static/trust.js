// Trust: the verdict, the images and scores behind it, and how learning went.

const TERMS = [
  ["Total", (bound) => bound[0] + bound[1] + bound[2], ["The bound ", h("i", {}, "L"), " that learning raises."]],
  ["Embeddings", (bound) => bound[0], ["How well the concepts fit the patches (", h("i", {}, "L"), h("sub", {}, "e"), ")."]],
  ["Faithfulness", (bound) => bound[1], ["How well they recover predictions (", h("i", {}, "L"), h("sub", {}, "f"), ")."]],
  ["Stability", (bound) => bound[2], ["How much more alike the two views of an image are than two images (", h("i", {}, "L"), h("sub", {}, "s"), ")."]],
];

// What the telling images tell.
const TELLING = {
  best: ["Best followed", ({ share }) => `${percent(share, 0)} of the places kept their concept`],
  worst: ["Worst followed", ({ share }) => `${percent(share, 0)} of the places kept their concept`],
  covered: ["Most covered by one concept", ({ share, concept }) => `${percent(share, 0)} of the picture is ${data.concepts[concept].name}`],
};

const trustView = {
  title: "Trust",
  render() {
    return h("div", { class: "page" },
      h("header", { class: "lead" }, h("h1", {}, "Can it be trusted?"), verdict()),
      tellingImages(), warnings(), scores(), facts(), bounds());
  },
};

function verdict() {
  if (data.scores) return data.verdict && h("p", { class: "verdict" }, data.verdict);
  return [h("p", { class: "verdict" }, "Not known: this report has no scores."),
    note("Run pace evaluate before pace report, or pass scores=pace.metrics.evaluate(…) to write_report.")];
}

function tellingImages() {
  const isVaried = data.telling.some(({ why }) => why === "best");
  return h("section", { "aria-labelledby": "telling" },
    h("h2", { id: "telling" }, "The most telling images"),
    places ? note("Each picture beside its perturbed view, coloured by concept. Concepts follow a picture if the same thing keeps its concept when it is cropped, mirrored and recoloured.",
      !isVaried && " None is listed as best followed, since one concept holds more than nine tenths of the places of every image.")
      : note("Whether concepts follow what they mark cannot be seen here: that takes perturbed views that say which part of the picture they show. ",
        "pace report makes them unless it is given --no-pairs; in Python pass perturbed= and perturbed_images= to write_report."),
    h("div", { class: "telling" }, data.telling.map(tellingImage)));
}

function tellingImage(found) {
  const [title, sentence] = TELLING[found.why];
  const m = found.image, colours = coloursFor(colouredIn(m));
  return h("a", { class: "card", href: link.image(m, { overlay: imagesView.canFollow ? "kept" : "all" }) },
    h("h3", {}, title), h("p", {}, sentence(found)),
    h("span", { class: "pair" }, pictured.map((view) => conceptMap(view, m, colours))),
    h("span", { class: "caption" }, h("span", { class: "clip" }, data.names[m])));
}

function warnings() {
  const { warnings: found } = data;
  return found.length > 0 && h("section", { class: "card warning", role: "alert", "aria-labelledby": "warnings" },
    h("h2", { id: "warnings" }, found.length === 1 ? "One warning" : `${found.length} warnings`),
    h("ul", {}, found.map((text) => h("li", {}, text))));
}

function scores() {
  if (!data.scores) return null;
  const list = (some) => h("div", { class: "pairs" }, some.map(scoreItem));
  const isMain = ({ name }) => data.main.includes(name);
  const rest = data.scores.filter((score) => !isMain(score));
  return h("section", { class: "card", "aria-labelledby": "scores" },
    h("h2", { id: "scores" }, "Scores"), list(data.scores.filter(isMain)),
    rest.length > 0 && h("details", { class: "fold" }, h("summary", {}, "All scores"), list(rest)));
}

function scoreItem({ title, value, low, high, better, range, meaning }) {
  const bounded = range[0] !== null && range[1] !== null && range[1] > range[0] && value !== null;
  const text = (x) => (range[1] === 1 && x !== null ? x.toFixed(2).replace("-", "−") : figure(x)); // shares in shares' digits
  const at = (x) => `${(100 * (x - range[0])) / (range[1] - range[0])}%`;
  return h("div", { class: "score" },
    h("p", { class: "headline" }, h("span", { class: "title" }, title), h("b", { class: "figure" }, text(value)),
      low !== null && high > low && h("span", { class: "quiet range" }, `${text(low)} to ${text(high)}`)),
    bounded && h("span", { class: "scale", "aria-hidden": "true" },
      low !== null && high !== null && h("i", { style: { left: at(low), width: `calc(${at(high)} - ${at(low)})` } }), h("span", { style: { left: at(value) } })),
    h("p", { class: "note" }, meaning, " ", better && h("span", { class: "direction" }, better === "higher" ? "Higher is better." : "Lower is better.")));
}

function facts() {
  const fact = (value, text) => h("div", {}, h("b", { class: "figure" }, value), h("p", { class: "note" }, text));
  return h("section", { class: "card", "aria-labelledby": "facts" },
    h("h2", { id: "facts" }, "Counts for these images"),
    h("div", { class: "pairs" },
      fact(`${data.concepts.filter(({ used }) => used).length} of ${CONCEPTS}`, ["concepts hold at least one patch of these images.", emptyCount > 0 && ` ${stayedEmpty} when the model was fitted.`]),
      fact(figure(data.effective), "equally used concepts would be as varied as these. If that is far fewer than are in use, a few do most of the work."),
      data.prefix > 0 && fact(percent(data.prefixWeight, 0), "of the weight is on the summary token (CLS), which is not a patch. If that is nearly all of it, patches hardly count."),
      data.pointed && original.predictions && fact(percent(data.pointed.filter((n, m) => n === predictedClass(m)).length / data.pointed.length, 0),
        "of the predictions match the class that the concepts point to (θ through η), with the prediction withheld.")));
}

function bounds() {
  const whole = data.bounds.filter((bound) => bound.every((term) => term !== null));
  const shown = TERMS.filter(([, term]) => whole.some((bound) => term(bound) !== 0)); // no pairs, no stability term
  if (!shown.length) return null;
  return h("section", { class: "card", "aria-labelledby": "bounds" },
    h("h2", { id: "bounds" }, "How learning went"),
    note(`The bound on the likelihood and its parts, per image, over ${plural(whole.length, "epoch")}. Each curve has its own scale. The total should rise and level off; if it is still rising, learning was stopped too early.`),
    h("div", { class: "charts" }, shown.map(([title, term, meaning]) => chart(title, whole.map(term), meaning))));
}

/** The jump after the first epoch can dwarf all others; it is then left out, and the axis says so. */
function chart(title, all, meaning) {
  const steep = all.length > 3 && Math.abs(all[1] - all[0]) > Math.abs(all.at(-1) - all[1]);
  const values = steep ? all.slice(1) : all;
  const label = `${title}: from ${figure(all[0])} at the first to ${figure(all.at(-1))} at the last of ${plural(all.length, "epoch")}`;
  return h("figure", { class: "chart" },
    h("figcaption", {}, h("b", {}, title), h("span", { class: "quiet" }, meaning)),
    plot(values.map((value, index) => [index, value]), label),
    h("p", { class: "ends quiet" }, h("span", {}, steep ? `epoch 2 (1: ${figure(all[0])})` : "epoch 1"), h("span", {}, `epoch ${all.length}`)));
}
