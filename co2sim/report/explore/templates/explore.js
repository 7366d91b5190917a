"use strict";
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const byId = (id) => document.getElementById(id);
const specs = read("specs");
const content = read("explore");
const DAY = 86400;
const NOTHING = 1e-6; // a useful time below which nothing gets done, as in co2sim/prediction/totals.py
const options = { renderer: "svg", ast: true, actions: false };
const source = content.server ? serverSource(content.server) : gridSource(content.grid);

let asked = null; // { controls, strategies, unit, price, price_low, price_high, currency, bill, spot, gpus, failures, week, project, tokens }
let state = null; // { positions, hidden, tokens, x, y, kept }

// ---- what follows from figures by arithmetic

const place = (path, about = asked) => about.controls.findIndex((control) => control.path === path);
const stopOf = (positions, path, about = asked) => {
  const at = place(path, about);
  return at < 0 ? null : about.controls[at].stops[positions[at]];
};

// an end of the days with the same end of the step factor: independent, so that logarithms join in quadrature
function joined(days, end, factor) {
  if (days === null || factor === null || factor === 1) return end;
  const reach = Math.hypot(Math.log((end ?? days) / days), Math.log(factor));
  return days * Math.exp(factor > 1 ? reach : -reach);
}

// what a time on some GPUs costs at this plain price, as in co2sim/hardware/contract.py
function billed(bill, gpus, seconds, rate) {
  const each = bill.ways.map(([least, reserved]) => Math.max(seconds, least) * (reserved ?? rate));
  return Math.max(gpus, bill.gpus) * Math.min(...each) + bill.storing * seconds + bill.leaving;
}

function derived(figures, positions, about) {
  if (figures.error) return figures;
  const found = { ...figures };
  delete found.strategy; // rows are named once, as they are where the sliders are
  const speed = figures.tokens_per_s;
  const known = figures.slowest !== null;
  found.low = known ? speed * figures.slowest : null;
  found.high = known ? speed * figures.fastest : null;
  const gpus = stopOf(positions, "gpus", about)?.value ?? about.gpus;
  const price = stopOf(positions, "price_per_gpu", about)?.value ?? about.price;
  const days = (rate, useful) =>
    state.tokens === null || figures.factor === null || !(useful > 0) ? null : ((state.tokens * figures.factor) / rate / useful / DAY) * longer;
  const [longer, shortest, longest] = about.project;
  const lossy = figures.lost !== null && figures.lost !== undefined;
  const failing = lossy && (about.failures || (days(speed, 1) ?? 0) > about.week * longer);
  found.useful = failing ? 1 - figures.lost : 1;
  found.days = days(speed, found.useful);
  const least = NOTHING * found.useful;
  const fast = known ? days(found.high, failing ? Math.max(1 - figures.lost_least, least) : 1) : null;
  const slow = known ? days(found.low, failing ? Math.max(1 - figures.lost_most, least) : 1) : null;
  found.days_low = joined(found.days, joined(found.days, fast, figures.factor_low), shortest);
  found.days_high = joined(found.days, joined(found.days, slow, figures.factor_high), longest);
  const cost = (time, rate) => (time === null || price === null ? null : billed(about.bill, gpus, time * DAY, rate * about.spot));
  const given = positions[place("price_per_gpu", about)] === about.controls[place("price_per_gpu", about)]?.at;
  const [cheap, dear] = given ? [about.price_low, about.price_high] : [null, null];
  found.cost = cost(found.days, price);
  found.cost_low = found.days_low !== null || cheap !== null ? cost(found.days_low ?? found.days, cheap ?? price) : null;
  found.cost_high = found.days_high !== null || dear !== null ? cost(found.days_high ?? found.days, dear ?? price) : null;
  found.kwh = figures.watts === null || found.days === null ? null : (figures.watts / 1000) * found.days * 24;
  return found;
}

const METRICS = {
  tokens_per_s: { words: () => `${asked.unit}s/s`, log: true, format: "~s", ends: ["low", "high"] },
  exposed: { words: () => "exposed communication", log: false, format: ".0%", ends: null },
  memory: { words: () => "GiB on a GPU", log: false, format: "~g", ends: ["memory_low", "memory_high"] },
  days: { words: () => "days", log: true, format: "~g", ends: ["days_low", "days_high"], tokens: true },
  cost: { words: () => asked.currency, log: true, format: "~s", ends: ["cost_low", "cost_high"], tokens: true, money: true },
  useful: { words: () => "useful time", log: false, format: ".1%", ends: null, failures: true },
};

function metrics() {
  const priced = asked.price !== null;
  return Object.entries(METRICS).filter(
    ([, one]) => (!one.tokens || state.tokens !== null) && (!one.money || priced) && (!one.failures || asked.failures),
  );
}

// ---- words

const three = (value) => {
  if (value === null || value === undefined) return "-";
  const digits = Math.abs(value) >= 100 ? 0 : Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value) || 1)));
  return value.toLocaleString("en", { minimumFractionDigits: Math.min(digits, 6), maximumFractionDigits: Math.min(digits, 6) });
};
const whole = (value) => (value === null || value === undefined ? "-" : Math.round(value).toLocaleString("en"));
const share = (value) => (value === null || value === undefined ? "-" : `${(100 * value).toFixed(1)} %`);
const range = (low, high, shown) => (low === null || high === null ? "" : ` (90\u00a0%: ${shown(low)} to ${shown(high)})`);

const two = (value) => Number(value.toPrecision(2)).toLocaleString("en");
const memoryEnds = (row, before = "", after = "") => (row.memory_low === null ? "" : `${before}${two(row.memory_low)} to ${two(row.memory_high)}${after}`);

function answer(rows) {
  const shown = rows.filter((row) => !row.error && row.fits);
  const size = stopOf(state.positions, "gpus")?.text ?? whole(asked.gpus);
  const where = `On ${size} GPUs`;
  if (rows.length && rows.every((row) => row.error)) return [`${where} nothing of this can be simulated; the reasons stand below.`, ""];
  if (!shown.length) return [`${where} nothing of this fits in memory.`, ""];
  const trains = state.tokens !== null && shown.some((row) => row.days !== null);
  const key = !trains ? "tokens_per_s" : asked.price !== null ? "cost" : "days";
  const scored = shown.filter((row) => row[key] !== null);
  scored.sort((one, other) => (key === "tokens_per_s" ? other[key] - one[key] : one[key] - other[key]));
  const best = scored[0];
  const alone = scored.length === 1;
  let text = `${where}, ${best.strategy} `;
  if (key === "tokens_per_s") {
    text += `${alone ? "runs at" : "is the fastest:"} ${whole(best.tokens_per_s)} ${asked.unit}s/s${range(best.low, best.high, whole)}.`;
  } else {
    const money = best.cost === null ? "" : `, ${three(best.cost)} ${asked.currency}${range(best.cost_low, best.cost_high, three)}`;
    text += `${alone ? "takes" : key === "cost" ? "is the cheapest:" : "is the fastest:"} ${three(best.days)} days${range(best.days_low, best.days_high, three)}${money}.`;
  }
  text += ` Memory: ${best.memory_fit}, ${three(best.memory)} GiB${memoryEnds(best, " (90 %: ", ")")} of ${three(best.capacity)}.`;
  const [low, high] = METRICS[key].ends;
  const open = scored.slice(1).filter((row) => {
    if (best[low] === null || row[low] === null) return true;
    return key === "tokens_per_s" ? row[high] >= best[low] : row[low] <= best[high];
  });
  const doubt = open.length ? `Undecided, as 90 % intervals overlap: ${[best, ...open].map((row) => row.strategy).join("; ")}. ` : "";
  return [text, doubt + progress(shown, trains)];
}

// What is trained in a step, and how GPUs take it: in one line where all do alike.
function batchWords(rows) {
  const shown = rows.filter((row) => !row.error);
  if (!shown.length) return "";
  const alike = (text) => (new Set(shown.map(text)).size === 1 ? text(shown[0]) : shown.map((row) => `${row.strategy}: ${text(row)}`).join("; "));
  const tokens = (row) => (row.batch === row.samples ? "" : ` (${whole(row.batch)} ${asked.unit}s)`);
  const samples = (row) => (row.samples === null ? `a step of ${whole(row.batch)} ${asked.unit}s` : `a step of ${whole(row.samples)} samples${tokens(row)}`);
  const taken = (row) => `micro-batch ${row.micro_batch} x ${row.micro_steps} micro-step${row.micro_steps === 1 ? "" : "s"}, recompute ${row.recompute}`;
  const parts = [alike(samples), alike(taken), alike((row) => row.precision), alike((row) => row.stack)];
  return `Asked with ${parts.filter(Boolean).join("; ")}.`;
}

// A step of local updates is not worth a step of ddp.
function progress(shown, counted) {
  const steps = shown.filter((row) => row.factor !== 1).map((row) => `${row.strategy} ${row.factor === null ? "was not measured" : `takes ${three(row.factor)}${range(row.factor * row.factor_low, row.factor * row.factor_high, three)} times the steps of ddp`}`);
  if (!steps.length) return "";
  const head = counted ? "Counted in the days" : "Speed is not progress";
  const worth = shown.filter((row) => row.factor !== null).sort((one, other) => other.tokens_per_s / other.factor - one.tokens_per_s / one.factor);
  const first = counted || worth.length < 2 ? "" : ` Fastest to the same loss: ${worth[0].strategy}.`;
  return `${head}: to the same loss, ${steps.join("; ")}.${first}`;
}

// ---- drawing

const views = {};

// A chart is made anew where its shape changes; else only its data.
async function draw(id, shape, spec, label, datasets) {
  if (!datasets.rows.length) {
    views[id]?.view.finalize();
    delete views[id];
    byId(id).replaceChildren();
    return;
  }
  const key = JSON.stringify(shape);
  if (views[id]?.key === key) {
    for (const [name, rows] of Object.entries(datasets)) views[id].view.data(name, rows);
    await views[id].view.runAsync();
    return;
  }
  const whole = { ...spec(), datasets, description: label };
  views[id] = { key, view: (await vegaEmbed(byId(id), whole, options)).view };
}

function curveSpec(banded, names) {
  const metric = METRICS[state.y];
  const spec = structuredClone(specs.curve);
  const longest = Math.max(...names.map((name) => name.length));
  const columns = Math.max(1, Math.floor((byId("curve").clientWidth - 80) / (40 + 6.5 * longest))); // in pixels
  if (!banded) spec.layer = spec.layer.filter(({ mark }) => mark.type !== "area");
  const scale = metric.log ? { type: "log", nice: false, padding: 10 } : { zero: true, nice: true };
  for (const { encoding } of spec.layer) {
    if (encoding.x) encoding.x.title = asked.controls[state.x].title;
    for (const by of ["color", "shape"]) {
      if (encoding[by]) encoding[by].legend = { ...encoding[by].legend, columns };
      if (encoding[by]) encoding[by].scale = { domain: names, range: encoding[by].scale.range.slice(0, names.length) };
    }
    if (encoding.y) Object.assign(encoding.y, { title: metric.words(), scale, axis: { format: metric.format } });
  }
  return spec;
}

const barSpec = (name, count) => ({ ...structuredClone(specs[name]), height: Math.max(1, count) * 56 });

function curveRows(stops, many) {
  const metric = METRICS[state.y];
  return stops.flatMap((stop, at) =>
    many[at].filter((row) => !row.error && row[state.y] !== null).map((row) => {
      const [low, high] = metric.ends ? [row[metric.ends[0]], row[metric.ends[1]]] : [null, null];
      return {
        strategy: row.strategy,
        text: stop.text,
        value: row[state.y],
        shown: metric.format.endsWith("%") ? share(row[state.y]) : three(row[state.y]),
        low,
        high,
        interval: low === null ? "" : `${three(low)} to ${three(high)}`,
        fits: row.fits,
        memory: row.memory_fit,
      };
    }),
  );
}

const PARTS = specs.shares.encoding.color.scale.domain;

function shareRows(rows) {
  return rows.flatMap((row) => {
    const computing = 1 - row.exposed - row.slower - row.behind;
    return [computing, row.behind, row.exposed, row.slower].map((value, at) => ({ strategy: row.strategy, part: PARTS[at], share: value, place: at }));
  });
}

function cell(kind, text, figure) {
  const made = document.createElement(kind);
  made.textContent = text;
  if (figure) made.className = "figure";
  return made;
}

function table(rows, kept) {
  byId("kept").textContent = kept ? `Kept: ${state.kept.words}.` : "";
  byId("kept").hidden = !kept;
  const speed = `${asked.unit}s/s`;
  const spent = state.tokens === null ? [] : ["days", ...(asked.price === null ? [] : [asked.currency])];
  const heads = ["strategy", ...spent, speed, ...(kept ? [`kept: ${speed}`, "now against kept"] : []), "90 % interval", "exposed", "GiB", "micro-batch", "recompute"];
  const counts = asked.failures || rows.some((row) => row.useful < 1);
  if (counts) heads.push("useful time");
  const energy = rows.some((row) => !row.error && row.kwh !== null);
  if (state.tokens !== null && energy) heads.push("kWh");
  const body = document.createElement("tbody");
  const gone = (kept ?? []).filter((one) => !rows.some((row) => row.given === one.given));
  for (const row of [...rows, ...gone.map((one) => ({ ...one, error: "kept only" }))]) {
    const line = document.createElement("tr");
    const name = cell("th", row.strategy);
    name.scope = "row";
    line.append(name);
    const before = kept?.find((one) => one.given === row.given);
    const known = before && !before.error;
    const compared = kept ? [known ? whole(before.tokens_per_s) : "-", known && !row.error ? `x ${three(row.tokens_per_s / before.tokens_per_s)}` : "-"] : [];
    const texts = row.error
      ? [...spent.map(() => ""), row.error === "kept only" ? "" : "cannot be simulated", ...compared, ...Array(heads.length - spent.length - (kept ? 4 : 2)).fill("")]
      : [...spent.map((head) => three(head === "days" ? row.days : row.cost)), whole(row.tokens_per_s), ...compared, row.low === null ? "-" : `${whole(row.low)} to ${whole(row.high)}`, share(row.exposed),
         `${three(row.memory)}${memoryEnds(row, " (", ")")}${row.memory_fit === "fits" ? "" : `, ${row.memory_fit}`}`, `${row.micro_batch} x ${row.micro_steps}`, row.recompute,
         ...(counts ? [share(row.useful)] : []),
         ...(state.tokens !== null && energy ? [three(row.kwh)] : [])];
    line.append(...texts.map((text) => cell("td", text, true)));
    body.append(line);
  }
  const head = document.createElement("thead");
  const titles = document.createElement("tr");
  heads.forEach((text, at) => {
    const made = cell("th", text, at > 0);
    made.scope = "col";
    titles.append(made);
  });
  head.append(titles);
  byId("figures").replaceChildren(head, body);
}

// ---- one thing after another: the last wish counts, and none piles up

let running = false;
let wanted = null;
let held = null; // the place of the slider that was moved last
const PATIENCE = 3000; // milliseconds

async function update() {
  wanted = { positions: [...state.positions] };
  if (running) return;
  running = true;
  try {
    while (wanted) {
      const now = wanted;
      wanted = null;
      try {
        await shownAt(now.positions);
      } catch (error) {
        if (!wanted) byId("wrong").textContent = error.message; // else another question has taken the place of this one
      }
    }
  } finally {
    running = false;
    document.body.dataset.ready = "yes";
  }
  if (source.slow) ahead().catch(() => {}); // what is wrong there is said when somebody goes there
}

// While nothing moves: the other positions of a slider, the nearest first, so that a drag need not wait.
async function ahead() {
  const [question, from, axis, start] = [asked, [...state.positions], held ?? state.x, Date.now()];
  const distance = (stop) => Math.abs(stop - from[axis]);
  const others = asked.controls[axis].stops.map((_, stop) => stop).sort((one, other) => distance(one) - distance(other));
  for (const stop of others) {
    if (running || asked !== question || Date.now() - start > PATIENCE) return;
    await source.figures([from.map((at, place) => (place === axis ? stop : at))]);
  }
}

// Names of the strategies with the options that they have there; those that became alike are counted.
function namesOf(figures, about = asked) {
  const names = [];
  figures.forEach((one, at) => {
    const name = one.strategy ?? about.strategies[at];
    const same = figures.slice(0, at).filter((other) => other.strategy === name).length;
    names.push(same ? `${name} (${same + 1})` : name);
  });
  return names;
}

// Rows by the strategies that were given, with the names that they have where the sliders are.
const named = (figures, positions, names, about = asked) =>
  figures
    .map((one, at) => ({ ...derived(one, positions, about), strategy: names[at], given: about.strategies[at], place: at }))
    .filter((row) => !state.hidden.has(row.given));

async function shownAt(positions) {
  delete document.body.dataset.ready;
  const [found] = await source.figures([positions]);
  const labels = namesOf(found);
  const rows = named(found, positions, labels);
  const before = state.kept ? await source.kept(state.kept) : null;
  const kept = before && named(before, state.kept.positions, namesOf(before, state.kept.about), state.kept.about);
  document.querySelectorAll("#strategies .name").forEach((one, at) => (one.textContent = labels[at]));
  byId("batch").textContent = batchWords(rows);
  source.reflect?.();
  const [text, doubt] = answer(rows);
  byId("answer").textContent = text;
  byId("wrong").textContent = "";
  byId("doubt").textContent = doubt;
  table(rows, kept);
  const listed = (id, texts) => byId(id).replaceChildren(...texts.map((one) => cell("li", one)));
  listed("failed", rows.filter((row) => row.error).map((row) => `${row.strategy}: ${row.error}`));
  const notes = [...new Set(rows.flatMap((row) => row.notes ?? []))];
  const whose = (note) => rows.filter((row) => row.notes?.includes(note)).map((row) => row.strategy);
  listed("notes", notes.map((note) => `${whose(note).join(", ")}: ${note}`));
  byId("remarks").hidden = !notes.length;
  advise(rows, positions);
  const shown = rows.filter((row) => !row.error);
  const sizes = shown.map((row) => ({ strategy: row.strategy, size: row.memory, low: row.memory_low, high: row.memory_high, interval: memoryEnds(row), memory: row.memory_fit }));
  const names = shown.map((row) => row.strategy);
  await draw("shares", names, () => barSpec("shares", shown.length), "shares of the time of a round, a bar for each strategy", { rows: shareRows(shown) });
  await draw("memory", names, () => barSpec("memory", shown.length), "memory of a GPU, a bar for each strategy", { rows: sizes, now: shown.slice(0, 1).map((row) => ({ has: row.capacity })) });
  remember();
  if (wanted && source.slow) return; // somebody still drags
  const stops = source.slow ? thinned(asked.controls[state.x].stops, positions[state.x]) : asked.controls[state.x].stops;
  const along = stops.map((stop) => positions.map((at, axis) => (axis === state.x ? asked.controls[axis].stops.indexOf(stop) : at)));
  const over = [];
  const together = source.slow ? 4 : along.length;
  while (over.length < along.length) {
    over.push(...(await source.figures(along.slice(over.length, over.length + together))));
    if (wanted && source.slow) return;
  }
  const metric = METRICS[state.y];
  const label = `${metric.words()} over ${asked.controls[state.x].title}, a line for each strategy`;
  const now = [{ text: asked.controls[state.x].stops[positions[state.x]].text }];
  const curves = curveRows(stops, over.map((figures, at) => named(figures, along[at], labels)));
  const banded = curves.some((row) => row.low !== null);
  const order = stops.map((stop) => stop.text); // a chart keeps the order that it was made with
  const shape = [state.x, state.y, banded, names, labels, asked.unit, order];
  await draw("curve", shape, () => curveSpec(banded, labels), label, { rows: curves, now });
}

// What would fit instead of what does not; asked for last, as it takes a while.
async function advise(rows, positions) {
  const large = rows.filter((row) => !row.error && !row.fits);
  const list = (texts) => byId("fitting").replaceChildren(...texts.map((text) => cell("li", text)));
  if (!source.fitting) return list(large.map((row) => `${row.strategy} ${row.memory_fit.toLowerCase()}: fewer samples, more GPUs, recomputation, or a strategy that shards more; co2sim run says which would fit.`));
  if (!large.length) return list([]);
  const texts = [];
  for (const row of large) {
    try {
      texts.push(...(await source.fitting(positions, row.place)).map((text) => `${row.strategy}: ${text}`));
    } catch (error) {
      texts.push(`${row.strategy}: ${error.message}`);
    }
    if (`${positions}` !== `${state.positions}`) return;
  }
  list(texts);
}

function thinned(stops, keep) {
  const most = 9;
  if (stops.length <= most) return stops;
  const chosen = new Set([keep]);
  for (let at = 0; at < most - 1; at += 1) chosen.add(Math.round((at * (stops.length - 1)) / (most - 2)));
  return stops.filter((_, at) => chosen.has(at));
}

// ---- controls

function sliders() {
  const made = asked.controls.map((control, at) => {
    const box = document.createElement("div");
    box.className = "slider";
    const label = document.createElement("label");
    const name = document.createElement("span");
    name.textContent = control.title;
    const value = document.createElement("output");
    label.append(name, value);
    const input = document.createElement("input");
    Object.assign(input, { type: "range", min: 0, max: control.stops.length - 1, step: 1, id: `slider-${at}` });
    input.dataset.path = control.path;
    label.htmlFor = value.htmlFor = input.id;
    const moved = () => {
      value.textContent = control.stops[input.value].text;
      input.setAttribute("aria-valuetext", value.textContent);
    };
    input.value = state.positions[at];
    moved();
    input.addEventListener("input", () => {
      state.positions[at] = Number(input.value);
      held = at;
      moved();
      update();
    });
    box.append(label, input);
    return box;
  });
  byId("sliders").replaceChildren(...made);
}

function choices() {
  const box = byId("strategies");
  const legend = box.querySelector("legend");
  const made = asked.strategies.map((name, at) => {
    const box = document.createElement("div");
    const label = document.createElement("label");
    const input = document.createElement("input");
    Object.assign(input, { type: "checkbox", checked: !state.hidden.has(name), value: name });
    input.addEventListener("change", () => {
      if (input.checked) state.hidden.delete(name);
      else state.hidden.add(name);
      update();
    });
    label.append(input, " ", Object.assign(cell("span", name), { className: "name" }));
    box.append(label);
    source.dress?.(box, at);
    return box;
  });
  box.replaceChildren(legend, ...made);
  const over = (id, pairs, now, set) => {
    const select = byId(id);
    select.replaceChildren(...pairs.map(([value, text]) => Object.assign(document.createElement("option"), { value, textContent: text, selected: `${value}` === `${now}` })));
    select.onchange = () => {
      set(select.value);
      update();
    };
  };
  over("x", asked.controls.map((control, at) => [at, control.title]), state.x, (value) => {
    state.x = Number(value);
    held = null;
  });
  over("y", metrics().map(([key, metric]) => [key, metric.words()]), state.y, (value) => (state.y = value));
  byId("tokens").value = state.tokens === null ? "" : state.tokens.toExponential().replace("e+", "e");
  byId("drop").hidden = !state.kept;
}

byId("tokens").addEventListener("input", (event) => {
  const text = event.target.value.trim();
  const value = Number(text);
  const wrong = text !== "" && !(value >= 1 && value <= 1e18);
  byId("tokens-wrong").textContent = wrong ? `tokens is '${text}'; it must be a number from 1 to 1e18, such as 1e12` : "";
  event.target.setAttribute("aria-invalid", wrong);
  if (wrong) return;
  state.tokens = text === "" ? null : value;
  if (!metrics().some(([key]) => key === state.y)) state.y = "tokens_per_s";
  const typed = event.target.value;
  choices();
  event.target.value = typed;
  update();
});

byId("controls").addEventListener("submit", (event) => event.preventDefault());

function say(text) {
  byId("done").textContent = text;
}

byId("keep").addEventListener("click", () => {
  remember();
  const link = new URLSearchParams(location.hash.slice(1));
  link.delete("kept");
  state.kept = { about: asked, positions: [...state.positions], view: source.view?.() ?? null, words: words(asked, state.positions), link: `${link}` };
  choices();
  say("Kept: change anything, and the table compares.");
  update();
});
byId("drop").addEventListener("click", () => {
  state.kept = null;
  choices();
  say("");
  update();
});
byId("begin").addEventListener("click", () => {
  state = beginning();
  say("");
  refresh();
});
byId("link").addEventListener("click", async () => {
  remember();
  try {
    await navigator.clipboard.writeText(location.href);
    say("Copied.");
  } catch {
    say(`The link is in the address line: ${location.href}`);
  }
});

// ---- the view, as the address has it behind "#"

function beginning() {
  const positions = asked.controls.map((control) => control.at);
  const x = Math.max(0, place("inter.bandwidth"));
  return { positions, hidden: new Set(), tokens: asked.tokens, x, y: "tokens_per_s", kept: null };
}

function remember() {
  const view = new URLSearchParams(source.pairs ? source.pairs() : []);
  asked.controls.forEach((control, at) => {
    if (state.positions[at] !== control.at) view.set(control.path, control.stops[state.positions[at]].text);
  });
  for (const name of state.hidden) view.append("hide", name);
  if (state.tokens !== asked.tokens) view.set("tokens", state.tokens === null ? "" : `${state.tokens}`);
  view.set("x", asked.controls[state.x].path);
  view.set("y", state.y);
  if (state.kept) view.set("kept", state.kept.link);
  history.replaceState(null, "", `#${view}`);
}

function positionsOf(view, about, unknown) {
  return about.controls.map((control) => {
    const text = view.get(control.path);
    if (text === null) return control.at;
    const at = control.stops.findIndex((stop) => stop.text === text);
    if (at < 0) unknown.push(`${control.path}=${text}`);
    return at < 0 ? control.at : at;
  });
}

const words = (about, positions) =>
  [about.title, ...about.controls.flatMap((control, at) => (positions[at] === control.at ? [] : [`${control.title} ${control.stops[positions[at]].text}`]))].join(", ");

// What a link keeps to compare with: a link of its own.
async function keptOf(link) {
  if (!link) return null;
  const view = new URLSearchParams(link);
  const { about, view: itself } = source.about ? await source.about(view) : { about: asked, view: null };
  const positions = positionsOf(view, about, []);
  return { about, positions, view: itself, words: words(about, positions), link };
}

function restored(view) {
  const found = beginning();
  const unknown = [];
  found.positions = positionsOf(view, asked, unknown);
  for (const name of view.getAll("hide")) if (asked.strategies.includes(name)) found.hidden.add(name);
  if (view.has("tokens")) {
    const value = Number(view.get("tokens"));
    found.tokens = view.get("tokens") === "" ? null : value >= 1 && value <= 1e18 ? value : found.tokens;
  }
  const x = place(view.get("x"));
  if (x >= 0) found.x = x;
  state = found;
  held = null;
  if (metrics().some(([key]) => key === view.get("y"))) found.y = view.get("y");
  if (unknown.length) say(`This page does not have ${unknown.join(", ")}.`);
}

function refresh() {
  sliders();
  choices();
  return update();
}

async function start() {
  let view = new URLSearchParams(location.hash.slice(1));
  let wrong = "";
  try {
    asked = content.server ? await source.begin(view) : content.asked;
  } catch (error) {
    wrong = error.message;
  }
  try {
    if (wrong) {
      view = new URLSearchParams(); // a link that is wrong: what the page knows already
      asked = await source.begin(view);
    }
    restored(view);
    state.kept = await keptOf(view.get("kept"));
    await refresh();
  } catch (error) {
    wrong = error.message;
  }
  if (wrong) byId("wrong").textContent = wrong;
}

addEventListener("hashchange", start);
start();
