"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const at = (name) => data.columns.findIndex((column) => column.name === name);
const ok = (run) => ["ok", "predicted"].includes(run[at("status")]);
const bestRuns = new Set(data.best.map((entry) => entry.run));

function element(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function row(cells, tag = "td") {
  const made = element("tr");
  for (const [text, kind] of cells) made.append(element(tag, text, kind));
  return made;
}

function words(value, column) {
  if (value === null) return "–";
  if (column.text) return value;
  if (column.unit === "") return String(+value.toPrecision(3));
  if (column.unit === "%") return (value >= 0 ? "+" : "") + value.toFixed(1);
  return value.toFixed(Math.abs(value) < 100 ? 2 : 1);
}

function draw(place, figure) {
  const axes = Object.keys(figure.layout).filter((key) => /axis/.test(key));
  const shared = Object.fromEntries(axes.map((key) => [key, { gridcolor: "#e4e4e4", zeroline: false, ...figure.layout[key] }]));
  const legend = { orientation: "h", yanchor: "bottom", y: 1.02, x: 0 };
  const narrow = window.innerWidth < 600;
  const layout = { margin: { l: narrow ? 45 : 70, r: narrow ? 10 : 50, t: 60, b: 50 }, plot_bgcolor: "white", modebar: { orientation: "v" }, font: { size: 12 }, legend, ...figure.layout, ...shared };
  return Plotly.react(place, figure.data, layout, { responsive: true, displaylogo: false, displayModeBar: !narrow });
}

// ---- all runs: sorted by a click on a heading, filtered by words and lists; a click on a run shows how to repeat it

const table = byId("runs-table");
const rows = data.runs.map((run, index) => {
  const made = row(run.map((value, i) => [words(value, data.columns[i]), data.columns[i].text ? "text" : ""]));
  if (!ok(run)) made.classList.add("bad");
  if (bestRuns.has(index)) made.classList.add("best");
  made.dataset.run = index;
  return made;
});
const text = data.runs.map((run, index) => [...run.filter((value, i) => data.columns[i].text), data.reasons[index]].join(" ").toLowerCase());
let order = rows.map((_, index) => index);
let sorted = { column: -1, down: false };

function sortBy(column) {
  sorted = { column, down: sorted.column === column && !sorted.down };
  const sign = sorted.down ? -1 : 1;
  order.sort((a, b) => {
    const [x, y] = [data.runs[a][column], data.runs[b][column]];
    if (x === null || y === null) return (x === null) - (y === null);  // what is not known stands last
    return sign * (x < y ? -1 : x > y ? 1 : 0) || a - b;
  });
  table.querySelectorAll("th").forEach((heading, i) => {
    if (i === column) heading.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
    else heading.removeAttribute("aria-sort");
  });
  show();
}

const chosen = new Map();
let filtered = [];
const SHOWN = 200;  // rows at once: a browser takes a second to lay out a thousand
function show(all = false) {
  const asked = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = order.filter((index) => asked.every((word) => text[index].includes(word))
    && [...chosen].every(([column, value]) => value === "" || words(data.runs[index][column], data.columns[column]) === value));
  const shown = all ? wanted : wanted.slice(0, SHOWN);
  filtered = wanted;
  table.tBodies[0].replaceChildren(...shown.map((index) => rows[index]));
  const first = shown.length < wanted.length ? `, of which the first ${SHOWN} are shown` : "";
  byId("shown").textContent = `${wanted.length} of ${rows.length} runs${first}; a click on a run shows its command `;
  byId("shown").append(button("save these as CSV", saveCsv), " ");
  if (first) byId("shown").append(button("show all", () => show(true)));
}

function button(text, onClick) {
  const made = element("button", text);
  made.addEventListener("click", onClick);
  return made;
}

// The filtered rows in their order, with every column in the unit that the page shows, name, reason and folder.
function csv() {
  const quoted = (value) => (/[",\n]/.test(value ?? "") ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? ""));
  const heading = ["name", ...data.columns.map((column) => (column.unit ? `${column.name} (${column.unit})` : column.name)), "reason", "folder"];
  const lines = filtered.map((index) => [data.names[index], ...data.runs[index], data.reasons[index], data.folders[index]]);
  return [heading, ...lines].map((line) => line.map(quoted).join(",")).join("\n") + "\n";
}

function saveCsv() {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
  link.download = `${document.title}.csv`;
  link.click();
  URL.revokeObjectURL(link.href);
}

function filters() {
  const place = byId("filters");
  const label = element("label", "words ");
  const input = element("input");
  input.id = "search";
  input.addEventListener("input", () => show());
  label.append(input);
  place.append(label);
  for (const name of ["workload", "strategy", "scheduler", "budget", "status"]) {
    const column = at(name);
    if (column < 0) continue;
    const values = [...new Set(data.runs.map((run) => words(run[column], data.columns[column])))];
    if (values.length < 2) continue;
    values.sort((a, b) => (data.columns[column].text ? a.localeCompare(b) : parseFloat(a) - parseFloat(b)));
    const label = element("label", `${name} `);
    const list = element("select");
    list.dataset.column = name;
    list.append(new Option("all", ""), ...values.map((value) => new Option(value, value)));
    list.addEventListener("change", () => { chosen.set(column, list.value); show(); });
    label.append(list);
    place.append(label);
  }
}

function detail(index) {
  const cell = element("td");
  cell.colSpan = data.columns.length;
  if (data.reasons[index]) cell.append(element("p", data.reasons[index]));
  cell.append(command(index), element("p", `in ${data.folders[index]}`));
  const made = element("tr", undefined, "detail");
  made.append(cell);
  return made;
}

function command(index) {
  const known = data.commands[index];
  return known ? element("code", known) : element("span", `its settings are in ${data.folders[index]}/config.yaml`);
}

table.tBodies[0].addEventListener("click", (event) => {
  const clicked = event.target.closest("tr");
  if (!clicked || clicked.classList.contains("detail")) return;
  if (clicked.nextSibling?.classList.contains("detail")) clicked.nextSibling.remove();
  else clicked.after(detail(Number(clicked.dataset.run)));
});

function headings(place, columns) {
  const made = element("tr");
  columns.forEach((column, index) => {
    const heading = element("th", column.name, column.text ? "text" : "");
    if (column.unit) heading.append(element("small", column.unit));
    if (place === table) heading.addEventListener("click", () => sortBy(index));
    made.append(heading);
  });
  place.tHead.append(made);
}

// ---- best plans, curves, periods

function best() {
  const several = new Set(data.best.map((entry) => entry.workload)).size > 1;
  const numbers = ["share", "step", "p10", "p90", "predicted", "overlap ratio", "peak"].map(at);
  const text = (name) => ({ name, unit: "", text: true });
  headings(byId("best-table"), [...(several ? [text("workload")] : []), text("budget"), text("plan"),
    ...numbers.map((i) => data.columns[i]), text("to repeat it")]);
  for (const entry of data.best) {
    const made = row([...(several ? [[entry.workload, "text"]] : []), [entry.budget, "text"], [entry.label, "text"],
      ...numbers.map((i) => [words(data.runs[entry.run][i], data.columns[i]), ""])]);
    const cell = element("td", undefined, "command");
    const details = element("details");
    details.append(element("summary", "command"), command(entry.run));
    cell.append(details);
    made.append(cell);
    byId("best-table").tBodies[0].append(made);
  }
}

function provenance() {
  for (const [what, value] of data.provenance) byId("provenance").append(element("dt", what), element("dd", value));
}

function engines() {
  const number = (name, unit) => ({ name, unit, text: false });
  const columns = [{ name: "engine", unit: "", text: true }, { name: "budget", unit: "", text: true }, number("step", "ms"),
    number("p10", "ms"), number("p90", "ms"), number("× the fastest of mdcs", ""),
    number("exposed", "ms"), number("overlap ratio", ""), number("sent", "MB"), number("peak", "MiB"), number("runs", "")];
  if (data.engines.length) byId("engine-tables").replaceChildren();
  for (const { title, rows } of data.engines) {
    const [made, place] = [element("table"), element("div", undefined, "scroll")];
    made.createTHead();
    headings(made, columns);
    made.createTBody().append(...rows.map((cells) => row(cells.map((cell, i) => [words(cell, columns[i]), columns[i].text ? "text" : ""]))));
    place.append(made);
    byId("engine-tables").append(element("h3", title), place);
  }
}

function curves() {
  const drawn = (place) => { soon.unobserve(place); draw(place, data.figures[place.dataset.figure].figure); };
  const soon = new IntersectionObserver(
    (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => drawn(entry.target)), { rootMargin: "600px" });
  window.addEventListener("beforeprint", () => show(true));
  window.addEventListener("beforeprint", () => document.querySelectorAll("[data-figure]").forEach(drawn));
  data.figures.forEach((figure, index) => {
    const place = element("div");
    place.dataset.figure = index;
    place.style.minHeight = `${figure.figure.layout.height}px`;
    byId("figures").append(element("h3", figure.title), element("p", figure.told, "note"), place);
    soon.observe(place);
  });
}

function period() {
  const { timeline, memory } = data.periods[byId("period").value];
  draw(byId("timeline"), timeline);
  if (memory) draw(byId("memory"), memory);
  else { Plotly.purge(byId("memory")); byId("memory").textContent = "not measured"; }
}

byId("counts").textContent = Object.entries(data.counts).map(([status, count]) => `${count} ${status}`).join(", ");
provenance();
best();
engines();
curves();
headings(table, data.columns);
filters();
sortBy(at("step"));
if (data.periods.length) {
  data.periods.forEach((each, index) => byId("period").append(new Option(each.title, index)));
  byId("period").addEventListener("change", period);
  period();
} else byId("period").replaceWith("no run has a timeline");
document.body.dataset.ready = "yes";
