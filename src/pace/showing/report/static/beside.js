// Two images side by side: coloured alike, with what one has more of than the other.

const BESIDE = 8; // concepts listed, and coloured

function beside(m, other, close) {
  if (other === m) {
    return h("section", { class: "card beside", "aria-label": "Side by side" }, h("p", {}, "Choose another image: it will be shown beside this one."),
      h("button", { type: "button", class: "button", onclick: close }, "Cancel"));
  }
  const [one, two] = [m, other].map((image) => (k) => shareIn(original, image, k));
  const largest = (k) => Math.max(one(k), two(k));
  const held = data.order.filter((k) => largest(k) >= HELD);
  const colours = coloursFor([...held].sort((a, b) => largest(b) - largest(a)).slice(0, BESIDE));
  const apart = [...held].sort((a, b) => Math.abs(one(b) - two(b)) - Math.abs(one(a) - two(a))).slice(0, BESIDE);
  const common = data.concepts.reduce((sum, _, k) => sum + Math.min(one(k), two(k)), 0);
  const reach = Math.max(...apart.map(largest));
  const bar = (name, share) => h("span", { class: `bar ${name}` }, h("span", { style: { width: `${(100 * share) / reach}%` } }));
  const picture = (image) => h("figure", {}, h("a", { href: link.image(image), "aria-label": describeImage(image) }, conceptMap(original, image, colours)),
    h("figcaption", { class: "quiet" }, h("b", {}, data.names[image]), predictedClass(image) !== null && `predicted ${data.classes[predictedClass(image)]}`));
  return h("section", { class: "card beside", "aria-labelledby": "beside" },
    h("div", { class: "headline" }, h("h2", { id: "beside" }, "Side by side"), h("button", { type: "button", class: "button", onclick: close }, "Close")),
    h("div", { class: "pair" }, picture(m), picture(other)),
    h("div", { class: "detail" }, note(h("b", {}, percent(common, 0)), " of what they are made of is the same. Here they differ most; the striped bar is the image on the right."),
    h("ul", { class: "rows theta", "aria-label": "Concepts in which they differ most" }, apart.map((k) => h("li", {}, face(k, true),
      h("span", { class: "who" }, colours.has(k) && h("span", { class: "swatch", "aria-hidden": "true", style: { background: colours.get(k) } }), h("a", { href: link.concept(k) }, conceptName(k))),
      h("span", { class: "figure" }, `${percent(one(k), 0)} · ${percent(two(k), 0)}`),
      h("span", { class: "bars", "aria-hidden": "true" }, bar("original", one(k)), bar("perturbed", two(k))))))));
}
