// The map of concepts: near ones lie close together, and lines join those that come together in images.

function mapView(query) {
  const places = data.map, shown = usedConcepts.filter((k) => places[k]);
  const height = Math.max(...shown.map((k) => places[k][1]));
  const at = (k) => [100 * places[k][0], height > 0 ? (100 * places[k][1]) / height : 50];
  const lines = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" });
  const aside = h("div", { class: "card panel", role: "region", "aria-label": "Concept on the map" });
  const most = Math.max(...shown.map(shareOf));
  let chosen = Number(query.get("concept") ?? shown[0]);
  if (!shown.includes(chosen)) chosen = shown[0];

  const draw = (k) => {
    lines.replaceChildren(...together(k).map(({ k: other, alike }) => {
      const [[x1, y1], [x2, y2]] = [at(k), at(other)];
      return svg("line", { x1, y1, x2, y2, "stroke-width": 1 + 5 * alike, "vector-effect": "non-scaling-stroke" });
    }));
    const near = data.concepts[k].neighbours, found = together(k);
    const names = (some) => some.map((other, index) => [index > 0 && ", ", h("a", { href: link.concept(other) }, conceptName(other))]);
    for (const spot of spots) spot.classList.toggle("joined", found.some((one) => one.k === Number(spot.dataset.concept)));
    aside.replaceChildren(h("h2", {}, h("a", { href: link.concept(k) }, conceptName(k)), " ", h("span", { class: "quiet figure" }, percent(shareOf(k)))), galleryStrip(k),
      h("p", {}, h("span", { class: "quiet" }, "Nearest: "), near.length ? names(near) : "none"),
      h("p", {}, h("span", { class: "quiet" }, "Comes with: "), found.length ? found.map((one, index) => [index > 0 && "; ", names([one.k]), ` ${byChance(one)}`]) : "none more often than by chance"));
  };
  const choose = (k, focus = false) => {
    chosen = k;
    for (const spot of spots) {
      const isOn = Number(spot.dataset.concept) === k;
      spot.tabIndex = isOn ? 0 : -1;
      spot.setAttribute("aria-pressed", String(isOn));
      if (isOn && focus) spot.focus();
    }
    draw(k);
    if (lines.isConnected) replaceAddress(address("concepts", "map", { concept: k }));
  };
  /** The arrow keys go to the nearest concept in their direction. */
  const walk = (event) => {
    const [across, down] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key] ?? [0, 0];
    if (!across && !down) return;
    event.preventDefault();
    const cost = (k) => {
      const [x, y] = [places[k][0] - places[chosen][0], places[k][1] - places[chosen][1]];
      const ahead = x * across + y * down;
      return ahead > 0 ? Math.hypot(x, y) ** 2 / ahead : Infinity; // half of a circle's width through both
    };
    const next = shown.reduce((best, k) => (cost(k) < cost(best) ? k : best), chosen);
    if (next !== chosen) choose(next, true);
  };
  const spots = shown.map((k) => {
    const [left, top] = at(k);
    return h("button", {
      type: "button", class: "place", "data-concept": String(k), "aria-label": `${conceptName(k)}, ${percent(shareOf(k))}`, title: conceptName(k),
      style: { left: `${left}%`, top: `${top}%`, "--size": String(0.7 + 0.8 * Math.sqrt(shareOf(k) / most)) },
      onpointerenter: (event) => event.pointerType === "mouse" && draw(k), onpointerleave: () => draw(chosen), onclick: () => choose(k), onkeydown: walk,
    }, face(k), h("span", { "aria-hidden": "true" }, data.concepts[k].short));
  });
  choose(chosen);
  return h("div", { class: "page" },
    h("header", { class: "lead" }, h("h1", {}, "Map of the concepts"), note(
      "Concepts whose patches look alike to the transformer lie near each other, and the more used are larger. ",
      shown.length > 5 && `A plane can show this only roughly: for ${percent(wellPlaced(shown), 0)} of the concepts, the nearest on the map is one of the four nearest in truth. `,
      "Choose a concept, or go from one to the next with the arrow keys; lines join it with those that come together with it in images.")),
    galleryOrMap("map"),
    h("div", { class: "mapped" }, h("div", { class: "map", role: "group", "aria-label": "Concepts", style: { "--shape": String(1 / Math.min(1, Math.max(0.5, height))) } }, lines, spots), aside));
}

/** The share of concepts whose nearest one on the map is one of their neighbours. */
function wellPlaced(shown) {
  const apart = (a, b) => Math.hypot(data.map[a][0] - data.map[b][0], data.map[a][1] - data.map[b][1]);
  const nearest = (k) => shown.reduce((best, other) => (other !== k && (best === null || apart(k, other) < apart(k, best)) ? other : best), null);
  return shown.filter((k) => data.concepts[k].neighbours.includes(nearest(k))).length / shown.length;
}

function galleryOrMap(which) {
  const tab = (name, text, href) => h("a", { class: "segment", href, "aria-current": which === name ? "true" : null }, text);
  return h("nav", { class: "segments", "aria-label": "Gallery or map" }, tab("gallery", "Gallery", address("concepts")), tab("map", "Map", address("concepts", "map")));
}
