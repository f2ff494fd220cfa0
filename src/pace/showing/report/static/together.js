// How many images have how much of a concept, and which concepts come together.

const BINS = Array.from({ length: 10 }, (_, bin) => [Math.max(HELD, bin / 10), (bin + 1) / 10]);

/** A histogram of a concept's shares; a bar leads to the images of its height and more. */
function histogram(k) {
  const images = imagesWith(k);
  const counts = BINS.map(([low, high]) => images.filter((m) => shareIn(original, m, k) >= low && (shareIn(original, m, k) < high || high === 1)));
  const most = Math.max(...counts.map((found) => found.length));
  const ends = ([low, high]) => `${100 * low} to ${100 * high} %`;
  return h("section", { class: "card", "aria-labelledby": "histogram" },
    h("h2", { id: "histogram" }, "How much of it images have"),
    note(`${plural(images.length, "image has", "images have")} 1 % of it or more, ${data.names.length - images.length} less. `, countedHow()),
    h("ol", { class: "histogram", "aria-label": "Images by their share of it" }, counts.map((found, bin) => {
      const label = `${plural(found.length, "image has", "images have")} ${ends(BINS[bin])}`;
      const bar = [h("span", { class: "quiet figure" }, found.length || ""), h("span", { class: "column", style: { height: `${(100 * found.length) / most}%` } })];
      const shown = { class: "count", "aria-label": label, title: label };
      return h("li", {}, found.length ? h("a", { ...shown, href: link.image(found[0], { overlay: k, concept: k, min: bin > 0 ? 10 * bin : null }) }, bar)
        : h("span", { ...shown, role: "img" }, bar));
    })),
    h("p", { class: "quiet scale-ends", "aria-hidden": "true" }, h("span", {}, "1 %"), h("span", {}, "50 %"), h("span", {}, "100 %")));
}

/** Which images hold each concept: one byte for each image. By attention, whatever is shown: so are the concepts learned. */
const holders = (() => {
  const found = new Map();
  return (k) => {
    if (!found.has(k)) found.set(k, Uint8Array.from({ length: IMAGES }, (_, m) => original.theta(m, k) >= HELD));
    return found.get(k);
  };
})();

const TOGETHER = 5;

/** The concepts that come with one more often than by chance, those most alike in where they are first. */
function together(k) {
  const own = holders(k), count = own.reduce((sum, one) => sum + one, 0);
  return usedConcepts.filter((other) => other !== k).map((other) => {
    const its = holders(other);
    let both = 0, total = 0;
    for (let m = 0; m < IMAGES; m++) {
      both += own[m] & its[m];
      total += its[m];
    }
    const expected = (count * total) / IMAGES;
    const spread = Math.sqrt(count * (IMAGES - count) * total * (IMAGES - total)) / IMAGES;
    return { k: other, both, expected, alike: spread > 0 ? (both - expected) / spread : 0 };
  }).filter(({ both, alike }) => both > 1 && alike > 0.1).sort((a, b) => b.alike - a.alike).slice(0, TOGETHER);
}

const byChance = ({ both, expected }) => `in ${plural(both, "image")}, ${expected.toFixed(1)} by chance`;

function togetherList(k) {
  const found = together(k);
  return found.length > 0 && h("section", { class: "card", "aria-labelledby": "together" },
    h("h2", { id: "together" }, "Comes together with"),
    note("Concepts that the same images have (1 % or more) most often, compared with how often they would by chance."),
    h("ul", { class: "rows together" }, found.map((one) => h("li", {}, face(one.k), h("a", { href: link.concept(one.k) }, conceptName(one.k)), h("span", { class: "quiet" }, byChance(one))))));
}
