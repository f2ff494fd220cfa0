// Which images are listed: by name, class, concept and its share, and by what went wrong with them.

const FOLLOWED = 0.5; // share of the places that keep their concept from which an image counts as followed

const labelNumbers = new Map(data.classes.map((title, n) => [title, n]));
/** The class that an image is labelled with, if the transformer knows it. */
const labelledClass = (m) => labelNumbers.get(data.labels?.[m]) ?? null;

const isMisclassified = (m) => labelledClass(m) !== null && predictedClass(m) !== null && predictedClass(m) !== labelledClass(m);
/** The concepts point to another class than the transformer predicts. */
const isDoubtful = (m) => data.pointed !== null && predictedClass(m) !== null && data.pointed[m] !== predictedClass(m);
const isLost = (m) => keptPlaces(m).filter(Boolean).length < FOLLOWED * PATCHES;

/** What may be wrong with an image, as far as that is known here: by name, what it is called and which images it is. */
const FAULTS = (() => {
  const everything = everyImage();
  const known = [
    ["misclassified", "Misclassified", isMisclassified, original.predictions && everything.some((m) => labelledClass(m) !== null)],
    ["doubtful", "Do not trust", isDoubtful, data.pointed && original.predictions],
    ["lost", "Not followed", isLost, places],
  ];
  return new Map(known.filter(([, , , isKnown]) => isKnown).map(([name, title, test]) => [name, { title, test, images: new Set(everything.filter(test)) }]));
})();

/** The images that a state of the Images view lists; those with most of a chosen concept first. */
function listed({ q, class: n, concept: k, min, fault }) {
  const words = q.toLowerCase().split(/\s+/).filter(Boolean);
  const found = k === null ? everyImage() : imagesWith(k, Math.max(HELD, min / 100));
  return found.filter((m) => (n === null || predictedClass(m) === n) && (fault === null || FAULTS.get(fault).images.has(m))
    && words.every((word) => searchText(m).includes(word)));
}

/** Choices for these; `set(change)` is called with what was chosen. `show(state)` keeps them in step. */
function filterControls(set) {
  const choice = (name, every, options, value = Number) => h("select", { id: `image-${name}`, onchange: (event) => set({ [name]: event.target.value === "" ? null : value(event.target.value) }) },
    h("option", { value: "" }, every), options.map(([key, text, count]) => h("option", { value: String(key) }, `${text} (${count})`)));
  const search = h("input", {
    type: "search", id: "image-search", placeholder: "Name or class", autocomplete: "off", spellcheck: "false", oninput: () => set({ q: search.value }),
  });
  const selects = {
    class: CLASSES > 0 && original.predictions && choice("class", "Any class", predictedClasses().map(([n, count]) => [n, data.classes[n], count])),
    concept: choice("concept", "Any concept", data.order.map((k) => [k, conceptName(k), imagesWith(k).length])),
    fault: FAULTS.size > 0 && choice("fault", "Every image", [...FAULTS].map(([name, { title, images }]) => [name, title, images.size]), String),
  };
  const min = h("input", { type: "range", id: "image-min", min: "1", max: "100", oninput: () => set({ min: Number(min.value) }) });
  const least = h("output", { for: "image-min", class: "figure" });
  const share = [h("label", { for: "image-min" }, "At least"), h("span", { class: "least" }, min, least)];
  const labelled = (name, text) => selects[name] && [h("label", { for: `image-${name}` }, text), selects[name]];
  return {
    element: h("div", { class: "filters" }, h("label", { for: "image-search" }, "Search"), search,
      labelled("class", "Predicted as"), labelled("fault", "Show"), labelled("concept", "Contains"), share),
    show(state) {
      if (search.value !== state.q) search.value = state.q;
      for (const [name, select] of Object.entries(selects)) if (select) select.value = state[name] === null ? "" : String(state[name]);
      for (const part of share) part.hidden = state.concept === null;
      min.value = String(state.min);
      least.textContent = `${state.min} %`;
    },
  };
}

/** What is wrong with an image, for its headline. */
const faultsOf = (m) => [...FAULTS.values()].filter(({ images }) => images.has(m)).map(({ title }) => h("span", { class: "fault" }, title));
