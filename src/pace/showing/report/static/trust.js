// Trust: the five desiderata with sanity checks for each, and how learning went.

const DESIDERATA = [
  { name: "faithfulness", question: "Can the prediction be recovered from the concepts?",
    check: "Concepts that see the prediction could just repeat it. So it is withheld, and the score is compared with always guessing the most frequent class.",
    beside: ["majority_class", "nonlinear_faithfulness", "class_echo", "concept_effect", "effect_by_lot", "effect_by_attention", "effect_at_best", "deletion", "insertion",
      "gain_over_lot", "gain_over_attention"] },
  { name: "stability", question: "Does the explanation survive a small change to the image?",
    check: "An explanation that is the same for every image is perfectly stable. So the change is compared with the distance between different images.",
    beside: ["between_images", "reidentification", "prediction_survival"] },
  { name: "sparsity", question: "Is an image explained by few concepts?",
    check: "A single concept for everything would be perfectly sparse. So check how many concepts an image really shows.",
    beside: ["hoyer_sparsity", "concepts_per_image"] },
  { name: "levels", question: "Does it explain the dataset, each image and each patch?",
    check: "If every patch of an image has the same concept, the patch level says nothing new. If one token has all the weight, neither does the image level.",
    beside: ["patch_variety", "cls_weight"] },
  { name: "n_concepts", question: "Are there few concepts overall (parsimony)?",
    check: "If only two of a hundred concepts are used, there are really only two.",
    beside: ["effective_concepts"] },
];

const TERMS = [
  ["Total", (bound) => bound[0] + bound[1] + bound[2], ["The bound ", h("i", {}, "L"), " that learning raises."]],
  ["Embeddings", (bound) => bound[0], ["How well the concepts fit the patches (", h("i", {}, "L"), h("sub", {}, "e"), ")."]],
  ["Faithfulness", (bound) => bound[1], ["How well they recover predictions (", h("i", {}, "L"), h("sub", {}, "f"), ")."]],
  ["Stability", (bound) => bound[2], ["How much more alike the two views of an image are than two images (", h("i", {}, "L"), h("sub", {}, "s"), ")."]],
];

const trustView = {
  title: "Trust",
  render() {
    return h("div", { class: "page" },
      h("header", { class: "lead" }, h("h1", {}, "Can it be trusted?"),
        note("An explanation can score well and still explain nothing. So each of the five main scores stands beside the numbers that would reveal it.")),
      verdict(), scoreSections(), facts(), bounds());
  },
};

function verdict() {
  if (data.warnings.length) {
    return h("section", { class: "card warning", role: "alert", "aria-labelledby": "warnings" },
      h("h2", { id: "warnings" }, data.warnings.length === 1 ? "One warning" : `${data.warnings.length} warnings`),
      h("ul", {}, data.warnings.map((text) => h("li", {}, text))));
  }
  return data.scores && h("p", { class: "card fine" }, "These numbers show no sign of collapse.");
}

function scoreSections() {
  if (!data.scores) {
    return h("section", { class: "card" }, h("h2", {}, "Not scored"),
      note("This report was made without scores, so it cannot say how far to trust it. Run pace evaluate before pace report, or pass scores=pace.metrics.evaluate(…) to write_report."));
  }
  const left = new Map(data.scores.map((score) => [score.name, score]));
  const take = (name) => { const score = left.get(name); left.delete(name); return score; };
  const sections = DESIDERATA.map(({ name, question, check, beside }) => {
    const main = take(name);
    const known = beside.map(take);
    const family = [...left.keys()].filter((other) => other.startsWith(`${name}_`)).map(take);
    const others = [...family, ...known].filter(Boolean);
    if (!main && !others.length) return null;
    return h("section", { class: "card claim", "aria-label": main?.title ?? question },
      h("div", { class: "asked" }, h("h2", {}, question), main ? scoreItem(main, true) : h("p", { class: "quiet" }, "Not scored here.")),
      h("div", { class: "exposed" }, h("h3", {}, "Sanity checks"), note(check), h("div", { class: "pairs" }, others.map((score) => scoreItem(score)))));
  });
  const rest = [...left.values()];
  return [sections, rest.length > 0 && h("section", { class: "card", "aria-labelledby": "more" },
    h("h2", { id: "more" }, "More scores"), h("div", { class: "pairs" }, rest.map((score) => scoreItem(score))))];
}

function scoreItem({ title, value, low, high, better, range, meaning }, large = false) {
  const bounded = range[0] !== null && range[1] !== null && range[1] > range[0] && value !== null;
  const text = (x) => (range[1] === 1 && x !== null ? x.toFixed(2) : figure(x)); // shares in shares' digits
  const at = (x) => `${(100 * (x - range[0])) / (range[1] - range[0])}%`;
  return h("div", { class: `score${large ? " large" : ""}` },
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
      fact(`${usedConcepts.length} of ${CONCEPTS}`, ["concepts hold at least one patch of these images.", emptyCount > 0 && ` ${stayedEmpty} when the model was fitted.`]),
      fact(figure(data.effective), "equally used concepts would be as varied as these. If that is far fewer than are in use, a few do most of the work."),
      data.prefix > 0 && fact(percent(data.prefixWeight, 0), "of the weight is on the summary token (CLS), which is not a patch. If that is nearly all of it, patches hardly count."),
      data.pointed && original.predictions && fact(percent(data.pointed.filter((n, m) => n === predictedClass(m)).length / IMAGES, 0),
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
