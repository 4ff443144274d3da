// Rows of a head under softmax and under a method, from what the audit kept (explored.py).
function cellsOf(text, place) {
  const [first, ...row] = text.slice(place * (explorer.cells + 1), (place + 1) * (explorer.cells + 1));
  const scale = 2 ** -explorer.letters.indexOf(first);
  return row.map((letter) => {
    const number = explorer.letters.indexOf(letter) - explorer.steps;
    return number > explorer.steps ? null : Math.sign(number) * scale * (number / explorer.steps) ** 2;
  });
}

function inBytes(count) {
  return `${count.toLocaleString("en")} bytes`;
}

function inDigits(error) {
  return error === null ? "not finite" : error.toFixed(2);
}

function rowsChart(rows, name) {
  const width = explorer.tokens / explorer.cells;
  const ends = rows[0].map((_, cell) => [Math.floor(cell * width), Math.max(Math.floor(cell * width), Math.floor((cell + 1) * width) - 1)]);
  const curve = (label, values, colour, dash) => ({
    name: label, x: ends.map(([first, last]) => (first + last) / 2), y: values, colour, dash, marks: "none", low: [], high: [], is_listed: true,
    tips: values.map((value, cell) => `keys ${ends[cell][0]} to ${ends[cell][1]}, ${label}: ${value === null ? "not finite" : value.toFixed(3)}`),
  });
  const axis = (title) => ({ title, is_logarithmic: false, ticks: [], ends: null });
  const curves = [curve("softmax", rows[0], null, "solid"), curve(name, rows[1], 0, "dash")];
  return { curves, x: axis("key, by its token"), y: axis("weight"), height: 210 };
}

const explorerPlaces = explorer ? explorer.queries.map((_, place) => `explorer-${place}`) : [];
if (explorer) {
  const [heads, budgets, methods] = ["head", "budget", "method"].map((name) => document.getElementById(`explorer-${name}`));
  const sizes = [...new Set(explorer.methods.map((method) => method.bytes))].sort((a, b) => a - b);
  budgets.append(new Option("any number of bytes", Infinity), ...sizes.map((size) => new Option(inBytes(size), size)));
  // The methods within the budget, the least error on this head first; the one chosen stays if it is among them.
  const offer = () => {
    const head = Number(heads.value), before = methods.value;
    const error = (method) => method.errors[head] ?? Infinity;
    const found = explorer.methods.filter((method) => method.bytes <= Number(budgets.value)).sort((a, b) => error(a) - error(b));
    methods.replaceChildren(...found.map((method) => new Option(`${method.name}: error ${inDigits(method.errors[head])}`, method.name)));
    methods.value = found.some((method) => method.name === before) ? before : found[0].name;
    tellHead();
  };
  const tellHead = () => {
    const head = Number(heads.value), method = explorer.methods.find((one) => one.name === methods.value);
    const saved = method.bytes < explorer.exact_bytes ? "less than" : "no less than";
    document.getElementById("explorer-words").textContent =
      `${method.name} on ${explorer.heads[head]}: relative error of its output ${inDigits(method.errors[head])}, uniform attention `
      + `${inDigits(explorer.averaging[head])}, softmax 0. It keeps ${inBytes(method.bytes)} per head, ${saved} the `
      + `${inBytes(explorer.exact_bytes)} of the exact cache of ${explorer.tokens.toLocaleString("en")} tokens.`;
    explorerPlaces.forEach((id, place) => {
      const rows = [explorer.exact[head], method.rows[head]].map((text) => cellsOf(text, place));
      figures[id] = rowsChart(rows, "the method");
      const box = document.getElementById(id), most = rows.map((row) => Math.max(...row.map((value) => value ?? 0)).toFixed(2));
      box.setAttribute("aria-label", `Attention of the query at token ${explorer.queries[place]} on ${explorer.heads[head]}: `
        + `the largest weight is ${most[0]} under softmax and ${most[1]} under ${method.name}`);
      if (box.dataset.width) { box.dataset.width = "1"; draw(box, figures[id]); }
    });
  };
  heads.addEventListener("change", offer);
  budgets.addEventListener("change", offer);
  methods.addEventListener("change", tellHead);
  offer();
}
