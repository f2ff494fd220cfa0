// What several views share: pictures, crops, bars, chips.

const capital = (text) => text[0].toUpperCase() + text.slice(1);
/** "Concept 12", or "Part A · kind 3", or what its user calls it. */
const conceptName = (k) => capital(data.concepts[k].name);
const partName = (p) => capital(data.parts[p].name);
/** Its kind alone, below or beside the name of its part. */
const kindName = (k) => data.concepts[k].kind;
const isHidden = (k) => data.concepts[k].hidden;
const hiddenNote = (concepts) => concepts.some(isHidden) && ` ${concepts.filter(isHidden).length} more hidden.`;
const place = (patch) => `row ${Math.floor(patch / COLUMNS) + 1}, column ${(patch % COLUMNS) + 1}`;

const link = {
  concept: (k) => `#/concepts/${k}`,
  image: (m, options = {}) => address("images", m, options),
  class: (n) => `#/classes/${n}`,
};

function address(view, item, options = {}) {
  const given = Object.entries({ ...options, by: byArea ? "area" : null }).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given.map(([key, value]) => [key, String(value)])).toString();
  return `#/${view}${item === null || item === undefined ? "" : `/${item}`}${query ? `?${query}` : ""}`;
}

/** `eager` for what is on screen already: it appears at once, and the page waits while it is decoded. */
function picture(m, eager = false, view = original) {
  const image = h("img", { alt: "", decoding: eager ? "sync" : "async", draggable: "false" });
  const load = () => { image.src = view.picture(m); };
  if (eager) load();
  else onSight(image, load);
  return image;
}

const pictureShape = `${data.picture.width} / ${data.picture.height}`;

/** The whole image with one patch marked and the rest dimmed. */
function inContext(m, patch) {
  const row = Math.floor(patch / COLUMNS), column = patch % COLUMNS;
  return h("span", { class: "context", style: { "aspect-ratio": pictureShape } },
    picture(m),
    h("span", { class: "spot", style: {
      left: `${(100 * column) / COLUMNS}%`, top: `${(100 * row) / ROWS}%`,
      width: `${100 / COLUMNS}%`, height: `${100 / ROWS}%`,
    } }));
}

const SPAN = 5;
// The same for every patch, since the crop moves inwards at the border.
const cropShape = (span) => (Math.min(span, COLUMNS) * data.picture.width * ROWS) / (Math.min(span, ROWS) * data.picture.height * COLUMNS);

/** The surroundings of a patch, `span` patches wide, with the patch marked. */
function crop(m, patch, span = SPAN, eager = false) {
  const across = Math.min(span, COLUMNS), down = Math.min(span, ROWS);
  const row = Math.floor(patch / COLUMNS), column = patch % COLUMNS;
  const left = Math.max(0, Math.min(column - (across - 1) / 2, COLUMNS - across));
  const top = Math.max(0, Math.min(row - (down - 1) / 2, ROWS - down));
  const image = picture(m, eager);
  const set = (name, value) => image.style.setProperty(name, `${value}%`);
  set("width", (100 * COLUMNS) / across);
  set("height", (100 * ROWS) / down);
  set("left", (-100 * left) / across);
  set("top", (-100 * top) / down);
  return h("span", { class: "crop", style: { "aspect-ratio": String(cropShape(span)) } },
    image,
    h("span", { class: "frame", style: {
      left: `${(100 * (column - left)) / across}%`, top: `${(100 * (row - top)) / down}%`,
      width: `${100 / across}%`, height: `${100 / down}%`,
    } }));
}

/** The patch nearest to a concept's mean, as the concept's face; or the next one. */
function face(k, eager = false, next = 0) {
  const nearest = data.concepts[k].near[next];
  return h("span", { class: "face", "aria-hidden": "true" }, nearest && crop(...nearest, 3, eager));
}

/** A picture of the contact sheet, which is decoded once for all of them; those that were added are not in it. */
function thumbnail(m) {
  if (m >= IMAGES) return h("span", { class: "thumbnail", "aria-hidden": "true" }, picture(m));
  const { columns, rows } = data.sheet;
  const at = (index, count) => (count > 1 ? `${(100 * index) / (count - 1)}%` : "0%");
  return h("span", { class: "thumbnail", "aria-hidden": "true", style: {
    "background-position": `${at(m % columns, columns)} ${at(Math.floor(m / columns), rows)}`,
  } });
}

const PATCH = 16; // pixels of a patch on an overlay's canvas

/** Paint every patch of an overlay in the colour that `colourOf(patch)` gives. */
function paint(canvas, colourOf) {
  canvas.width = COLUMNS * PATCH;
  canvas.height = ROWS * PATCH;
  const pen = canvas.getContext("2d");
  for (let patch = 0; patch < PATCHES; patch++) {
    pen.fillStyle = colourOf(patch);
    pen.fillRect((patch % COLUMNS) * PATCH, Math.floor(patch / COLUMNS) * PATCH, PATCH, PATCH);
  }
  return pen;
}

/** Dark where a concept is absent, clear where it is, with a line between: readable without colour, on dark pictures too. */
function spotlight(canvas, map) {
  const pen = paint(canvas, (patch) => `rgb(10 12 14 / ${0.8 * (1 - map[patch])})`);
  const isLit = (patch) => map[patch] >= 0.5;
  pen.beginPath();
  for (let patch = 0; patch < PATCHES; patch++) {
    const x = (patch % COLUMNS) * PATCH, y = Math.floor(patch / COLUMNS) * PATCH;
    if (patch % COLUMNS > 0 && isLit(patch) !== isLit(patch - 1)) { pen.moveTo(x, y); pen.lineTo(x, y + PATCH); }
    if (patch >= COLUMNS && isLit(patch) !== isLit(patch - COLUMNS)) { pen.moveTo(x, y); pen.lineTo(x + PATCH, y); }
  }
  for (const [width, colour] of [[4, "rgb(0 0 0 / 60%)"], [1.5, "#fff"]]) {
    pen.lineWidth = width;
    pen.strokeStyle = colour;
    pen.stroke();
  }
}

/** An image with the patches of one concept highlighted. */
function highlighted(m, k) {
  const canvas = h("canvas", { class: "overlay", "aria-hidden": "true" });
  const box = h("span", { class: "context", style: { "aspect-ratio": pictureShape } }, picture(m), canvas);
  onSight(canvas, () => spotlight(canvas, original.map(m, k)));
  return box;
}

const HELD = 0.01; // share below which an image does not show a concept; contents.py has the same

/** The images that contain a concept, or so much of it, those with most of it first. */
function imagesWith(k, least = HELD) {
  return everyImage().filter((m) => shareIn(original, m, k) >= least)
    .sort((a, b) => shareIn(original, b, k) - shareIn(original, a, k));
}

function classChip(n) {
  return h("a", { class: "chip", href: link.class(n) }, data.classes[n]);
}

/** Classes by how strongly a concept speaks for them, strongest first. */
function classesOf(k) {
  return Array.from({ length: CLASSES }, (_, n) => [n, evidence(k, n)]).sort((a, b) => b[1] - a[1]);
}

/** A bar that starts in the middle: to the right for, to the left against. */
function twoSided(value, reach) {
  const width = (50 * Math.min(Math.abs(value), reach)) / (reach || 1);
  return h("span", { class: "twosided", "aria-hidden": "true" },
    h("span", { class: value < 0 ? "against" : "for", style: { width: `${width}%` } }));
}

/** A patch of a concept's gallery: the whole image with the patch highlighted, and the patch enlarged beside it. */
function galleryItem(m, patch) {
  const enlarged = crop(m, patch, 3);
  // Out of the way of the patch it enlarges.
  enlarged.classList.toggle("aside", patch % COLUMNS > COLUMNS / 2 && patch >= PATCHES / 2);
  return h("a", { class: "sample", href: link.image(m, { patch }), "aria-label": `${data.names[m]}, patch at ${place(patch)}` },
    inContext(m, patch), enlarged);
}

/** Two rows of three patches, made when they come into sight: there may be hundreds of cards. */
function tiles(near) {
  const box = h("div", { class: "tiles", "aria-hidden": "true", style: { "aspect-ratio": String(1.5 * cropShape(SPAN)) } });
  return onSight(box, () => box.append(...near.map(([m, patch]) => crop(m, patch))));
}

function conceptCard(k, level = "h3", name = conceptName(k)) {
  const { near } = data.concepts[k], share = shareOf(k);
  const classes = classesOf(k).filter(([, value]) => value > 0).slice(0, 3);
  return h("li", { class: "card concept" },
    h(level, {}, h("a", { class: "cover", href: link.concept(k), "aria-label": name === conceptName(k) ? null : conceptName(k) }, name), h("span", { class: "figure" }, percent(share))),
    h("span", { class: "meter", "aria-hidden": "true" }, h("span", { style: { width: `${Math.max(0.5, (100 * share) / largestShare)}%` } })),
    tiles(near.slice(0, 6)),
    classes.length > 0 && h("p", { class: "speaks" }, h("span", { class: "quiet" }, "speaks for "), classes.map(([n]) => data.classes[n]).join(", ")));
}

const largestShare = Math.max(...data.concepts.map(({ share }) => share));

/** An explanation on the page itself, since a phone has no tooltips. */
const note = (...children) => h("p", { class: "note" }, children);

/** A curve through points [x, y] on a scale of its own, with a line at the x that is marked, if any. */
function plot(points, label, marked = null) {
  const width = 320, height = 120;
  const values = points.map(([, value]) => value);
  const low = Math.min(...values), high = Math.max(...values);
  const first = points[0][0], reach = points.at(-1)[0] - first;
  const across = (x) => (reach > 0 ? ((x - first) / reach) * width : width / 2);
  const down = (value) => (high > low ? 6 + (1 - (value - low) / (high - low)) * (height - 12) : height / 2);
  const line = points.map(([x, value]) => `${across(x).toFixed(1)},${down(value).toFixed(1)}`).join(" ");
  // Enough digits to tell the ends of the axis apart.
  const digits = high > low ? Math.max(0, Math.min(6, 1 - Math.floor(Math.log10(high - low)))) : 2;
  const tick = (value) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace("-", "−");
  return h("div", { class: "plot" },
    h("span", { class: "tick top" }, tick(high)), h("span", { class: "tick bottom" }, tick(low)),
    svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      svg("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }),
      marked !== null && svg("line", { class: "marked", x1: across(marked), x2: across(marked), y1: 0, y2: height, "vector-effect": "non-scaling-stroke" }),
      svg("polyline", { class: "curve", points: line, "vector-effect": "non-scaling-stroke" })));
}
