"use strict";
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const specs = read("specs");
const rounds = read("rounds");
// Expressions are interpreted, so that the page needs no eval.
const options = { renderer: "svg", ast: true, actions: { export: true, source: false, compiled: false, editor: false } };

async function draw(place, spec) {
  try {
    await vegaEmbed(place, spec, options);
    place.querySelector("details > summary").setAttribute("aria-label", "save this chart");
  } catch (error) {
    place.textContent = `This chart could not be drawn: ${error.message}`;
  }
}

for (const place of document.querySelectorAll("[data-chart]")) {
  draw(place, { ...specs[place.dataset.chart], description: place.dataset.label });
}

const choices = [...document.querySelectorAll("select.round")];
const timelines = [...document.querySelectorAll("[data-round]")];

const LONGER = 8;

function drawRounds() {
  const shown = choices.map((choice) => rounds[choice.value]);
  const kinds = new Set(shown.flatMap((round) => round.bars.map((bar) => bar.kind)));
  const { domain, range } = specs.timeline.encoding.color.scale;
  const lengths = shown.map((round) => round.length);
  const end = Math.min(Math.max(...lengths), LONGER * Math.min(...lengths)); // both are to be seen
  shown.forEach((round, at) => {
    const spec = structuredClone(specs.timeline);
    spec.data = { values: round.bars.map((bar) => ({ ...bar, length: bar.end - bar.start })) };
    spec.encoding.x.scale.domain = [0, end];
    spec.encoding.color.scale.domain = domain.filter((kind) => kinds.has(kind));
    spec.encoding.color.scale.range = range.filter((_, place) => kinds.has(domain[place]));
    spec.description = `timeline of a round of ${choices[at].value}`;
    draw(timelines[at], spec);
  });
}

for (const choice of choices) choice.addEventListener("change", drawRounds);
if (choices.length) drawRounds();

// A closed table is not printed.
addEventListener("beforeprint", () => {
  for (const closed of document.querySelectorAll("details:not([open])")) closed.open = true;
});
