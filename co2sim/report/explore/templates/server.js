"use strict";
// Exact answers from the server that gave out this page, and the forms that it checks.
function serverSource(server) {
  let view = structuredClone(server.view);
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
    for (const [name, text] of Object.entries(view.options)) if (text) found.push([`option.${name}`, text]);
    for (const [path, text] of Object.entries(view.set)) found.push(["set", `${path}=${text}`]);
    return found;
  }

  function parsed(params) {
    if (!params.has("cluster")) return structuredClone(view);
    const found = { ...structuredClone(server.view), cluster: params.get("cluster"), model: params.get("model") ?? "", strategies: params.getAll("strategy"), options: {}, set: {} };
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
    view = next;
    fill(found);
    return { ...found.asked, tokens: view.tokens };
  }

  // What another link asks about, without changing the forms.
  async function about(params) {
    const itself = parsed(params);
    const found = await post("begin", itself);
    return { about: found.asked, view: itself };
  }

  // A change of the forms: the sliders stay where they were, as far as they can.
  async function change(next, wrong) {
    try {
      const found = await post("begin", next);
      view = next;
      asked = { ...found.asked, tokens: view.tokens };
      wrong.textContent = "";
      fill(found);
      say("");
      const { kept } = state;
      restored(new URLSearchParams(location.hash.slice(1)));
      state.kept = kept;
      await refresh();
    } catch (error) {
      wrong.textContent = error.message;
    }
  }

  // Checked as typed, and taken when the field is left.
  function watched(input, wrong, changed) {
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
      change(changed(), wrong);
    });
  }

  const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

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
      const set = { ...view.set };
      if (input.value.trim() === "") delete set[one.path];
      else if (input.value.trim() !== one.value) set[one.path] = input.value.trim();
      return { ...view, set };
    });
    box.append(label, one.assumed ? " (assumed) " : " ", input, wrong);
    return box;
  }

  function fill(found) {
    field("cluster").value = view.cluster;
    field("model").value = view.model;
    field("wanted").value = view.strategies.join("\n");
    for (const input of document.querySelectorAll("[data-option]")) input.value = view.options[input.dataset.option] ?? "";
    for (const id of ["cluster", "model", "wanted", "option"]) field(`${id}-wrong`).textContent = "";
    field("facts").replaceChildren(...found.facts.map(fact));
    const title = `${found.names[1]} on ${found.names[0]}`;
    document.querySelector("h1").textContent = title;
    document.title = title;
  }

  function options(id, names) {
    field(id).replaceChildren(...names.map((value) => Object.assign(document.createElement("option"), { value })));
  }

  options("clusters", server.catalog.clusters);
  options("models", server.catalog.models);
  for (const id of ["cluster", "model"]) {
    watched(field(id), field(`${id}-wrong`), () => ({ ...view, [id]: field(id).value.trim(), set: id === "cluster" ? kept("model.") : kept("") }));
  }
  // Numbers of another cluster are not those of this one.
  function kept(prefix) {
    const stays = (path) => (prefix ? path.startsWith(prefix) : !path.startsWith("model."));
    return Object.fromEntries(Object.entries(view.set).filter(([path]) => stays(path)));
  }
  watched(field("wanted"), field("wanted-wrong"), () => ({ ...view, strategies: lines(field("wanted").value) }));
  for (const input of document.querySelectorAll("[data-option]")) {
    watched(input, field("option-wrong"), () => ({ ...view, options: { ...view.options, [input.dataset.option]: input.value } }));
  }
  watched(field("more"), field("more-wrong"), () => {
    const [path, ...value] = field("more").value.split("=");
    return { ...view, set: path.trim() ? { ...view.set, [path.trim()]: value.join("=").trim() } : view.set };
  });
  for (const input of document.querySelectorAll("[data-kind]")) {
    input.addEventListener("change", async () => {
      const file = input.files[0];
      if (!file) return;
      try {
        if (file.size > 500000) throw new Error(`${file.name} is larger than 500 kB`);
        const { name } = await post("upload", { kind: input.dataset.kind, name: file.name, text: await file.text() });
        known = new Map(); // the file may have the name of another
        if (!server.catalog[`${input.dataset.kind}s`].includes(name)) server.catalog[`${input.dataset.kind}s`].unshift(name);
        options(`${input.dataset.kind}s`, server.catalog[`${input.dataset.kind}s`]);
        field("file-wrong").textContent = "";
        await change({ ...view, [input.dataset.kind]: name }, field("file-wrong"));
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
    view: () => structuredClone(view),
    kept: async (one) => (await simulated(one.view, [settings(one.positions, one.about)]))[0],
    figures: (many) => simulated(view, many.map((one) => settings(one))),
  };
}
