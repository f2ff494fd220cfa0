// The fragment of the address says what is shown: #/view/item?option=value.

const views = { concepts: conceptsView, images: imagesView, classes: classesView, ...(data.selection && { number: numberView }), trust: trustView };
const content = document.getElementById("content");
const scrolls = new Map(); // where the reader was, by address
let current = null;
let byLink = false;

function parse() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [name, item] = path.split("/");
  return { name: name in views ? name : "concepts", item: item ? decode(item) : null, query: new URLSearchParams(query ?? "") };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Changes the address of what is shown, without a new entry in the history. */
function replaceAddress(hash) {
  if (current) current.hash = hash;
  history.replaceState(null, "", hash);
}

function show() {
  if (current) scrolls.set(current.hash, scrollY);
  const { name, item, query } = parse();
  if (query.has("by")) byArea = query.get("by") === "area";
  else if (byArea) replaceAddress(address(name, item, Object.fromEntries(query)));
  const view = views[name];
  document.title = `${view.title} · ${data.title}`;
  const element = view.render(item, query);
  if (element !== content.firstElementChild) content.replaceChildren(element);
  view.afterwards?.();
  for (const tab of document.querySelectorAll("[data-view]")) {
    if (tab.dataset.view === name) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  const first = current === null;
  current = { hash: location.hash, name };
  scrollTo(0, byLink || first ? 0 : (scrolls.get(location.hash) ?? 0));
  if (!first) content.focus({ preventScroll: true });
  byLink = false;
}

function switchTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  say(`${now === "dark" ? "Light" : "Dark"} colours`);
}

history.scrollRestoration = "manual";
document.styleSheets[0].insertRule(`.thumbnail {
  background-image: url("data:${data.picture.type};base64,${data.sheet.base64}");
  background-size: ${100 * data.sheet.columns}% ${100 * data.sheet.rows}%;
}`);
document.body.classList.toggle("kinds", PARTS > 0);
document.getElementById("theme").addEventListener("click", switchTheme);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  content.focus();
});
document.addEventListener("click", (event) => {
  const followed = event.target.closest('a[href^="#/"]');
  byLink = followed !== null && followed.hash !== location.hash;
}, true);
if (data.warnings.length) { // in every view: whoever skips Trust would believe the rest
  document.querySelector('[data-view="trust"]').append(
    h("span", { class: "badge", "aria-hidden": "true" }, String(data.warnings.length)), h("span", { class: "unseen" }, `, ${plural(data.warnings.length, "warning")}`));
}
addEventListener("hashchange", show);
if (!location.hash && data.first !== null) history.replaceState(null, "", link.image(data.first));
show();
