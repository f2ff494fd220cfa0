// An image with concepts laid over it, whose patches can be chosen by pointer, tap or arrow keys.

const REGION_COLOURS = ["#e69f00", "#56b4e9", "#2bb38a", "#e8dc3c", "#d68ab8", "#e2683c", "#8f7ae6", "#1c2e4a"];

/** Hue before brightness: dark green is green. */
function tone(rgb) {
  const brightness = (rgb[0] + rgb[1] + rgb[2]) / 3;
  return [...rgb.map((value) => value - brightness), 0.8 * brightness];
}
const REGION_TONES = REGION_COLOURS.map((colour) => tone([1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16))));

/** A colour for each of a few concepts, as close as possible to that of its patches, so that yellow ones are not painted pink. Earlier ones choose first. */
function coloursFor(concepts) {
  const free = new Set(REGION_COLOURS.keys());
  return new Map(concepts.map((k) => {
    const own = tone(data.concepts[k].colour ?? [128, 128, 128]);
    const distance = (index) => Math.hypot(...REGION_TONES[index].map((value, i) => value - own[i]));
    const nearest = [...free].reduce((best, index) => (distance(index) < distance(best) ? index : best));
    free.delete(nearest);
    return [k, REGION_COLOURS[nearest]];
  }));
}

/** The concepts with a colour of their own: the same in every image if there are few, else those with most patches here. */
function colouredIn(m) {
  if (data.order.length <= REGION_COLOURS.length) return data.order;
  const held = new Map();
  for (const view of pictured) {
    for (let patch = 0; patch < PATCHES; patch++) held.set(view.leading(m, patch), (held.get(view.leading(m, patch)) ?? 0) + 1);
  }
  return [...held].sort(([a, more], [b, fewer]) => fewer - more || a - b).slice(0, REGION_COLOURS.length).map(([k]) => k);
}

/** Paint every patch in the colour of its strongest concept, with the concept's number, so that colour is not needed; is any grey? */
function regions(canvas, labels, view, m, colours) {
  const members = new Map();
  let isPartlyGrey = false;
  paint(canvas, (patch) => {
    const k = view.leading(m, patch);
    if (!colours.has(k)) {
      isPartlyGrey = true;
      return "rgb(128 128 128 / 65%)";
    }
    members.set(k, [...(members.get(k) ?? []), patch]);
    return `${colours.get(k)}99`;
  });
  const taken = [];
  members.forEach((patches, k) => {
    const centre = labelPlace(new Set(patches), taken);
    taken.push(centre);
    labels.append(h("span", { style: {
      left: `${(100 * ((centre % COLUMNS) + 0.5)) / COLUMNS}%`, top: `${(100 * (Math.floor(centre / COLUMNS) + 0.5)) / ROWS}%`,
    } }, data.concepts[k].short));
  });
  return isPartlyGrey;
}

/** One view of an image, coloured by concept. */
function conceptMap(view, m, colours) {
  const canvas = h("canvas", { class: "overlay" }), labels = h("span", { class: "regions" });
  const image = picture(m, false, view);
  image.classList.add("grey");
  const box = h("span", { class: "context", "aria-hidden": "true", style: { "aspect-ratio": pictureShape } }, image, canvas, labels);
  return onSight(box, () => regions(canvas, labels, view, m, colours));
}

/** In a perturbed view, the places that kept their concept, and those that changed it crossed out; in the picture, what the view shows. */
function follow(canvas, view, m) {
  const kept = keptPlaces(m);
  if (view === original) {
    const isShown = new Float32Array(PATCHES);
    kept.forEach((_, patch) => { isShown[placeOf(m, patch)] = 1; });
    return spotlight(canvas, isShown);
  }
  const pen = paint(canvas, (patch) => (kept[patch] ? "#2bb38a80" : "#e2683c99"));
  kept.forEach((same, patch) => {
    const x = (patch % COLUMNS) * PATCH, y = Math.floor(patch / COLUMNS) * PATCH;
    if (!same) for (const [from, to] of [[4, 12], [12, 4]]) { pen.moveTo(x + from, y + 4); pen.lineTo(x + to, y + 12); }
  });
  pen.lineWidth = 1.5;
  pen.stroke();
}

/** The part that an overlay called "part-2" shows; null if it is no part's. */
function partOfOverlay(overlay) {
  const [, p] = /^part-(\d+)$/.exec(overlay) ?? [];
  return p !== undefined && Number(p) < PARTS ? Number(p) : null;
}

class Picker {
  /** `onHover(view, patch or null)` and `onPick(view, patch or null)` are called when the pointer or the keys move. */
  constructor(view, caption, { onHover, onPick }) {
    this.view = view;
    this.onPick = onPick;
    this.image = h("img", { alt: "", draggable: "false" });
    this.canvas = h("canvas", { class: "overlay", "aria-hidden": "true" });
    this.labels = h("span", { class: "regions", "aria-hidden": "true" });
    this.cursor = h("span", { class: "cursor", hidden: true });
    this.stage = h("div", {
      class: "stage", tabindex: "0", role: "application", "aria-describedby": "picker-help",
      style: { "aspect-ratio": pictureShape },
      onpointermove: (event) => event.pointerType !== "touch" && onHover(view, this.at(event)),
      onpointerleave: () => onHover(view, null),
      onclick: (event) => onPick(view, this.at(event)),
      onkeydown: (event) => this.key(event),
    }, this.image, this.canvas, this.labels, this.cursor);
    this.element = h("figure", { class: "picker" }, this.stage, h("figcaption", {}, caption));
    this.caption = caption;
    this.patch = null;
  }

  show(m) {
    this.m = m;
    this.image.src = this.view.picture(m);
    this.stage.setAttribute("aria-label", `Patches of ${data.names[m]}, ${this.caption.toLowerCase()}`);
  }

  /** Frame a patch, or none. */
  mark(patch) {
    this.patch = patch;
    this.cursor.hidden = patch === null;
    if (patch === null) return;
    const set = (name, value) => this.cursor.style.setProperty(name, `${value}%`);
    set("left", (100 * (patch % COLUMNS)) / COLUMNS);
    set("top", (100 * Math.floor(patch / COLUMNS)) / ROWS);
    set("width", 100 / COLUMNS);
    set("height", 100 / ROWS);
  }

  /** Lay a concept or a part ("part-2") over the image, "all" for a map of the concepts that have `colours`, "kept" for what followed, or nothing. */
  overlay(what, colours) {
    this.canvas.hidden = what === null;
    this.image.classList.toggle("grey", what === "all" || what === "kept"); // so that its own colours do not mix with the overlay
    this.labels.replaceChildren();
    this.isPartlyGrey = false;
    if (what === null) return;
    if (what === "all") this.isPartlyGrey = regions(this.canvas, this.labels, this.view, this.m, colours);
    else if (what === "kept") follow(this.canvas, this.view, this.m);
    else spotlight(this.canvas, typeof what === "number" ? this.view.map(this.m, what) : this.view.partMap(this.m, partOfOverlay(what)));
  }

  at(event) {
    const box = this.stage.getBoundingClientRect();
    const within = (position, count) => Math.max(0, Math.min(count - 1, Math.floor(position * count)));
    return within((event.clientY - box.top) / box.height, ROWS) * COLUMNS + within((event.clientX - box.left) / box.width, COLUMNS);
  }

  key(event) {
    const row = Math.floor(this.patch / COLUMNS), column = this.patch % COLUMNS;
    const to = {
      ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], ArrowUp: [row - 1, column], ArrowDown: [row + 1, column],
      Home: [row, 0], End: [row, COLUMNS - 1], PageUp: [0, column], PageDown: [ROWS - 1, column],
    }[event.key];
    if (event.key === "Escape") this.onPick(this.view, null);
    if (!to || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (this.patch === null) return this.onPick(this.view, Math.floor(ROWS / 2) * COLUMNS + Math.floor(COLUMNS / 2));
    const inside = (value, count) => Math.max(0, Math.min(count - 1, value));
    this.onPick(this.view, inside(to[0], ROWS) * COLUMNS + inside(to[1], COLUMNS));
  }
}

/** The patch deepest inside its region, away from labels that are there already. */
function labelPlace(region, taken) {
  const depth = (patch) => {
    const row = Math.floor(patch / COLUMNS), column = patch % COLUMNS;
    const crowded = taken.some((other) => Math.abs(Math.floor(other / COLUMNS) - row) < ROWS / 8 && Math.abs((other % COLUMNS) - column) < COLUMNS / 6);
    let same = crowded ? -100 : 0;
    for (let down = -2; down <= 2; down++) {
      for (let across = -2; across <= 2; across++) {
        const inside = column + across >= 0 && column + across < COLUMNS;
        if (inside && region.has(patch + down * COLUMNS + across)) same += 3 - Math.max(Math.abs(down), Math.abs(across));
      }
    }
    return same;
  };
  const depths = new Map([...region].map((patch) => [patch, depth(patch)]));
  return [...region].reduce((best, patch) => (depths.get(patch) > depths.get(best) ? patch : best));
}
