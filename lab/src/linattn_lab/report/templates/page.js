const root = document.documentElement;
const system = matchMedia("(prefers-color-scheme: dark)");

// A chart is drawn when it is seen, or printed: those in closed details have no width before.
const places = Object.keys(figures).map((id) => document.getElementById(id));
const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting) draw(target, figures[target.id]);
}, { rootMargin: "400px" });
const resized = new ResizeObserver((entries) => requestAnimationFrame(() => {
  for (const { target } of entries) if (target.dataset.width && target.clientWidth) draw(target, figures[target.id]);
}));
for (const place of places) {
  place.style.minHeight = `${figures[place.id].height}px`;
  seen.observe(place);
  resized.observe(place);
}
// Paper has no folds to open: all are, until it is printed. It is narrower than the screen, in pixels at 96 dots an inch:
// charts that are shrunk to it have letters too small to read.
const PAPER = 700;
let folded = [];
addEventListener("beforeprint", () => {
  widest = PAPER;
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const one of folded) one.open = true;
  for (const place of places) if (place.clientWidth) draw(place, figures[place.id]);
});
addEventListener("afterprint", () => {
  widest = Infinity;
  for (const place of places) if (place.clientWidth) draw(place, figures[place.id]);
  for (const one of folded) one.open = false;
});

function show(theme) {
  root.dataset.theme = theme;
  const other = theme === "dark" ? "light" : "dark";
  document.getElementById("theme").textContent = other === "dark" ? "Dark" : "Light";
  document.getElementById("theme").setAttribute("aria-label", `Switch to ${other} colours`);
}

document.getElementById("theme").addEventListener("click", () => show(root.dataset.theme === "dark" ? "light" : "dark"));
system.addEventListener("change", () => show(system.matches ? "dark" : "light"));
show(system.matches ? "dark" : "light");

const choice = document.getElementById("choice");
if (choice) {
  choice.addEventListener("change", () => {
    const ratios = cells[choice.value].flat();
    document.getElementById("chosen").textContent = choice.value;
    document.querySelectorAll("#head-map td").forEach((cell, number) => {
      cell.style.setProperty("--ratio", ratios[number] ?? 2);
      cell.textContent = ratios[number] === null ? "–" : ratios[number].toFixed(2);
    });
  });
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
