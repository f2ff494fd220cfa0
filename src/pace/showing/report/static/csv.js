// What is shown, as a table for spreadsheets.

/** A text that begins like a formula would be run as one. */
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(Math.round(1e6 * value) / 1e6);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** `rows` gives objects with the same fields in the same order. */
function csvButton(name, rows) {
  return h("button", { type: "button", class: "button", onclick: () => {
    const found = rows();
    if (!found.length) return say("Nothing is shown, so there is nothing to save");
    const lines = [Object.keys(found[0]), ...found.map((row) => Object.values(row))].map((row) => row.map(cell).join(","));
    const address = URL.createObjectURL(new Blob([`\ufeff${lines.join("\r\n")}\r\n`], { type: "text/csv" })); // else spreadsheets guess the alphabet
    h("a", { href: address, download: `${name}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
    say(`${plural(found.length, "row")} saved`);
  } }, "Save as CSV");
}

const imageRows = (images) => images.map((m) => {
  const n = predictedClass(m);
  return {
    image: data.names[m], label: data.labels?.[m], predicted: data.classNames[n], probability: n === null ? null : original.predictions[m][0][1],
    "concepts point to": data.pointed && data.classNames[data.pointed[m]],
    ...(places && { "places kept": keptPlaces(m).filter(Boolean).length / PATCHES }),
    ...Object.fromEntries(data.order.map((k) => [`${data.concepts[k].name} (share by ${byArea ? "area" : "attention"})`, shareIn(original, m, k)])),
  };
});

const conceptRows = (concepts) => concepts.map((k) => ({
  concept: data.concepts[k].name, [`share by ${byArea ? "area" : "attention"}`]: shareOf(k), images: imagesWith(k).length,
  "speaks for": classesOf(k).filter(([, value]) => value > 0).slice(0, 3).map(([n]) => data.classNames[n]).join("; "),
  nearest: data.concepts[k].neighbours.map((other) => data.concepts[other].name).join("; "),
  "comes with": together(k).map((one) => data.concepts[one.k].name).join("; "),
}));

const classRows = (classes) => classes.map((n) => ({
  class: data.classNames[n], shown: data.classes[n], images: predictedAs(n),
  concepts: data.classConcepts[n].map(([k, strength]) => `${data.concepts[k].name} (${strength.toFixed(3)})`).join("; "),
}));
