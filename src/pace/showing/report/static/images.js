// Images: choose one, see its patches, its mixture and its prediction.

const TOP = 8; // concepts or parts shown before "show all"
const SURE = 0.95; // a part whose kind is less likely says so

const imagesView = {
  title: "Images",
  canFollow: places !== null && hasPerturbedPictures,
  state: { image: 0, patch: null, on: "original", overlay: null, class: null, concept: null, min: 1, fault: null, beside: null, off: null, q: "" },

  render(item, query) {
    if (!this.element) this.build();
    this.read(item, query);
    this.filter();
    this.showImage();
    return this.element;
  },

  /** Once it is on the page, the list can scroll to its image. */
  afterwards() {
    this.markItem();
  },

  /** The state from the address; anything invalid is ignored. */
  read(item, query) {
    const whole = (text, count) => (/^\d+$/.test(text ?? "") && Number(text) < count ? Number(text) : null);
    const overlay = query.get("overlay");
    this.state = {
      image: whole(item, data.names.length) ?? this.state.image,
      patch: whole(query.get("patch"), PATCHES),
      on: query.get("on") === "perturbed" && hasPerturbedPictures ? "perturbed" : "original",
      overlay: overlay === "all" || (overlay === "kept" && this.canFollow) || partOfOverlay(overlay) !== null ? overlay : whole(overlay, CONCEPTS),
      class: whole(query.get("class"), CLASSES),
      concept: whole(query.get("concept"), CONCEPTS),
      min: whole(query.get("min"), 101) || 1,
      fault: FAULTS.has(query.get("fault")) ? query.get("fault") : null,
      beside: whole(query.get("beside"), data.names.length),
      off: query.get("off"), // only on a live page
      q: query.get("q") ?? "",
    };
  },

  address() {
    const { image, patch, on, overlay, class: n, concept, min, fault, beside: other, off, q } = this.state;
    return address("images", image, {
      patch, on: on === "perturbed" && patch !== null ? on : null, overlay, class: n, concept, min: concept !== null && min > 1 ? min : null, fault, beside: other, off, q,
    });
  },

  /** Arrow keys held down would flood the history, so the address is updated when they are released. */
  remember: settle(() => imagesView.element.isConnected && replaceAddress(imagesView.address()), 200),

  set(change) {
    Object.assign(this.state, change);
    this.remember();
  },

  // -- built once ------------------------------------------------------------------------------------------------

  build() {
    const callbacks = { onHover: (view, patch) => this.hover(view, patch), onPick: (view, patch) => this.pick(view, patch) };
    this.pickers = [new Picker(original, "Original", callbacks)];
    if (hasPerturbedPictures) this.pickers.push(new Picker(perturbed, "Perturbed", callbacks));
    this.heading = h("h1", {});
    this.subtitle = h("p", { class: "facts" });
    this.panel = h("section", { class: "card panel", "aria-label": "Patch" });
    this.overlays = h("div", { class: "segments", role: "group", "aria-label": "Overlay" });
    this.followed = h("p", { class: "note" });
    this.legend = h("p", { class: "note" });
    this.detail = h("div", { class: "detail" });
    this.other = h("div", {});
    this.element = h("div", { class: "page images" },
      this.buildBrowser(),
      h("div", { class: "work" },
        h("header", { class: "lead" }, h("div", { class: "headline" }, this.heading, this.buildSteps()), this.subtitle),
        this.other,
        h("div", { class: "columns" },
          h("div", { class: "look" },
            h("div", { class: `pickers${hasPerturbedPictures ? " two" : ""}` }, this.pickers.map((picker) => picker.element)),
            this.followed,
            this.overlays,
            this.legend,
            h("p", { id: "picker-help", class: "note" }, "Point at a patch, tap it, or use the arrow keys; Escape clears the selection."),
            this.panel),
          this.detail)));
  },

  buildBrowser() {
    this.items = data.names.map((name, m) => h("li", {}, h("button", {
      type: "button", tabindex: "-1", title: name, "aria-label": describeImage(m), onclick: () => this.choose(m),
    }, thumbnail(m))));
    this.filters = filterControls((change) => this.narrow(change));
    this.count = h("p", { class: "quiet", role: "status" });
    this.list = h("ul", { class: "browser-list", "aria-label": "Images; move with the arrow keys", onkeydown: (event) => this.walkList(event) }, this.items);
    return h("aside", { class: "browser", "aria-label": "Choose an image" },
      this.filters.element, h("div", { class: "headline" }, this.count, csvButton("images", () => imageRows(this.matching))), this.list);
  },

  buildSteps() {
    const step = (by, text, label) => h("button", { type: "button", class: "button", "aria-label": label, onclick: () => {
      const at = this.matching.indexOf(this.state.image);
      if (this.matching.length) this.choose(this.matching[(at + by + this.matching.length) % this.matching.length]);
    } }, text);
    return h("span", { class: "steps" }, step(-1, "←", "Previous image"), step(1, "→", "Next image"),
      h("button", { type: "button", class: "button", onclick: () => { this.set({ beside: this.state.image }); this.showBeside(); } }, "Set beside another"));
  },

  // -- the list --------------------------------------------------------------------------------------------------

  /** Choose which images are listed, and go to the first of them if the present one is not. */
  narrow(change) {
    this.set(change);
    this.filter();
    if (this.matching.length && !this.matching.includes(this.state.image)) this.choose(this.matching[0]);
  },

  filter() {
    this.matching = listed(this.state);
    const shown = new Set(this.matching);
    this.items.forEach((item, m) => { item.hidden = !shown.has(m); });
    const order = this.matching.join();
    if (order !== this.order) this.list.append(...this.matching.map((m) => this.items[m]));
    this.order = order;
    this.filters.show(this.state);
    this.count.textContent = this.matching.length === data.names.length ? plural(data.names.length, "image") : `${this.matching.length} of ${plural(data.names.length, "image")}`;
    this.markItem();
  },

  /** One image of the list can be reached with Tab; the arrow keys go on from there. */
  markItem(focus = false) {
    const reachable = this.matching.includes(this.state.image) ? this.state.image : this.matching[0];
    this.items.forEach((item, m) => {
      const button = item.firstChild;
      button.tabIndex = m === reachable ? 0 : -1;
      if (m === this.state.image) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    });
    const current = this.items[reachable]?.firstChild;
    if (focus) current?.focus();
    // Scrolls the list alone, never the page.
    if (current) {
      const list = this.list.getBoundingClientRect(), box = current.getBoundingClientRect();
      if (box.top < list.top || box.bottom > list.bottom) this.list.scrollTop += box.top - list.top - list.height / 2;
      if (box.left < list.left || box.right > list.right) this.list.scrollLeft += box.left - list.left - list.width / 2;
    }
  },

  walkList(event) {
    const here = this.matching.indexOf(this.state.image);
    const across = this.rowLength();
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, ArrowDown: here + across, ArrowUp: here - across, Home: 0, End: this.matching.length - 1 }[event.key];
    if (to === undefined || !(to in this.matching)) return;
    event.preventDefault();
    this.choose(this.matching[to], true);
  },

  rowLength() {
    const shown = this.matching.map((m) => this.items[m].offsetTop);
    const next = shown.findIndex((top) => top > shown[0]);
    return next < 0 ? 1 : next;
  },

  choose(m, focus = false) {
    this.set({ image: m, off: null });
    this.showImage();
    this.markItem(focus);
    say(describeImage(m));
  },

  // -- one image -------------------------------------------------------------------------------------------------

  showImage() {
    const m = this.state.image;
    this.heading.textContent = data.names[m];
    this.subtitle.replaceChildren(...[
      data.labels?.[m] && h("span", {}, "labelled ", h("b", {}, data.labels[m])),
      original.predictions && h("span", {}, "predicted ", h("b", {}, data.classes[predictedClass(m)] ?? `class ${predictedClass(m)}`)),
          faultsOf(m),
    ].flat().filter(Boolean));
    this.pickers.forEach((picker) => picker.show(m));
    this.followed.replaceChildren(...keptNote(m));
    this.showAll = false;
    this.showOverlay();
    this.showPatch();
    this.showBeside();
    document.title = `${data.names[m]} · ${data.title}`;
  },

  showBeside() {
    const { beside: first, image } = this.state;
    this.other.replaceChildren(...(first === null ? [] : [beside(first, image, () => { this.set({ beside: null }); this.showBeside(); })]));
  },

  showOverlay() {
    const { overlay } = this.state;
    const option = (value, text) => h("button", {
      type: "button", "aria-pressed": String(overlay === value), onclick: () => { this.set({ overlay: value }); this.showOverlay(); },
    }, text);
    const focused = this.overlays.contains(document.activeElement) ? [...this.overlays.children].indexOf(document.activeElement) : -1;
    this.overlays.replaceChildren(option(null, "Picture"), option("all", "All concepts"),
      ...(this.canFollow ? [option("kept", "Kept concepts")] : []),
      ...(overlay === null || overlay === "all" || overlay === "kept" ? [] : [option(overlay, overlayName(overlay))]));
    if (focused >= 0) this.overlays.children[Math.min(focused, this.overlays.children.length - 1)].focus();
    this.colours = coloursFor(overlay === "all" ? colouredIn(this.state.image) : []);
    this.pickers.forEach((picker) => picker.overlay(overlay, this.colours));
    this.legend.textContent = overlay === "kept" ? "Green places kept their concept, crossed ones changed it. The bright part of the original is what the perturbed view shows."
      : this.pickers.some((picker) => picker.isPartlyGrey) ? "Grey patches belong to concepts with fewer patches in this image." : "";
    this.legend.hidden = !this.legend.textContent;
    this.showDetail();
  },

  /** Highlight a concept or a part ("part-2"), or no longer. */
  toggle(what) {
    const overlay = this.state.overlay === what ? null : what;
    this.set({ overlay });
    this.showOverlay();
    this.detail.querySelector(`[data-toggle="${what}"]`)?.focus();
    say(overlay === null ? "Overlay off" : `${overlayName(what)} is highlighted in the image`);
  },

  // -- patches ---------------------------------------------------------------------------------------------------

  hover(view, patch) {
    if (patch === null) return this.showPatch();
    if (this.shown === `${view.name} ${patch}`) return;
    this.frame(view, patch);
    this.fillPanel(view, patch);
  },

  pick(view, patch) {
    this.set({ patch, on: view.name });
    this.showPatch();
    say(patch === null ? "No patch selected" : describePatch(view, this.state.image, patch));
  },

  /** The selected patch, once the pointer has left. */
  showPatch() {
    const { patch, on } = this.state;
    const view = on === "perturbed" ? perturbed : original;
    this.frame(view, patch);
    this.fillPanel(view, patch);
  },

  /** A patch, and what a patch of the perturbed view shows in the picture. */
  frame(view, patch) {
    const there = view === perturbed && patch !== null && places ? placeOf(this.state.image, patch) : null;
    this.pickers.forEach((picker) => picker.mark(picker.view === view ? patch : there));
  },

  fillPanel(view, patch) {
    const m = this.state.image;
    this.shown = `${view.name} ${patch}`;
    if (patch === null) {
      const k = ranked(m).find((other) => !isHidden(other));
      this.panel.replaceChildren(h("h2", {}, "No patch selected"),
        h("p", { class: "quiet" }, `The largest concept of this image is ${conceptName(k)}:`), galleryStrip(k));
      return;
    }
    const mixture = view.patch(m, patch);
    const weight = view.weight(m, data.prefix + patch) * TOKENS;
    const [k] = mixture[0];
    this.panel.replaceChildren(...[
      h("h2", {}, "Patch at ", place(patch), view === perturbed && h("span", { class: "quiet" }, " · perturbed")),
      view === perturbed && places && h("p", { class: "note" }, keptText(m, patch)),
      h("ul", { class: "rows mixture", "aria-label": "Concepts of this patch" }, mixture.map(([concept, share]) => h("li", {},
        face(concept, true), h("a", { href: link.concept(concept) }, conceptName(concept)),
        h("span", { class: "bar", "aria-hidden": "true" }, h("span", { style: { width: `${100 * share}%` } })),
        h("span", { class: "figure" }, percent(share, 0))))),
      h("p", { class: "note" }, "It counts as ", h("b", {}, weight.toFixed(1)), weight.toFixed(1) === "1.0" ? " average patch" : " average patches",
        ", going by the attention it gets. Typical patches of ", h("a", { href: link.concept(k) }, conceptName(k)), ":"),
      galleryStrip(k),
    ].filter(Boolean));
  },

  // -- mixture and prediction ------------------------------------------------------------------------------------

  showDetail() {
    const m = this.state.image;
    this.detail.replaceChildren(...[data.live && outcome(), PARTS ? this.partMixture(m) : this.mixture(m), this.prediction(m)].filter(Boolean));
  },

  mixture(m) {
    // Concepts that only the perturbed image shows are listed as well.
    const larger = (k) => Math.max(shareIn(original, m, k), perturbed ? shareIn(perturbed, m, k) : 0);
    const held = ranked(m).filter((k) => larger(k) > 0.002), used = held.filter((k) => !isHidden(k));
    const largest = new Set([...used].sort((a, b) => larger(b) - larger(a)).slice(0, this.showAll ? CONCEPTS : TOP));
    const rows = used.filter((k) => largest.has(k));
    const reach = Math.max(...rows.map((k) => (byArea ? larger(k) : Math.max(original.high(m, k), perturbed ? perturbed.high(m, k) : 0))));
    return h("section", { class: "card", "aria-labelledby": "mixture" },
      h("h2", { id: "mixture" }, "What this image is made of"),
      sharesSwitch(() => { this.remember(); this.filter(); this.showDetail(); this.showBeside(); }),
      note(countedHow(), shareNote(), " Click a concept's picture to highlight it in the image.", hiddenNote(held)),
      h("ul", { class: "rows theta" }, rows.map((k) => {
        const isOn = this.state.overlay === k;
        return h("li", {},
          h("button", { type: "button", class: "toggle", "data-toggle": String(k), "aria-pressed": String(isOn), "aria-label": `Highlight ${conceptName(k)} in the image`, onclick: () => this.toggle(k) }, face(k, true)),
          h("span", { class: "who" }, this.colours.has(k) && h("span", { class: "swatch", "aria-hidden": "true", style: { background: this.colours.get(k) } }),
            h("a", { href: link.concept(k) }, conceptName(k))),
          h("small", {}, interval(original, m, k), perturbed && `${byArea ? "" : " · "}perturbed ${percent(shareIn(perturbed, m, k), 0)}`),
          h("span", { class: "figure" }, percent(shareIn(original, m, k), 0)),
          h("span", { class: "bars", "aria-hidden": "true" }, intervalBar(original, m, k, reach), perturbed && intervalBar(perturbed, m, k, reach)),
          data.live && conceptSwitch(k));
      })),
      used.length > rows.length && h("button", { type: "button", class: "button", onclick: () => { this.showAll = true; this.showDetail(); } }, `Show all ${used.length}`),
      data.prefix > 0 && prefixNote(m),
      perturbed && movedNote(m));
  },

  partMixture(m) {
    const larger = (p) => Math.max(partShareIn(original, m, p), perturbed ? partShareIn(perturbed, m, p) : 0);
    const held = Array.from({ length: PARTS }, (_, p) => p).filter((p) => larger(p) >= HELD).sort((a, b) => partShareIn(original, m, b) - partShareIn(original, m, a));
    const lead = (p) => original.kind(m, p)[0], used = held.filter((p) => !isHidden(lead(p)));
    const rows = this.showAll ? used : used.slice(0, TOP);
    const reach = Math.max(...rows.map((p) => (byArea ? larger(p) : Math.max(original.partHigh(m, p), perturbed ? perturbed.partHigh(m, p) : 0))));
    return h("section", { class: "card", "aria-labelledby": "mixture" },
      h("h2", { id: "mixture" }, "What this image is made of"),
      sharesSwitch(() => { this.remember(); this.filter(); this.showDetail(); this.showBeside(); }),
      note("Its parts, largest first, each with its kind and patches typical of that kind. ", countedHow(), shareNote(), " Point at a part to see where it is, or click its picture to keep it highlighted.", hiddenNote(held.map(lead))),
      h("ul", { class: "rows theta" }, rows.map((p) => this.partRow(m, p, reach))),
      used.length > rows.length && h("button", { type: "button", class: "button", onclick: () => { this.showAll = true; this.showDetail(); } }, `Show all ${used.length}`),
      data.prefix > 0 && prefixNote(m),
      perturbed && movedNote(m));
  },

  partRow(m, p, reach) {
    const what = `part-${p}`;
    const [k, certainty] = original.kind(m, p);
    const moved = perturbed && perturbed.part(m, p) >= HELD && perturbed.kind(m, p)[0] !== k ? `, ${kindName(perturbed.kind(m, p)[0])}` : "";
    const light = (overlay) => (event) => event.pointerType === "mouse" && this.pickers.forEach((picker) => picker.overlay(overlay(), this.colours));
    return h("li", { onpointerenter: light(() => what), onpointerleave: light(() => this.state.overlay) },
      h("button", { type: "button", class: "toggle", "data-toggle": what, "aria-pressed": String(this.state.overlay === what), "aria-label": `Highlight ${overlayName(what)} in the image`, onclick: () => this.toggle(what) }, face(k, true)),
      h("span", { class: "who" }, this.colours.has(k) && h("span", { class: "swatch", "aria-hidden": "true", style: { background: this.colours.get(k) } }),
        h("a", { href: link.concept(k) }, conceptName(k)), certainty < SURE && h("span", { class: "quiet" }, `(${percent(certainty, 0)} sure)`)),
      h("small", {}, partInterval(original, m, p), perturbed && `${byArea ? "" : " · "}perturbed ${percent(partShareIn(perturbed, m, p), 0)}${moved}`),
      h("span", { class: "figure" }, percent(partShareIn(original, m, p), 0)),
      h("span", { class: "bars", "aria-hidden": "true" }, partBar(original, m, p, reach), perturbed && partBar(perturbed, m, p, reach)),
      data.live && conceptSwitch(what),
      strip(k));
  },

  prediction(m) {
    if (CLASSES === 0) return null;
    const said = original.predictions?.[m] ?? null;
    const pointed = data.pointed[m];
    const predicted = said ? said[0][0] : pointed;
    const choices = [...new Set([predicted, pointed, ...(said ?? []).map(([n]) => n)])];
    const carried = h("div", {});
    const show = (n) => carried.replaceChildren(contributions(m, n));
    const select = h("select", { id: "why", onchange: () => show(Number(select.value)) }, choices.map((n) => h("option", { value: String(n) }, data.classes[n])));
    show(predicted);
    const measured = takenAway(m);
    return h("section", { class: "card", "aria-labelledby": "prediction" },
      h("h2", { id: "prediction" }, "What drove the prediction"),
      said && !data.live && h("ul", { class: "rows" }, said.slice(0, 3).map(([n, probability]) => h("li", {},
        h("a", { class: "clip", href: link.class(n) }, data.classes[n]),
        h("span", { class: "bar", "aria-hidden": "true" }, h("span", { style: { width: `${100 * probability}%` } })),
        h("span", { class: "figure" }, percent(probability, 0))))),
      said && note(pointed === predicted
        ? ["The transformer's own prediction. Without seeing it, the concepts ", h("b", {}, "point to the same class"), "."]
        : ["The transformer's own prediction. Without seeing it, the concepts point ", h("b", {}, "elsewhere"), ": to ", classChip(pointed), ". Do not trust the explanation of this image."]),
      !said && note("The transformer's prediction is not known here. The concepts point to ", classChip(pointed), "."),
      measured,
      measured && h("h3", {}, "By the concepts' own evidence"),
      h("p", { class: "pick" }, h("label", { for: "why" }, "Concepts for and against "), select),
      carried,
      note("A concept's share of the image (θ) times how much likelier the class is where the concept is. Bars to the right speak for the class, bars to the left against it."));
  },
};

const overlayName = (overlay) => (typeof overlay === "number" ? conceptName(overlay) : partName(partOfOverlay(overlay)));

/** Of θ the interval is known, of areas not. */
function barWithInterval(name, share, low, high, reach) {
  const at = (value) => `${(100 * value) / reach}%`;
  return h("span", { class: `bar ${name}` },
    h("span", { style: { width: at(share) } }),
    !byArea && h("i", { style: { left: at(low), width: at(high - low) } }));
}

const intervalBar = (view, m, k, reach) => barWithInterval(view.name, shareIn(view, m, k), view.low(m, k), view.high(m, k), reach);
const partBar = (view, m, p, reach) => barWithInterval(view.name, partShareIn(view, m, p), view.partLow(m, p), view.partHigh(m, p), reach);
const shareNote = () => [!byArea && ` The thin line is the ${LEVEL} credible interval of θ.`, perturbed && " The striped bar is the perturbed image."];

const range = (low, high) => `${(100 * low).toFixed(0)} to ${percent(high, 0)}`;
const interval = (view, m, k) => !byArea && range(view.low(m, k), view.high(m, k));
const partInterval = (view, m, p) => !byArea && range(view.partLow(m, p), view.partHigh(m, p));

function prefixNote(m) {
  const mixture = original.mixture(m, 0);
  return note("The summary token (CLS) is not a patch and has ", h("b", {}, percent(original.weight(m, 0))), " of the weight, which goes to ",
    mixture.slice(0, 1).map(([k]) => h("a", { href: link.concept(k) }, conceptName(k))), ".");
}

/** Whether its concepts follow the perturbation. */
function keptNote(m) {
  if (!places) return [];
  const kept = keptPlaces(m).filter(Boolean).length;
  return [h("b", {}, `${kept} of ${PATCHES} places`), " kept their concept in the perturbed view."];
}

function keptText(m, patch) {
  const k = original.leading(m, placeOf(m, patch));
  return k === perturbed.leading(m, patch) ? "This place has the same concept in the original." : `In the original this place has ${conceptName(k)}.`;
}

function movedNote(m) {
  let moved = 0;
  for (let k = 0; k < CONCEPTS; k++) moved += Math.abs(original.theta(m, k) - perturbed.theta(m, k)) / 2;
  const before = predictedClass(m), after = predictedClass(m, perturbed);
  return note("Under the perturbation ", h("b", {}, percent(moved, 0)), " of the mixture moved to other concepts",
    before === null || after === null ? "." : before === after ? ", and the prediction stayed the same." : [", and the prediction changed to ", classChip(after), "."]);
}

function contributions(m, n) {
  const parts = Array.from({ length: CONCEPTS }, (_, k) => [k, original.theta(m, k) * evidence(k, n)])
    .filter(([k]) => !isHidden(k)).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, 6).filter(([, value]) => Math.abs(value) >= 0.005);
  if (!parts.length) return h("p", { class: "quiet" }, "No concept speaks clearly for or against this class.");
  const reach = Math.abs(parts[0][1]);
  return h("ul", { class: "rows carried", "aria-label": `Concepts for and against ${data.classes[n]}` }, parts.map(([k, value]) => h("li", {},
    face(k, true), h("a", { href: link.concept(k) }, conceptName(k)), twoSided(value, reach), h("span", { class: "figure" }, signedNumber(value)))));
}

/** What is predicted without each concept, measured; those that cost most first. */
function takenAway(m) {
  const found = Object.entries(data.without[m] ?? {}).map(([k, one]) => [Number(k), one]).sort((a, b) => a[1].after - b[1].after);
  if (!found.length) return null;
  const { class: n, before } = found[0][1];
  const what = (k) => (PARTS ? partName(data.concepts[k].part) : conceptName(k));
  return h("div", { class: "without" },
    h("h3", {}, "What it is without"),
    h("ul", { class: "rows", "aria-label": `Prediction of ${data.classes[n]} without each concept` }, found.map(([k, one]) => h("li", {},
      h("p", {}, "Without ", h("a", { href: link.concept(k) }, what(k)), `: ${data.classes[n]} ${percent(before, 0)} → `, h("b", {}, percent(one.after, 0)),
        one.high - one.low >= 0.01 && h("span", { class: "quiet" }, ` (${range(one.low, one.high)})`)),
      h("small", {}, `as much of the picture elsewhere: ${percent(one.area, 0)} · as much attention: ${percent(one.attention, 0)}`)))),
    note("Measured: the transformer runs again without the patches of ", PARTS ? "the part" : "the concept",
      ". In brackets, what comes out in 90 % of the ways in which its patches may be mistaken, if that differs. Believe that it matters if as many patches elsewhere, or as much attention, cost less."));
}

/** A concept's typical patches; built once, since moving over patches asks for the same few again and again. */
const strips = new Map();
function galleryStrip(k) {
  if (!strips.has(k)) strips.set(k, strip(k));
  return strips.get(k);
}

function strip(k) {
  return h("div", { class: "strip" }, data.concepts[k].near.slice(0, 6).map(([m, patch]) =>
    h("a", { href: link.image(m, { patch }), "aria-label": `${data.names[m]}, patch at ${place(patch)}` }, crop(m, patch, SPAN, true))));
}

function describeImage(m) {
  const n = predictedClass(m);
  return `${data.names[m]}${n === null ? "" : `, predicted ${data.classes[n]}`}`;
}

function describePatch(view, m, patch) {
  const mixture = view.patch(m, patch).map(([k, share]) => `${conceptName(k)} ${percent(share, 0)}`);
  const kept = view === perturbed && places ? `. ${keptText(m, patch)}` : "";
  return `Patch at ${place(patch)}${view === perturbed ? ", perturbed" : ""}: ${mixture.join(", ")}${kept}`;
}

const searchTexts = [];
function searchText(m) {
  const n = predictedClass(m);
  return (searchTexts[m] ??= [data.names[m], data.labels?.[m] ?? "", n === null ? "" : data.classes[n]].join(" ").toLowerCase());
}

/** Classes that some image is predicted as, and how many images. */
function predictedClasses() {
  const counts = new Map();
  for (const m of everyImage()) counts.set(predictedClass(m), (counts.get(predictedClass(m)) ?? 0) + 1);
  return [...counts].sort(([a], [b]) => data.classes[a].localeCompare(data.classes[b]));
}
