// Classes: the concepts that speak for each of them, and the images that show them best.

const classesView = {
  title: "Classes",
  render(item, query) {
    if (CLASSES === 0) {
      return h("div", { class: "page" }, h("header", { class: "lead" }, h("h1", {}, "No classes"),
        note("The concepts were learned without the transformer's predictions, so they speak for no class. Fit the model on observations with predictions to see this view.")));
    }
    const n = Number(item);
    return item !== null && n in data.classes ? oneClass(n) : allClasses(query);
  },
};

function predictedAs(n) {
  return original.predictions ? original.predictions.reduce((count, [[first]]) => count + (first === n), 0) : null;
}

function allClasses(query) {
  const order = Array.from({ length: CLASSES }, (_, n) => n).sort((a, b) => (predictedAs(b) ?? 0) - (predictedAs(a) ?? 0) || a - b);
  const cards = order.map((n) => classCard(n));
  const count = h("p", { class: "quiet", role: "status" });
  const search = h("input", { type: "search", id: "class-search", placeholder: "Class name", autocomplete: "off", spellcheck: "false", value: query.get("q") ?? "" });
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    order.forEach((n, index) => { cards[index].hidden = !words.every((word) => `${data.classes[n]} ${data.classNames[n]}`.toLowerCase().includes(word)); });
    const shown = cards.filter((card) => !card.hidden).length;
    count.textContent = shown === CLASSES ? plural(CLASSES, "class", "classes") : `${shown} of ${plural(CLASSES, "class", "classes")}`;
  };
  const remember = settle(() => search.isConnected && replaceAddress(address("classes", null, { q: search.value })), 200);
  search.addEventListener("input", () => { filter(); remember(); });
  search.addEventListener("keydown", (event) => event.key === "Enter" && cards.find((card) => !card.hidden)?.querySelector("a").click());
  filter();
  return h("div", { class: "page" },
    h("header", { class: "lead" }, h("h1", {}, "Classes"),
      note("A concept speaks for a class if the class's images contain much of it (θ) and the class is likelier where the concept is. Images belong to the class the transformer predicts, right or wrong.")),
    h("div", { class: "filters inline" }, h("label", { for: "class-search" }, "Search"), search, count, csvButton("classes", () => classRows(order.filter((n, index) => !cards[index].hidden)))),
    h("ul", { class: "cards", "aria-label": "Classes" }, cards));
}

function classCard(n) {
  const found = data.classConcepts[n].slice(0, 3);
  const count = predictedAs(n);
  return h("li", { class: "card class" },
    h("h2", {}, h("a", { class: "cover clip", href: link.class(n), title: data.classNames[n] }, data.classes[n]), count !== null && h("span", { class: "figure" }, plural(count, "image"))),
    found.length ? h("ol", { class: "voices" }, found.map(([k]) => h("li", {}, face(k), conceptName(k))))
      : h("p", { class: "quiet" }, "No concept in use speaks for this class."));
}

function oneClass(n) {
  const found = data.classConcepts[n];
  const count = predictedAs(n);
  return h("div", { class: "page" },
    h("nav", { class: "crumbs", "aria-label": "Classes" }, h("a", { href: "#/classes" }, "All classes"),
      count > 0 && h("span", { class: "steps" }, h("a", { class: "button", href: address("images", data.original.predictions.findIndex(([[first]]) => first === n), { class: n }) }, `See its ${plural(count, "image")}`))),
    h("header", { class: "lead" }, h("h1", {}, data.classes[n]),
      data.classNames[n] !== data.classes[n] && h("p", { class: "facts" }, h("span", {}, "in the data ", h("b", {}, data.classNames[n]))),
      note(found.length ? "The concepts that speak most for this class, strongest first. " : "No concept in use speaks for this class. ",
        count === 0 ? "None of these images is predicted as this class, so the ranking uses all images." : "")),
    found.map(([k, strength, images], index) => h("section", { class: "card voice", "aria-labelledby": `voice-${k}` },
      h("h2", { id: `voice-${k}` }, h("span", { class: "quiet" }, `${index + 1} `), h("a", { href: link.concept(k) }, conceptName(k)), h("span", { class: "figure" }, signedNumber(strength))),
      h("div", {}, h("h3", {}, "Typical patches"), h("div", { class: "strip" }, data.concepts[k].near.slice(0, 5).map(([m, patch]) =>
        h("a", { href: link.image(m, { patch }), "aria-label": `${data.names[m]}, patch at ${place(patch)}` }, crop(m, patch))))),
      images.length > 0 && h("div", {}, h("h3", {}, "Images of the class with most of it"), h("div", { class: "samples small" }, images.map((m) => imageCard(m, k)))))),
    found.length > 0 && note("The number is the concept's mean share of the class's images (θ) times how much likelier the class is where the concept is."),
    PARTS > 0 && count > 0 && contrastCard(n));
}

/** The mean share (K) of every concept in the images predicted as a class. */
function meanShares(n) {
  const images = everyImage().filter((m) => predictedClass(m) === n);
  return Array.from({ length: CONCEPTS }, (_, k) => images.reduce((sum, m) => sum + original.theta(m, k), 0) / images.length);
}

/** The parts of which two classes mostly have different kinds, as `contrast` of summary.py has them: [part, kind, kind, difference]. */
function contrast(a, b) {
  const [inA, inB] = [meanShares(a), meanShares(b)];
  return kindsOf.map((kinds, p) => {
    const [sumA, sumB] = [inA, inB].map((shares) => kinds.reduce((sum, k) => sum + shares[k], 0));
    const [leadA, leadB] = [inA, inB].map((shares) => kinds.reduce((best, k) => (shares[k] > shares[best] ? k : best)));
    if (Math.min(sumA, sumB) < HELD || leadA === leadB) return null;
    return [p, leadA, leadB, kinds.reduce((sum, k) => sum + Math.abs(inA[k] / sumA - inB[k] / sumB), 0) / 2];
  }).filter(Boolean).sort((one, other) => other[3] - one[3]);
}

function contrastCard(n) {
  const others = Array.from({ length: CLASSES }, (_, other) => other).filter((other) => other !== n && predictedAs(other) > 0);
  if (!others.length) return null;
  const found = h("div", {});
  const kind = (k) => h("span", { class: "kind" }, [0, 1, 2].map((next) => face(k, true, next)), h("a", { href: link.concept(k), "aria-label": conceptName(k) }, kindName(k)));
  const show = (other) => {
    const parts = contrast(n, other);
    found.replaceChildren(parts.length ? h("ul", { class: "rows contrast", "aria-label": `Parts that differ from ${data.classes[other]}` }, parts.map(([p, mine, theirs, difference]) =>
      h("li", {}, h("b", {}, partName(p)), kind(mine), kind(theirs), h("span", { class: "figure" }, percent(difference, 0)))))
      : h("p", { class: "quiet" }, "All parts are mostly of the same kinds in both classes."));
  };
  const select = h("select", { id: "other", onchange: () => show(Number(select.value)) }, others.map((other) => h("option", { value: String(other) }, data.classes[other])));
  show(others[0]);
  return h("section", { class: "card", "aria-labelledby": "contrast" },
    h("h2", { id: "contrast" }, "What tells it from another class"),
    h("p", { class: "pick" }, h("label", { for: "other" }, "Compared with "), select),
    found,
    note("The parts that are mostly of one kind here (left) and of another there (right). The percentage is how much of the part's kinds differs: 100 % means that the classes share no kind of it."));
}
