// Draws a chart (charts.py) as SVG at the width of its place. Colours come from the page's style.
const SVG = { left: 62, right: 16, tick: 6, line: 15, below: 18, slope: 40, reach: 28, most: 170, beside: 10 };
const SHAPES = ["M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z", "M-4-4h8v8h-8z", "M0-5.5L5.5 0L0 5.5L-5.5 0z",
                "M0-5L5 4H-5z", "M0 5L5-4H-5z", "M-1.5-5h3v3.5H5v3H1.5V5h-3V1.5H-5v-3h3.5z",
                "M-5-3L-3-5L0-2L3-5L5-3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0z", "M0-5.5L5 0L2.5 5H-2.5L-5 0z", "M-5-5H5L-5 5H5z"];
const STROKE = "M-8 0H8";
const DASHES = { solid: "", dash: "7 4", dot: "2 4", dashdot: "8 4 2 4" };

function escaped(text) {
  return text.replace(/[&<>"]/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[letter]);
}

// The width of a text as the page draws it.
const pen = document.createElement("canvas").getContext("2d");
pen.font = "12px system-ui, sans-serif";
function wide(text) {
  return pen.measureText(text).width;
}

// A text, or as much of it as a width has room for.
function fitted(text, width) {
  if (wide(text) <= width) return text;
  let length = text.length - 1;
  while (length > 1 && wide(`${text.slice(0, length)}…`) > width) length -= 1;
  return `${text.slice(0, length)}…`;
}

function wrapped(text, width) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (lines.at(-1) && wide(longer) > width) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines;
}

function written(value) {
  if (value === 0) return "0";
  const size = Math.abs(value), power = Math.round(Math.log10(size));
  if (size >= 1e-3 && size < 1e6) return value.toLocaleString("en", { maximumSignificantDigits: 4 });
  const digits = [...String(power)].map((digit) => (digit === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit])).join("");
  return Math.abs(size / 10 ** power - 1) < 1e-6 ? `${value < 0 ? "−" : ""}10${digits}` : value.toExponential(0);
}

// From numbers to pixels between two ends, and the round numbers in between.
function scale(axis, values, from, to, room) {
  const place = axis.is_logarithmic ? Math.log10 : (value) => value;
  const back = axis.is_logarithmic ? (value) => 10 ** value : (value) => value;
  let [least, most] = axis.ends ?? (values.length ? [Math.min(...values), Math.max(...values)] : [1, 1]).map(place);
  if (!(most > least)) [least, most] = [least - 0.5, least + 0.5];
  const margin = axis.ends ? 0 : 0.04 * (most - least);
  [least, most] = [least - margin, most + margin];
  const at = (value) => from + ((place(value) - least) / (most - least)) * (to - from);
  const wanted = Math.max(2, Math.floor(Math.abs(to - from) / room));
  let ticks = axis.ticks;
  if (!ticks.length && axis.is_logarithmic && most - least >= 1) {
    const stride = Math.ceil((most - least) / wanted), factors = (most - least) * 3 < wanted ? [1, 2, 5] : [1];
    const powers = [];
    for (let power = Math.floor(least); power <= most; power += stride) powers.push(power);
    ticks = powers.flatMap((power) => factors.map((factor) => factor * 10 ** power));
  } else if (!ticks.length) {
    const [low, high] = [back(least), back(most)], rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
    for (let number = Math.ceil(low / step); number * step <= high; number += 1) ticks = [...ticks, number * step];
  }
  ticks = ticks.map((tick) => (Array.isArray(tick) ? tick : [tick, written(tick)]));
  return { at, ticks: ticks.filter(([value]) => place(value) >= least - 1e-9 && place(value) <= most + 1e-9) };
}

function words(lines, x, y, attributes) {
  return lines.map((line, number) => `<text x="${x}" y="${y + number * SVG.line}" ${attributes}>${escaped(line)}</text>`).join("");
}

function drawnCurve(curve, number, x, y) {
  const points = curve.x.map((value, at) => (curve.y[at] === null ? null : [x.at(value), y.at(curve.y[at])]));
  const colour = curve.colour === null ? "grey" : `c${curve.colour}`;
  let path = "", marks = "", bars = "";
  points.forEach((point, at) => {
    if (!point) return;
    const [left, top] = point.map((value) => value.toFixed(1));
    path += `${points[at - 1] ? "L" : "M"}${left} ${top}`;
    const shape = curve.marks === "shape" ? SHAPES[curve.colour ?? 0] : curve.marks === "stroke" ? STROKE : "M0 0";
    marks += `<path class="mark ${curve.marks}" d="${shape}" transform="translate(${left} ${top})" data-tip="${escaped(curve.tips[at])}"/>`;
    if (curve.low.length && curve.low[at] !== null && curve.high[at] !== null)
      bars += `M${left} ${y.at(curve.low[at]).toFixed(1)}V${y.at(curve.high[at]).toFixed(1)}`;
  });
  const line = curve.dash ? `<path class="line" d="${path}" stroke-dasharray="${DASHES[curve.dash]}"/>` : "";
  return `<g class="curve ${colour}" data-curve="${number}">${line}${bars ? `<path class="bar" d="${bars}"/>` : ""}${marks}</g>`;
}

// Labels of marks, each to the right, left, above or below; one without room clear of marks and labels is left out.
function labels(chart, x, y, room) {
  const marks = chart.curves.flatMap((curve) => (curve.labels ?? []).flatMap((text, at) => (
    curve.y[at] === null ? [] : [{ text, left: x.at(curve.x[at]), top: y.at(curve.y[at]) }])));
  const taken = marks.map(({ left, top }) => ({ left: left - 6, right: left + 6, top: top - 6, bottom: top + 6 }));
  const isClear = (box) => box.left >= room.left && box.right <= room.right && box.top >= room.top && box.bottom <= room.bottom
    && taken.every((one) => box.right < one.left || box.left > one.right || box.bottom < one.top || box.top > one.bottom);
  return marks.map(({ text, left, top }) => {
    const half = wide(text) / 2;
    for (const [across, down] of [[half + SVG.beside, 4], [-half - SVG.beside, 4], [0, -SVG.beside], [0, 2 * SVG.beside]]) {
      const box = { left: left + across - half, right: left + across + half, top: top + down - 13, bottom: top + down + 4 };
      if (!isClear(box)) continue;
      taken.push(box);
      return words([text], left + across, top + down, 'class="label" text-anchor="middle"');
    }
    return "";
  }).join("");
}

function drawnChart(chart, width) {
  const upper = chart.curves.flatMap((curve) => [...curve.y, ...curve.low, ...curve.high]).filter((value) => value !== null);
  const across = chart.curves.flatMap((curve) => curve.x.filter((_, at) => curve.y[at] !== null));
  const inner = width - SVG.left - SVG.right;
  const [above, below] = [wrapped(chart.y.title, width), wrapped(chart.x.title, inner)];
  const named = chart.x.ends !== null;
  const x = scale(chart.x, across, SVG.left, width - SVG.right, 84);
  const longest = Math.max(0, ...(named ? x.ticks.map(([, text]) => Math.min(wide(text), SVG.most)) : []));
  const slanted = named && longest > inner / x.ticks.length, slope = (SVG.slope * Math.PI) / 180;
  const tickRoom = slanted ? longest * Math.sin(slope) + 14 : SVG.below;
  const top = above.length * SVG.line + 10, bottom = chart.height - tickRoom - below.length * SVG.line - 10;
  const y = scale(chart.y, upper, bottom, top, 44);
  let last = -Infinity;
  const level = y.ticks.map(([value, text]) => {
    const at = y.at(value).toFixed(1);
    return `<path class="grid" d="M${SVG.left} ${at}H${width - SVG.right}"/>` + words([text], SVG.left - SVG.tick, Number(at) + 4, 'text-anchor="end"');
  });
  const upright = x.ticks.map(([value, text]) => {
    const at = x.at(value), short = fitted(text, slanted ? Math.min(SVG.most, (at - 4) / Math.cos(slope)) : SVG.most);
    const half = wide(short) / 2, line = named ? "" : `<path class="grid" d="M${at.toFixed(1)} ${top}V${bottom}"/>`;
    if (slanted) return line + words([short], 0, 0, `text-anchor="end" transform="translate(${at + 4} ${bottom + 14}) rotate(-${SVG.slope})"`);
    if (!named && at - half < last + 6) return line;
    last = at + half;
    return line + words([short], at.toFixed(1), bottom + SVG.below, 'text-anchor="middle"');
  });
  const curves = chart.curves.map((curve, number) => drawnCurve(curve, number, x, y));
  return `<svg viewBox="0 0 ${width} ${chart.height}" width="${width}" height="${chart.height}" aria-hidden="true">`
    + words(above, 0, 12, 'class="title"') + words(below, SVG.left + inner / 2, bottom + tickRoom + 16, 'class="title" text-anchor="middle"')
    + `${level.join("")}${upright.join("")}<path class="frame" d="M${SVG.left} ${top}V${bottom}H${width - SVG.right}"/>${curves.join("")}`
    + `${labels(chart, x, y, { left: SVG.left, right: width, top, bottom })}</svg>`;
}

function legend(chart) {
  const items = chart.curves.map((curve, number) => {
    if (!curve.is_listed) return "";
    const line = curve.dash ? `<path class="line" d="M0 7H30" stroke-dasharray="${DASHES[curve.dash]}"/>` : "";
    const shape = curve.marks === "shape" ? SHAPES[curve.colour ?? 0] : STROKE;
    const mark = curve.marks === "none" ? "" : `<path class="mark ${curve.marks}" d="${shape}" transform="translate(15 7)"/>`;
    const colour = curve.colour === null ? "grey" : `c${curve.colour}`;
    return `<li data-curve="${number}"><svg width="30" height="14" aria-hidden="true"><g class="curve ${colour}">${line}${mark}</g></svg>${escaped(curve.name)}</li>`;
  });
  return items.filter(Boolean).length > 1 ? `<ul class="legend">${items.join("")}</ul>` : "";
}

// The nearest mark within reach tells its figure.
function tell(place, event) {
  const tip = place.querySelector(".tip");
  let found = null, least = SVG.reach;
  for (const mark of place.querySelectorAll("[data-tip]")) {
    const box = mark.getBoundingClientRect();
    const far = Math.hypot(box.x + box.width / 2 - event.clientX, box.y + box.height / 2 - event.clientY);
    if (far < least) [found, least] = [{ mark, box }, far];
  }
  tip.hidden = !found;
  if (!found) return;
  const own = place.getBoundingClientRect();
  tip.textContent = found.mark.dataset.tip;
  tip.style.left = `${Math.max(0, Math.min(found.box.x - own.x + 12, own.width - tip.offsetWidth))}px`;
  tip.style.top = `${found.box.y - own.y - tip.offsetHeight - 8}px`;
}

// The most that a chart may be wide: on paper less.
let widest = Infinity;

// Puts a chart into its place; drawn again only where the width has changed.
function draw(place, chart) {
  const width = Math.max(260, Math.min(widest, Math.floor(place.clientWidth)));
  if (Number(place.dataset.width) === width) return;
  if (!place.dataset.width) {
    place.insertAdjacentHTML("afterend", legend(chart));
    const list = place.nextElementSibling;
    const light = (number) => place.querySelectorAll("[data-curve]").forEach((curve) => {
      curve.classList.toggle("dim", number !== null && curve.dataset.curve !== number);
    });
    for (const item of list?.matches(".legend") ? list.children : []) {
      item.addEventListener("pointerenter", () => light(item.dataset.curve));
      item.addEventListener("pointerleave", () => light(null));
    }
    place.addEventListener("pointermove", (event) => tell(place, event));
    place.addEventListener("pointerleave", () => { place.querySelector(".tip").hidden = true; });
  }
  place.dataset.width = width;
  place.innerHTML = `${drawnChart(chart, width)}<p class="tip" hidden></p>`;
}
