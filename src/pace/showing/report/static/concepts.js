// Concepts: the gallery, ordered by use, and one concept.

const MOST = 8; // images of a concept, on its page

// Of those that are not empty; a concept may hold patches of other images and none of these.
const usedConcepts = data.order.filter((k) => data.concepts[k].used);
const unusedConcepts = data.order.filter((k) => !data.concepts[k].used);
const hiddenConcepts = data.concepts.flatMap(({ hidden, near }, k) => (hidden && near.length ? [k] : []));
const mergedCount = data.concepts.filter(({ into }) => into !== null).length;
const heldCount = data.order.length + hiddenConcepts.length;
const emptyCount = CONCEPTS - heldCount - mergedCount;
const stayedEmpty = `${emptyCount} of ${plural(CONCEPTS, "concept")} stayed empty`;

const conceptsView = {
  title: "Concepts",
  render(item, query) {
    const k = Number(item);
    if (item === "map" && usedConcepts.length) return mapView(query);
    if (item === null || !(k in data.concepts)) return gallery();
    return data.concepts[k].near.length ? oneConcept(k) : emptyConcept(k);
  },
};

/** The parts that hold patches of these images, largest first. */
const usedParts = Array.from({ length: PARTS }, (_, p) => p).filter((p) => kindsOf[p].some((k) => data.concepts[k].used))
  .sort((a, b) => data.parts[b].share - data.parts[a].share);

function gallery() {
  return h("div", { class: "page" },
    PARTS ? h("header", { class: "lead" },
      h("h1", {}, plural(usedParts.length, "part"), " of ", plural(usedConcepts.length, "kind"), " in ", plural(IMAGES, "image")),
      note("An image is made of parts, and in an image every part has one kind; a concept is a kind of a part. Each card shows a kind's most typical patches, framed within their surroundings, each from a different image. ",
        "Percentages are shares of the images shown here. ", countedHow())) : h("header", { class: "lead" },
      h("h1", {}, plural(usedConcepts.length, "concept"), " in ", plural(IMAGES, "image")),
      note("A concept is a kind of patch that the transformer treats alike. Each card shows a concept's most typical patches, framed within their surroundings, each from a different image. ",
        "The percentage is the concept's share of the images shown here. ", countedHow())),
    h("div", { class: "headline" }, galleryOrMap("gallery"), h("div", { class: "tools" }, data.live && undoButton(), sharesSwitch(show), csvButton("concepts", () => conceptRows(byShare(usedConcepts))))),
    PARTS ? byShare(usedParts, partShareOf).map(partGallery) : h("ul", { class: "cards", "aria-label": "Concepts by use, most used first" }, byShare(usedConcepts).map((k) => conceptCard(k, "h2"))),
    unusedConcepts.length > 0 && h("details", { class: "fold" },
      h("summary", {}, plural(unusedConcepts.length, "concept is", "concepts are"), " not in use"),
      note("Each of these holds less than one patch of these images. The patches below are just the nearest ones."),
      h("ul", { class: "cards" }, unusedConcepts.map((k) => conceptCard(k)))),
    (hiddenConcepts.length > 0 || mergedCount > 0) && note([hiddenConcepts.length && `${plural(hiddenConcepts.length, "concept is", "concepts are")} hidden`, mergedCount && `${mergedCount} merged into others`].filter(Boolean).join(", "), "."),
    data.live && hiddenLinks(),
    emptyCount > 0 && note(`${stayedEmpty}: they got no patches when the model was fitted.`, data.selection && [" ", h("a", { href: "#/number" }, "How the number was found"), "."]));
}

function partGallery(p) {
  const used = byShare(data.parts[p].kinds.filter((k) => data.concepts[k].used));
  return h("section", { class: "part", "aria-labelledby": `part-${p}` },
    h("h2", { id: `part-${p}` }, partName(p), h("span", { class: "quiet figure" }, `${percent(partShareOf(p))} · ${plural(used.length, "kind")}`), data.live && partTools(p)),
    h("ul", { class: "cards", "aria-label": `Kinds of ${data.parts[p].name}, most used first` }, used.map((k) => conceptCard(k, "h3", capital(kindName(k))))));
}

function emptyConcept(k) {
  return h("div", { class: "page" },
    h("nav", { class: "crumbs", "aria-label": "Concepts" }, h("a", { href: "#/concepts" }, "All concepts")),
    h("header", { class: "lead" }, h("h1", {}, conceptName(k)), data.concepts[k].into !== null
      ? note("This concept was merged into ", h("a", { href: link.concept(data.concepts[k].into) }, conceptName(data.concepts[k].into)), ".")
      : note(`This concept stayed empty: it got no patches when the model was fitted. ${stayedEmpty}.`)));
}

function oneConcept(k) {
  const { near, neighbours, used, part, short, given, hidden } = data.concepts[k];
  const siblings = part === null ? [] : data.parts[part].kinds.filter((other) => other !== k && data.concepts[other].used);
  const order = byShare(hidden ? [] : data.order), position = order.indexOf(k);
  const step = (to, text) => to !== undefined && h("a", { class: "button", href: link.concept(to) }, text);
  const images = imagesWith(k);
  return h("div", { class: "page" },
    h("nav", { class: "crumbs", "aria-label": "Concepts" },
      h("a", { href: "#/concepts" }, "All concepts"),
      h("span", { class: "steps" }, step(order[position - 1], "← More used"), step(order[position + 1], "Less used →"))),
    h("header", { class: "lead" },
      h("h1", {}, conceptName(k)),
      h("p", { class: "facts" },
        h("span", {}, h("b", {}, percent(shareOf(k))), " of these images"),
        given && h("span", {}, "concept ", h("b", {}, short)),
        hidden && h("span", {}, "hidden from lists"),
        used && !hidden && h("span", {}, h("b", {}, `#${position + 1}`), ` of ${usedConcepts.length} by use`), sharesSwitch(show)),
      data.live && conceptTools(k),
      !used && note("This concept holds less than one patch of these images: it is not in use, and the patches below are just the nearest ones.")),
    h("section", { "aria-labelledby": "near" },
      h("h2", { id: "near" }, "Most typical patches"),
      note("The patches whose embeddings are nearest to the concept's mean, one per image. The small picture shows the patch enlarged. Click one to open its image."),
      h("div", { class: "samples" }, near.map(([m, patch]) => galleryItem(m, patch)))),
    CLASSES > 0 && h("section", { "aria-labelledby": "speaks" },
      h("h2", { id: "speaks" }, "Classes it speaks for"),
      note("How much likelier the class is in images of this concept than in all images the concepts were learned from: +0.20 is 20 points of its probability. By the transformer's predictions, not by labels."),
      evidenceList(k)),
    images.length > 0 && h("section", { "aria-labelledby": "images" },
      h("h2", { id: "images" }, "Images with most of it"),
      note("The bright patches belong to the concept; the percentage is its share of the image", !byArea && " (θ)", "."),
      h("div", { class: "samples wide" }, images.slice(0, MOST).map((m) => imageCard(m, k))),
      images.length > MOST && h("a", { class: "button", href: link.image(images[0], { overlay: k, concept: k }) }, `See all ${plural(images.length, "image")}`)),
    images.length > 0 && histogram(k),
    togetherList(k),
    siblings.length > 0 && h("section", { "aria-labelledby": "siblings" },
      h("h2", { id: "siblings" }, `Other kinds of ${data.parts[part].name}`),
      note("What the same part looks like in other images."),
      h("ul", { class: "cards" }, siblings.map((other) => conceptCard(other)))),
    neighbours.length > 0 && h("section", { "aria-labelledby": "neighbours" },
      h("h2", { id: "neighbours" }, "Neighbours"),
      note("The concepts in use with the nearest means. Two that look the same may be one concept split in two. ", used && h("a", { href: address("concepts", "map", { concept: k }) }, "See it on the map"), used && "."),
      h("ul", { class: "cards" }, neighbours.map((other) => conceptCard(other)))));
}

function imageCard(m, k) {
  return h("a", { class: "sample image", href: link.image(m, { patch: bestPatch(m, k), overlay: k }) },
    highlighted(m, k),
    h("span", { class: "caption" }, h("span", { class: "clip" }, data.names[m]), h("b", {}, percent(shareIn(original, m, k)))));
}

function evidenceList(k) {
  const ranked = classesOf(k);
  const reach = Math.max(...ranked.map(([, value]) => Math.abs(value)));
  const ends = ranked.length > 8 ? [...ranked.slice(0, 5), ...ranked.slice(-3)] : ranked;
  return h("ul", { class: "rows", "aria-label": "Classes, most favoured first" }, ends.map(([n, value], index) =>
    h("li", { class: ranked.length > 8 && index === 5 ? "gap" : null },
      h("a", { class: "clip", href: link.class(n) }, data.classes[n]), twoSided(value, reach), h("span", { class: "figure" }, signedNumber(value)))));
}
