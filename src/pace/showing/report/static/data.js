// The data of the page. Numbers are small integers in base64, pictures one base64 line each.

const data = JSON.parse(document.getElementById("data").textContent);
const pictures = document.getElementById("pictures").textContent.split("\n");

function unpack({ kind, base64 }) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const Kind = { u8: Uint8Array, u16: Uint16Array, i16: Int16Array }[kind];
  return new Kind(bytes.buffer);
}

function joined(some, more) {
  const all = new some.constructor(some.length + more.length);
  all.set(some);
  all.set(more, some.length);
  return all;
}

const [ROWS, COLUMNS] = data.grid;
const PATCHES = ROWS * COLUMNS;
const TOKENS = PATCHES + data.prefix;
const IMAGES = data.names.length; // of the set; on a live page those that were added have the numbers that follow
const CONCEPTS = data.concepts.length;
const CLASSES = data.classes.length;
const PARTS = data.parts?.length ?? 0; // 0 where concepts are not kinds of parts
const LEVEL = `${Math.round(100 * data.level)} %`;

/** All kinds of each part, shown or not. */
const kindsOf = Array.from({ length: PARTS }, (_, p) => Array.from({ length: CONCEPTS }, (_, k) => k).filter((k) => data.concepts[k].part === p));

/** The numbers of all images: those that were added, the last one first, then the set. */
const everyImage = () => [...data.names.keys()].sort((a, b) => (a >= IMAGES || b >= IMAGES ? b - a : a - b));

const evidenceSteps = unpack(data.evidence);

/** How much likelier class n is where concept k is than in all images of the fit: above 0 it speaks for the class. */
const evidence = (k, n) => evidenceSteps[k * CLASSES + n] / 32767;

const FIELDS = ["theta", "low", "high", "concept", "phi", "weight", ...(PARTS ? ["partLow", "partHigh"] : [])];

/** One view of the images: as they are, or perturbed. */
class View {
  constructor(name, packed, firstPicture) {
    this.name = name;
    this.pictures = pictures.slice(firstPicture, firstPicture + IMAGES);
    this.predictions = packed.predictions;
    this.kept = packed.kept;
    for (const field of FIELDS) this[`_${field}`] = unpack(packed[field]);
  }
  append(packed, picture) {
    this.pictures.push(picture);
    this.predictions?.push(...packed.predictions);
    for (const field of FIELDS) this[`_${field}`] = joined(this[`_${field}`], unpack(packed[field]));
  }
  theta(m, k) { return this._theta[m * CONCEPTS + k] / 65535; }
  low(m, k) { return this._low[m * CONCEPTS + k] / 65535; }
  high(m, k) { return this._high[m * CONCEPTS + k] / 65535; }
  part(m, p) { return kindsOf[p].reduce((sum, k) => sum + this.theta(m, k), 0); }
  partLow(m, p) { return this._partLow[m * PARTS + p] / 65535; }
  partHigh(m, p) { return this._partHigh[m * PARTS + p] / 65535; }
  /** The kind that a part has in an image, and how likely it is that one. */
  kind(m, p) {
    const k = kindsOf[p].reduce((best, other) => (this.theta(m, other) > this.theta(m, best) ? other : best));
    return [k, this.theta(m, k) / (this.part(m, p) || 1)];
  }
  /** The strongest concepts of a token, as [concept, share]; tokens count the prefix (CLS) first. */
  mixture(m, token) {
    const start = (m * TOKENS + token) * this.kept;
    const found = [];
    // The first is shown whatever it is, others from 1 % up.
    for (let i = start; i < start + this.kept; i++) if (i === start || this._phi[i] > 2) found.push([this._concept[i], this._phi[i] / 255]);
    return found;
  }
  patch(m, patch) { return this.mixture(m, data.prefix + patch); }
  leading(m, patch) { return this._concept[(m * TOKENS + data.prefix + patch) * this.kept]; }
  /** The share of the image's weight that a token has. */
  weight(m, token) { return this._weight[m * TOKENS + token] / 65535; }
  /** φ of one concept over the patches of an image. */
  map(m, k) {
    const values = new Float32Array(PATCHES);
    const start = (m * TOKENS + data.prefix) * this.kept;
    for (let i = 0; i < PATCHES * this.kept; i++) {
      if (this._concept[start + i] === k) values[Math.floor(i / this.kept)] = this._phi[start + i] / 255;
    }
    return values;
  }
  /** φ of a part over the patches of an image: the sum over its kinds. */
  partMap(m, p) {
    const maps = kindsOf[p].map((k) => this.map(m, k));
    return Float32Array.from({ length: PATCHES }, (_, patch) => maps.reduce((sum, map) => sum + map[patch], 0));
  }
  picture(m) { return `data:${data.picture.type};base64,${this.pictures[m]}`; }
}

const original = new View("original", data.original, 0);
// A perturbed view without pictures still has its θ.
const perturbed = data.perturbed && new View("perturbed", data.perturbed, IMAGES);
const hasPerturbedPictures = data.perturbedPictures;
const pictured = hasPerturbedPictures ? [original, perturbed] : [original];
let places = data.places && unpack(data.places);

/** The patch of the picture at the place that a patch of its perturbed view shows. */
const placeOf = (m, patch) => places[m * PATCHES + patch];
/** For every patch of a perturbed view: does its place have the same concept in the picture? */
const keptPlaces = (m) => Array.from({ length: PATCHES }, (_, patch) => perturbed.leading(m, patch) === original.leading(m, placeOf(m, patch)));

/** The patch of an image that shows a concept best. */
function bestPatch(m, k) {
  const map = original.map(m, k);
  return map.reduce((best, value, patch) => (value > map[best] ? patch : best), 0);
}

const predictedClass = (m, view = original) => (view.predictions ? view.predictions[m][0][0] : null);
