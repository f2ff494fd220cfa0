// Building elements. Text is always text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [key, rule] of Object.entries(value)) node.style.setProperty(key, rule);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
const svg = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

const percent = (share, digits = share < 0.0995 ? 1 : 0) => `${(100 * share).toFixed(digits)} %`;
const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
const signedNumber = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;

/** A number of any size with about three digits. */
function figure(value) {
  if (value === null) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en").replace("-", "−");
  const size = Math.abs(value);
  const text = size >= 1000 ? Math.round(value).toLocaleString("en") : size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
  return text.replace("-", "−");
}

function say(text) {
  document.getElementById("live").textContent = text;
}

/** Calls `task` once, when the element comes near the window; pictures that nobody sees are never decoded. */
const onSight = (() => {
  const tasks = new WeakMap();
  const observer = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (!isIntersecting) continue;
        observer.unobserve(target);
        tasks.get(target)();
      }
    },
    { rootMargin: "400px" },
  );
  return (node, task) => {
    tasks.set(node, task);
    observer.observe(node);
    return node;
  };
})();

/** Calls `action` with the last arguments once there has been no call for `wait` ms. */
function settle(action, wait) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...args), wait);
  };
}
