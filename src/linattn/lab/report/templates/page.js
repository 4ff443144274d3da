const root = document.documentElement;
const system = matchMedia("(prefers-color-scheme: dark)");
const NARROW = 600, NAME_WIDTH = 36;
const drawn = new Set();

// Plotly does not break long names, and a narrow page would cut them off.
function folded(name) {
  if (innerWidth >= NARROW || !name) return name;
  const lines = [""];
  for (const word of name.split(" ")) {
    if ((lines.at(-1) + word).length > NAME_WIDTH) lines.push("");
    lines[lines.length - 1] += (lines.at(-1) ? " " : "") + word;
  }
  return lines.join("<br>");
}

function themed(layout) {
  const style = getComputedStyle(root);
  const [ink, rule, tint] = ["--ink", "--rule", "--tint"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: rule, zerolinecolor: rule, linecolor: rule };
  // Where the page is narrow, a long legend takes the room of the chart.
  const height = innerWidth < NARROW && layout.meta ? layout.meta.narrow_height : layout.height;
  return { ...layout, height, template: {}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
           font: { color: ink, family: "system-ui, sans-serif" },
           hoverlabel: { bgcolor: tint, bordercolor: rule, font: { color: ink } },
           xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis } };
}

function draw(id) {
  const { data, layout } = figures[id];
  const traces = data.map((trace) => ({ ...trace, name: folded(trace.name) }));
  Plotly.react(id, traces, themed(layout), { responsive: true, displayModeBar: false });
  drawn.add(id);
}

function redraw() {
  for (const id of drawn) draw(id);
}

// Charts in closed details have no width yet: they are drawn when they are opened.
for (const id of Object.keys(figures)) {
  const details = document.getElementById(id).closest("details");
  if (!details) draw(id);
  else details.addEventListener("toggle", () => { if (details.open) draw(id); });
}

function show(theme) {
  root.dataset.theme = theme;
  const other = theme === "dark" ? "light" : "dark";
  document.getElementById("theme").textContent = other === "dark" ? "Dark" : "Light";
  document.getElementById("theme").setAttribute("aria-label", `Switch to ${other} colours`);
  redraw();
}

document.getElementById("theme").addEventListener("click", () => show(root.dataset.theme === "dark" ? "light" : "dark"));
system.addEventListener("change", () => show(system.matches ? "dark" : "light"));
show(system.matches ? "dark" : "light");

const choice = document.getElementById("choice");
if (choice) {
  choice.addEventListener("change", () => { figures["head-map"].data[0].z = cells[choice.value]; draw("head-map"); });
}

// Numbers are compared as numbers, what is no number as text and last.
function compared(a, b) {
  const [x, y] = [a, b].map((text) => parseFloat(text.replaceAll(",", "")));
  if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
  return Number.isNaN(x) ? a.localeCompare(b) : x - y;
}

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const column = head.cellIndex, descending = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const rows = [...body.rows].filter((row) => !row.classList.contains("baseline"));
    const text = (row) => row.cells[column].textContent.trim();
    rows.sort((a, b) => compared(text(a), text(b)) * (descending ? -1 : 1));
    body.append(...rows);
  });
}

for (const field of document.querySelectorAll("input[data-filters]")) {
  const body = document.getElementById(field.dataset.filters).tBodies[0];
  field.addEventListener("input", () => {
    const wanted = field.value.trim().toLowerCase();
    for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}

const search = document.getElementById("claim-search");
if (search) {
  const buttons = [...document.querySelectorAll("button[data-status]")];
  const items = [...document.querySelectorAll("[data-claim]")];
  const filter = () => {
    const status = buttons.find((button) => button.getAttribute("aria-pressed") === "true").dataset.status;
    const wanted = search.value.trim().toLowerCase();
    const words = new Map();
    for (const item of items) words.set(item.dataset.claim, (words.get(item.dataset.claim) ?? "") + item.textContent);
    let shown = 0;
    for (const item of items) {
      item.hidden = !((status === "all" || item.dataset.of === status)
                      && words.get(item.dataset.claim).toLowerCase().includes(wanted));
      if (!item.hidden && item.tagName === "TR") shown += 1;
    }
    document.getElementById("claims-shown").textContent = `${shown} shown`;
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      filter();
    });
  }
  search.addEventListener("input", filter);
}

function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); }
}

addEventListener("hashchange", openTarget);
openTarget();
