"use strict";
// Exact answers from the server that gave out this page, and the forms that it checks.
function serverSource(server) {
  let view = structuredClone(server.view); // what the figures are about
  let latest = view; // and what was wished since
  let leaving = []; // paths of sliders that go back to their beginning with it
  const field = (id) => document.getElementById(id);

  async function post(what, body, blob) {
    let answer;
    try {
      answer = await fetch(`/${what}`, {
        method: "POST",
        headers: { "content-type": "application/json", "x-co2sim-token": server.token },
        body: JSON.stringify(body),
      });
    } catch {
      throw new Error("The server has ended: start `co2sim explore` again.");
    }
    if (!answer.ok) {
      const text = await answer.text();
      let words = text;
      try {
        words = JSON.parse(text).error;
      } catch {} // a plain text
      throw new Error(words);
    }
    return blob ? answer.blob() : answer.json();
  }

  function settings(positions, about = asked) {
    const found = {};
    about.controls.forEach((control, at) => {
      const stop = control.stops[positions[at]];
      if (positions[at] !== control.at && stop.setting !== null) found[control.path] = stop.setting;
    });
    return found;
  }

  function pairs() {
    const found = [["cluster", view.cluster], ["model", view.model], ...view.strategies.map((text) => ["strategy", text])];
    if (view.gpus !== null) found.push(["size", view.gpus]);
    for (const [name, text] of Object.entries(view.options)) if (text) found.push([`option.${name}`, text]);
    for (const [path, text] of Object.entries(view.set)) found.push(["set", `${path}=${text}`]);
    return found;
  }

  function parsed(params) {
    if (!params.has("cluster")) return structuredClone(view);
    const found = { ...structuredClone(server.view), cluster: params.get("cluster"), model: params.get("model") ?? "", strategies: params.getAll("strategy"), gpus: params.has("size") ? Number(params.get("size")) : null, options: {}, set: {} };
    for (const [name, text] of params) if (name.startsWith("option.")) found.options[name.slice(7)] = text;
    for (const text of params.getAll("set")) {
      const at = text.indexOf("=");
      if (at < 0) continue;
      found.set[text.slice(0, at)] = text.slice(at + 1);
    }
    return found;
  }

  async function begin(params) {
    const next = parsed(params);
    const found = await post("begin", next);
    view = latest = next;
    fill(found);
    return { ...found.asked, tokens: view.tokens };
  }

  // What another link asks about, without changing the forms.
  async function about(params) {
    const itself = parsed(params);
    const found = await post("begin", itself);
    return { about: found.asked, view: itself };
  }

  // A change of the forms: the sliders stay where they were, but for those that `reset` belong to what changed.
  async function change(next, wrong, reset = []) {
    latest = next;
    leaving.push(...reset);
    try {
      const found = await post("begin", next);
      if (next !== latest) return; // a later wish holds this one, too
      view = next;
      asked = { ...found.asked, tokens: view.tokens };
      wrong.textContent = "";
      fill(found);
      say("");
      const { kept } = state;
      const moved = new URLSearchParams(location.hash.slice(1));
      for (const path of [...moved.keys()]) if (leaving.some((one) => path === one || path.startsWith(`${one}.`))) moved.delete(path);
      leaving = [];
      restored(moved);
      state.kept = kept;
      await refresh();
    } catch (error) {
      wrong.textContent = error.message;
      if (next !== latest) return;
      latest = view;
      leaving = [];
    }
  }

  // Checked as typed, and taken when the field is left.
  function watched(input, wrong, changed, reset) {
    let waiting;
    input.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(async () => {
        try {
          await post("check", changed());
          wrong.textContent = "";
        } catch (error) {
          wrong.textContent = error.message;
        }
        input.setAttribute("aria-invalid", wrong.textContent !== "");
      }, 150);
    });
    input.addEventListener("change", () => {
      clearTimeout(waiting);
      change(changed(), wrong, reset);
    });
  }

  function fact(one) {
    const box = document.createElement("p");
    const label = document.createElement("label");
    label.textContent = one.path;
    const input = document.createElement("input");
    const wrong = document.createElement("span");
    Object.assign(input, { id: `fact-${one.path}`, value: one.value, spellcheck: false, title: `${one.assumed ? "assumed; " : ""}${one.source}` });
    Object.assign(wrong, { id: `${input.id}-wrong`, className: "doubt" });
    wrong.setAttribute("role", "alert");
    input.setAttribute("aria-describedby", wrong.id);
    label.htmlFor = input.id;
    watched(input, wrong, () => {
      const set = { ...latest.set };
      if (input.value.trim() === "") delete set[one.path];
      else if (input.value.trim() !== one.value) set[one.path] = input.value.trim();
      return { ...latest, set };
    });
    box.append(label, one.assumed ? " (assumed) " : " ", input, wrong);
    return box;
  }

  function fill(found) {
    field("cluster").value = view.cluster;
    field("model").value = view.model;
    forms = found.strategies;
    field("gpu").value = view.set.gpu ?? "";
    field("gpu").placeholder = found.gpu || "that of the cluster";
    field("size").value = view.gpus ?? "";
    field("name").value = field("more").value = "";
    field("price").value = view.set.price_per_gpu ?? "";
    field("price").placeholder = found.asked.price === null ? "none is known" : "as known for the cluster";
    priced(found);
    const sizes = found.asked.controls.find((one) => one.path === "gpus").stops;
    listed("sizes", sizes.map((stop) => [stop.setting, ""]));
    for (const input of document.querySelectorAll("[data-option]")) input.value = view.options[input.dataset.option] ?? "";
    for (const id of [...Object.keys(PICKED), "option", "name"]) field(`${id}-wrong`).textContent = "";
    field("facts").replaceChildren(...found.facts.map(fact));
    const title = `${found.names[1]} on ${found.names[0]}`;
    document.querySelector("h1").textContent = title;
    document.title = title;
  }

  function priced({ asked: about }) {
    const hint = field("price-hint");
    hint.hidden = about.price !== null;
    hint.textContent = "No price is known, so days have no cost. Give one, such as 2.5 USD/h.";
  }

  function listed(id, pairs) {
    field(id).replaceChildren(...pairs.map(([value, label]) => Object.assign(document.createElement("option"), { value, label })));
  }
  for (const kind of ["clusters", "gpus", "models", "stacks", "prices"]) listed(kind, server.catalog[kind]);
  listed("names", Object.entries(server.catalog.strategies).map(([name, one]) => [name, one.what]));

  // With these paths left out: numbers of another cluster are not those of this one.
  const without = (leaves) => Object.fromEntries(Object.entries(latest.set).filter(([path]) => !leaves(path)));
  const ofCluster = (path) => !path.startsWith("model.") && !path.startsWith("stack.");
  const setTo = (path, text) => ({ ...without((one) => one === path), ...(text ? { [path]: text } : {}) });
  const LINKS = ["inter", "wan", "intra"];
  const PICKED = {
    cluster: [(text) => ({ cluster: text, gpus: null, set: without(ofCluster) }), ["gpus", "price_per_gpu", "failures", ...LINKS]],
    gpu: [(text) => ({ set: { ...without((path) => path === "gpu" || path.startsWith("gpu.")), ...(text ? { gpu: text } : {}) } }), []],
    size: [(text) => ({ gpus: text ? (/^\d+$/.test(text) ? Number(text) : text) : null }), ["gpus", "failures"]],
    model: [(text) => ({ model: text, set: without((path) => path.startsWith("model.")) }), []],
    stack: [(text) => ({ options: { ...latest.options, stack: text }, set: without((path) => path.startsWith("stack.")) }), []],
    price: [(text) => ({ set: setTo("price_per_gpu", text) }), ["price_per_gpu"]],
  };
  for (const [id, [changed, reset]] of Object.entries(PICKED)) {
    watched(field(id), field(`${id}-wrong`), () => ({ ...latest, ...changed(field(id).value.trim()) }), reset);
  }

  // A list shows what begins like its field, so that one that is full shows one thing: a press empties it.
  for (const input of document.querySelectorAll("input[list]")) {
    const usual = input.placeholder;
    input.addEventListener("pointerdown", () => {
      if (document.activeElement === input || !input.value) return;
      Object.assign(input, { placeholder: input.value, value: "" });
      const back = () => {
        if (!input.value) input.value = input.placeholder;
        input.placeholder = usual;
      };
      input.addEventListener("blur", back, { once: true });
    });
  }

  // ---- strategies, each with its options as fields

  let forms = [];
  const written = (name, given) => {
    const pairs = Object.entries(given).map(([option, text]) => `${option}=${text}`);
    return pairs.length ? `${name}:${pairs.join(",")}` : name;
  };
  const replaced = (at, text) => ({ ...latest, strategies: latest.strategies.flatMap((one, place) => (place !== at ? [one] : text ? [text] : [])) });

  function optionField(one, now) {
    if (!one.number) {
      const select = document.createElement("select");
      const words = one.words.map((word) => Object.assign(document.createElement("option"), { textContent: word, selected: word === (now ?? one.usual) }));
      select.append(...words);
      return select;
    }
    const also = one.words.length ? `a number, ${one.words.join(", ")}` : "a number";
    return Object.assign(document.createElement("input"), { value: now ?? "", placeholder: one.usual, title: also, size: 5, spellcheck: false });
  }

  // The form of the strategy at a place, behind its name.
  function dress(box, at) {
    const { name, options } = forms[at];
    const made = server.catalog.strategies[name];
    const folded = document.createElement("details");
    const summary = Object.assign(document.createElement("summary"), { textContent: made.options.length ? "options" : "no options" });
    const wrong = Object.assign(document.createElement("span"), { className: "doubt", id: `strategy-${at}-wrong` });
    wrong.setAttribute("role", "alert");
    const grid = Object.assign(document.createElement("div"), { className: "options" });
    const inputs = made.options.map((one) => {
      const input = optionField(one, options[one.name]);
      Object.assign(input, { id: `strategy-${at}-${one.name}` });
      Object.assign(input.dataset, { strategy: at, named: one.name, usual: one.usual, given: input.value });
      const label = Object.assign(document.createElement("label"), { textContent: one.name, htmlFor: input.id });
      grid.append(label, input);
      return input;
    });
    const changed = () => {
      const given = inputs.map((input) => [input.dataset.named, input.value.trim()]).filter(([, text], place) => text !== "" && text !== inputs[place].dataset.usual);
      return replaced(at, written(name, Object.fromEntries(given)));
    };
    for (const input of inputs) watched(input, wrong, changed, [`strategy.${input.dataset.named}`]);
    const remove = Object.assign(document.createElement("button"), { type: "button", textContent: "Remove", disabled: view.strategies.length === 1 });
    remove.addEventListener("click", () => change(replaced(at, ""), wrong));
    folded.open = opened.has(name);
    folded.addEventListener("toggle", () => (folded.open ? opened.add(name) : opened.delete(name)));
    folded.append(summary, grid, remove);
    box.append(folded, wrong);
  }
  const opened = new Set(); // forms that stay open when they are made anew

  // Fields say what sliders say.
  function reflect() {
    for (const input of document.querySelectorAll("[data-strategy]")) {
      const at = asked.controls.findIndex((one) => one.path === `strategy.${input.dataset.named}`);
      if (at < 0 || document.activeElement === input) continue;
      const control = asked.controls[at];
      const setting = control.stops[state.positions[at]].setting;
      input.value = state.positions[at] === control.at || setting === null ? input.dataset.given : setting;
    }
  }

  watched(field("name"), field("name-wrong"), () => {
    const name = field("name").value.trim();
    return { ...latest, strategies: [...latest.strategies, ...(name ? [name] : [])] };
  });
  for (const input of document.querySelectorAll("[data-option]:not(#stack)")) {
    watched(input, field("option-wrong"), () => ({ ...latest, options: { ...latest.options, [input.dataset.option]: input.value } }));
  }
  watched(field("more"), field("more-wrong"), () => {
    const [path, ...value] = field("more").value.split("=");
    return { ...latest, set: path.trim() ? { ...latest.set, [path.trim()]: value.join("=").trim() } : latest.set };
  });
  for (const input of document.querySelectorAll("[data-kind]")) {
    input.addEventListener("change", async () => {
      const file = input.files[0];
      if (!file) return;
      try {
        if (file.size > 500000) throw new Error(`${file.name} is larger than 500 kB`);
        const { name } = await post("upload", { kind: input.dataset.kind, name: file.name, text: await file.text() });
        known = new Map(); // the file may have the name of another
        const kind = server.catalog[`${input.dataset.kind}s`];
        if (!kind.some(([one]) => one === name)) kind.unshift([name, "a file"]);
        listed(`${input.dataset.kind}s`, kind);
        field("file-wrong").textContent = "";
        const [changed, reset] = PICKED[input.dataset.kind];
        await change({ ...latest, ...changed(name) }, field("file-wrong"), reset);
      } catch (error) {
        field("file-wrong").textContent = error.message;
      }
    });
  }
  field("report").addEventListener("click", async () => {
    say("The report is being made.");
    try {
      const page = await post("report", { view: { ...view, tokens: state.tokens }, settings: [settings(state.positions)] }, true);
      const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(page), download: "report.html" });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
      say("Saved as report.html.");
    } catch (error) {
      say(error.message);
    }
  });
  field("commands").addEventListener("click", async () => {
    try {
      const found = await post("commands", { view: { ...view, tokens: state.tokens }, settings: [settings(state.positions)] });
      field("command").textContent = found.join("\n");
    } catch (error) {
      say(error.message);
    }
  });

  // Figures by what was asked: nothing is asked twice.
  let known = new Map();
  async function simulated(question, wanted) {
    const asking = { ...question, tokens: null };
    const keys = wanted.map((one) => JSON.stringify([asking, one]));
    const unknown = keys.map((_, at) => at).filter((at) => !known.has(keys[at]));
    if (unknown.length) {
      const store = known;
      const found = await post("figures", { view: asking, settings: unknown.map((at) => wanted[at]) });
      if (store !== known) return simulated(question, wanted); // a file is another one now
      if (known.size > 2000) known.clear();
      unknown.forEach((at, place) => known.set(keys[at], found[place]));
      if (unknown.length < wanted.length) return simulated(question, wanted);
    }
    return keys.map((key) => known.get(key));
  }

  return {
    slow: true,
    begin,
    about,
    pairs,
    dress,
    reflect,
    fitting: (positions, place) => post("fitting", { view: { ...view, tokens: null }, settings: settings(positions), place }),
    view: () => structuredClone(view),
    kept: async (one) => (await simulated(one.view, [settings(one.positions, one.about)]))[0],
    figures: (many) => simulated(view, many.map((one) => settings(one))),
  };
}
