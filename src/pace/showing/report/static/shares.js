// Shares by attention (θ), as the model has them, or by area: of the picture, whatever the transformer looks at.

let byArea = false;
const areas = new Map(); // of a view, worked out when they are first asked for

function areasOf(view) {
  if (!areas.has(view)) {
    const found = new Float32Array(data.names.length * CONCEPTS);
    for (const m of everyImage()) {
      for (let patch = 0; patch < PATCHES; patch++) {
        const mixture = view.patch(m, patch);
        const whole = mixture.reduce((sum, [, share]) => sum + share, 0) || 1;
        for (const [k, share] of mixture) found[m * CONCEPTS + k] += share / whole / PATCHES;
      }
    }
    areas.set(view, found);
  }
  return areas.get(view);
}

/** Of a concept, of an image. */
const shareIn = (view, m, k) => (byArea ? areasOf(view)[m * CONCEPTS + k] : view.theta(m, k));
const partShareIn = (view, m, p) => kindsOf[p].reduce((sum, k) => sum + shareIn(view, m, k), 0);

/** Concepts of an image, the largest share first. */
const ranked = (m) => Array.from({ length: CONCEPTS }, (_, k) => k).sort((a, b) => shareIn(original, m, b) - shareIn(original, m, a) || a - b);

/** Of a concept, of all images. */
function shareOf(k) {
  if (!byArea) return data.concepts[k].share;
  let sum = 0;
  for (let m = 0; m < IMAGES; m++) sum += shareIn(original, m, k);
  return sum / IMAGES;
}
const partShareOf = (p) => (byArea ? kindsOf[p].reduce((sum, k) => sum + shareOf(k), 0) : data.parts[p].share);

/** The largest first; by attention they come so already. */
function byShare(items, share = shareOf) {
  if (!byArea) return items;
  const shares = new Map(items.map((item) => [item, share(item)]));
  return [...items].sort((a, b) => shares.get(b) - shares.get(a));
}

const countedHow = () => (byArea ? "Shares are of the area: every patch counts alike."
  : "Shares are weighted by attention: patches that get more of it from the transformer count more.");

/** The switch between the two; `changed` shows what is on the page anew. */
function sharesSwitch(changed) {
  const option = (area, text) => h("button", { type: "button", "aria-pressed": String(byArea === area), onclick: () => {
    byArea = area;
    changed();
    document.querySelector('.shares [aria-pressed="true"]').focus();
    say(countedHow());
  } }, text);
  return h("div", { class: "shares" }, h("span", { class: "quiet", id: "shares-by" }, "Shares by"),
    h("span", { class: "segments", role: "group", "aria-labelledby": "shares-by" }, option(false, "attention"), option(true, "area")));
}
