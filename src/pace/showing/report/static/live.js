// Only on the page of pace serve: pictures that are dropped on it, and concepts that are switched off.

const numbers = []; // the server's numbers of the pictures that were added
const numberOf = (m) => (m < IMAGES ? m : numbers[m - IMAGES]);

const SAID = "said"; // what is told once the page has been loaded again

/** Ask the server; what it refuses is an error with its reason. If concepts were changed in another tab, the page is loaded again. */
async function ask(path, body) {
  const answer = await fetch(path, { method: "POST", body, headers: { revision: data.live.revision } }).catch(() => {
    throw new Error("pace serve does not answer. Is it still running?");
  });
  const found = await answer.json().catch(() => ({ error: `pace serve answers ${answer.status}` }));
  if (!answer.ok) throw new Error(found.error);
  if (found.outdated) {
    sessionStorage.setItem(SAID, "Concepts were changed in another tab");
    location.reload();
    await new Promise(() => {});
  }
  return found;
}

/** A tab that is looked at again shows what was changed in others meanwhile. */
const catchUp = () => document.visibilityState === "visible" && ask("current", "{}").catch(() => {});
addEventListener("focus", catchUp);
document.addEventListener("visibilitychange", catchUp);

// -- what is going on, below the page ----------------------------------------------------------------------------------

const tray = h("div", { class: "tray" });
document.body.append(tray);

function tell(error) {
  const line = h("p", { role: "alert" }, error.message, h("button", { type: "button", class: "button", onclick: () => line.remove() }, "Close"));
  tray.append(line);
}

/** Waits for a promise; what takes longer is seen to be under way, with its seconds. */
async function waiting(text, promise) {
  const line = h("p", { role: "status" }), began = performance.now();
  const timer = setInterval(() => {
    line.textContent = `${text} … ${Math.floor((performance.now() - began) / 1000)} s`;
    tray.append(line);
  }, 400);
  try {
    return await promise;
  } finally {
    clearInterval(timer);
    line.remove();
  }
}

// -- pictures ----------------------------------------------------------------------------------------------------------

/** One more entry of the Images view. */
function addPicture({ number, name, picture, view, pointed, moved }) {
  const m = data.names.length;
  data.names.push(name);
  data.pointed?.push(pointed);
  numbers.push(number);
  original.append(view, picture);
  perturbed.append(moved.perturbed, moved.picture);
  places = joined(places, unpack(moved.places));
  areas.clear();
  for (const { test, images } of FAULTS.values()) if (test(m)) images.add(m);
  return m;
}

async function explain(file) {
  const name = file.name || "picture";
  if (file.size > data.live.largest) return tell(new Error(`${name}: larger than ${Math.floor(data.live.largest / 1e6)} MB`));
  try {
    const m = addPicture(await waiting(`Explaining ${name}`, ask(`add?name=${encodeURIComponent(name)}`, file)));
    delete imagesView.order;
    if (imagesView.element) imagesView.build();
    byLink = true;
    location.hash = link.image(m);
    say(`${describeImage(m)}: explained`);
  } catch (error) {
    tell(error);
  }
}

let line = Promise.resolve(); // one after the other
const explainAll = (files) => { for (const file of files) line = line.then(() => explain(file)); };

const chooser = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true, onchange: () => {
  explainAll([...chooser.files]);
  chooser.value = "";
} });
document.body.append(chooser);
document.getElementById("try").addEventListener("click", () => chooser.click());

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
addEventListener("dragover", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  document.body.classList.add("dropping");
});
addEventListener("dragleave", (event) => event.relatedTarget === null && document.body.classList.remove("dropping"));
addEventListener("drop", (event) => {
  document.body.classList.remove("dropping");
  if (!hasFiles(event)) return;
  event.preventDefault();
  explainAll([...event.dataTransfer.files]);
});
addEventListener("paste", (event) => explainAll([...event.clipboardData.files]));

// -- concepts switched off ---------------------------------------------------------------------------------------------

const outcomes = new Map(); // by question: what is predicted

/** Overlays' names in the address, "part-2,17": concepts, and parts with all their kinds. */
function offIn() {
  const names = (imagesView.state.off ?? "").split(",").map((name) => (/^\d+$/.test(name) ? Number(name) : name));
  return new Set(names.filter((name) => (typeof name === "number" ? name < CONCEPTS : partOfOverlay(name) !== null)));
}
const conceptsOff = () => [...offIn()].flatMap((what) => (typeof what === "number" ? [what] : kindsOf[partOfOverlay(what)]));
const question = (compare) => JSON.stringify({ picture: numberOf(imagesView.state.image), concepts: conceptsOff(), compare });

function conceptSwitch(what) {
  return data.live.predicts && h("button", {
    type: "button", role: "switch", class: "switch", "aria-checked": String(!offIn().has(what)), "aria-label": `${overlayName(what)} in the prediction`,
    onclick: (event) => {
      const off = offIn();
      if (!off.delete(what)) off.add(what);
      event.currentTarget.setAttribute("aria-checked", String(!off.has(what)));
      switchOff(off);
    },
  });
}

function switchOff(off) {
  failed = null;
  imagesView.set({ off: [...off].join() || null });
  showOutcome();
}

let isAsking = false;
let failed = null; // the question that was not answered, until the switches change
/** One question at a time, of several switches in a row the last: first what is predicted, then what to compare it with. */
async function predict() {
  if (isAsking) return;
  isAsking = true;
  for (;;) {
    const asked = [false, true].map(question).find((one) => !outcomes.has(one));
    if (!offIn().size || !asked || asked === failed) break;
    try {
      const found = await waiting("Predicting", ask("without", asked));
      outcomes.set(asked, found);
      const [first] = found.classes;
      if (asked === question(true)) say(`${data.classes[first.class]} ${percent(first.before, 0)} to ${percent(first.after, 0)}`);
    } catch (error) {
      failed = asked;
      tell(error);
    }
    showOutcome();
  }
  isAsking = false;
}

/** What is predicted, in a card that stays in sight while concepts are switched off and on. */
const outcome = () => data.live.predicts && outcomeCard();

function showOutcome() {
  imagesView.detail.querySelector(".outcome")?.replaceWith(outcomeCard());
}

function outcomeCard() {
  leaveOut();
  predict();
  const m = imagesView.state.image, off = [...offIn()];
  const found = off.length ? (outcomes.get(question(true)) ?? outcomes.get(question(false))) : undefined;
  const rows = found?.classes.slice(0, 3) ?? original.predictions[m].slice(0, 3).map(([n, before]) => ({ class: n, before }));
  return h("section", { class: "card outcome", "aria-labelledby": "outcome", "aria-busy": String(off.length > 0 && !found && failed === null) },
    h("div", { class: "headline" },
      h("h2", { id: "outcome" }, "Prediction", off.length > 0 && ` without ${off.map(overlayName).join(", ")}`),
      off.length > 0 && h("button", { type: "button", class: "button", onclick: () => { switchOff([]); imagesView.showDetail(); } }, "Switch all on")),
    h("ul", { class: "rows" }, rows.map(outcomeRow)),
    found ? comparison(found) : note(`Switch ${PARTS ? "parts" : "concepts"} off below, and see the prediction without their patches.`));
}

function outcomeRow({ class: n, before, after, low, high }) {
  const at = (value) => `${100 * value}%`;
  const isChanged = after !== undefined;
  return h("li", {}, h("a", { class: "clip", href: link.class(n) }, data.classes[n]),
    h("span", { "aria-hidden": "true" },
      h("span", { class: "bar" }, h("span", { style: { width: at(isChanged ? after : before) } }), isChanged && h("i", { style: { left: at(low), width: at(high - low) } })),
      isChanged && h("span", { class: "bar perturbed" }, h("span", { style: { width: at(before) } }))),
    h("span", { class: "figure" }, isChanged ? [`${percent(before, 0)} → `, h("b", {}, percent(after, 0))] : percent(before, 0)),
    isChanged && high - low >= 0.01 && h("small", { class: "quiet" }, `90 % interval ${range(low, high)}`));
}

function comparison({ classes }) {
  const first = classes.reduce((best, one) => (one.before > best.before ? one : best));
  return note("Striped: with everything. ", first.area === undefined ? "Comparing with as much of the picture elsewhere …"
    : [h("b", {}, data.classes[first.class]), ` without as much of the picture elsewhere: ${percent(first.area, 0)}; without as much attention: ${percent(first.attention, 0)}.`]);
}

/** The patches that are left out, grey in the picture. */
function leaveOut() {
  const stage = imagesView.pickers[0].stage;
  stage.querySelector(".gone")?.remove();
  if (!offIn().size) return;
  const gone = new Float32Array(PATCHES);
  for (const k of conceptsOff()) original.map(imagesView.state.image, k).forEach((share, patch) => { gone[patch] += share; });
  const canvas = h("canvas", { class: "overlay gone", "aria-hidden": "true" });
  const pen = paint(canvas, (patch) => (gone[patch] > 0.5 ? "#8a8a8a" : "transparent"));
  pen.strokeStyle = "#6d6d6d";
  for (let patch = 0; patch < PATCHES; patch++) {
    if (gone[patch] <= 0.5) continue;
    const x = (patch % COLUMNS) * PATCH, y = Math.floor(patch / COLUMNS) * PATCH;
    pen.beginPath();
    pen.moveTo(x, y + PATCH);
    pen.lineTo(x + PATCH, y);
    pen.stroke();
  }
  stage.append(canvas);
}

data.live.added.forEach(addPicture);

// -- names, hidden and merged concepts ---------------------------------------------------------------------------------

let isChanging = false;
async function change(what, ...how) {
  if (isChanging) return; // a second click on Undo would undo the one before, unseen
  isChanging = true;
  try {
    const { said } = await waiting("Changing", ask("change", JSON.stringify({ do: what, what: how[0] ?? [], name: how[1] ?? "" })));
    sessionStorage.setItem(SAID, what === "undo" ? `Undone: ${said}` : capital(said));
    location.reload();
  } catch (error) {
    isChanging = false;
    tell(error);
  }
}

const undoButton = () => data.live.changed && h("button", { type: "button", class: "button", onclick: () => change("undo") }, "Undo");
const action = (text, act) => h("button", { type: "button", class: "button", onclick: act }, text);

/** A button that becomes a field for the name, which is `given` if it is not the one it had at first. */
function renaming(what, given) {
  const field = h("input", { type: "text", maxlength: 60, value: given, "aria-label": "Name", autocomplete: "off" });
  const close = () => { form.replaceWith(button); button.focus(); };
  const form = h("form", { class: "renaming", onsubmit: (event) => { event.preventDefault(); change("name", [what], field.value); }, onkeydown: (event) => event.key === "Escape" && close() },
    field, h("button", { class: "button" }, "Save"), action("Cancel", close));
  const button = action("Rename", () => { button.replaceWith(form); field.select(); });
  return button;
}

function partTools(p) {
  const { letter, name } = data.parts[p];
  return h("span", { class: "tools" }, renaming(letter, name === `part ${letter}` ? "" : name));
}

function conceptTools(k) {
  // Those that lie near first: they look alike.
  const others = data.order.filter((other) => other !== k && data.concepts[other].part === data.concepts[k].part);
  const near = data.concepts[k].neighbours.filter((other) => others.includes(other));
  const select = h("select", { "aria-label": "Merge with", onchange: () => { merge.disabled = select.value === ""; } },
    h("option", { value: "" }, "Merge with …"), [...near, ...others.filter((other) => !near.includes(other))].map((other) => h("option", { value: String(other) }, conceptName(other))));
  const merge = action("Merge", () => change("merge", [k, Number(select.value)]));
  merge.disabled = true;
  return h("div", { class: "tools" }, renaming(k, data.concepts[k].given ? data.concepts[k].name : ""),
    isHidden(k) ? action("Show", () => change("show", [k])) : action("Hide", () => change("hide", [k])), others.length > 0 && [select, merge], undoButton());
}

/** Where those are that can be shown again. */
const hiddenLinks = () => hiddenConcepts.length > 0 && note("Hidden: ", hiddenConcepts.map((k, index) => [index > 0 && ", ", h("a", { href: link.concept(k) }, conceptName(k))]), ".");

const said = sessionStorage.getItem(SAID);
sessionStorage.removeItem(SAID);
if (said) {
  const line = h("p", { role: "status" }, said, h("span", { class: "tools" }, /^(Undone|Concepts)/.test(said) ? null : undoButton(), action("Close", () => line.remove())));
  tray.append(line);
}
