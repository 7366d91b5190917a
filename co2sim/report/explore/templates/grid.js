"use strict";
// Figures between simulated positions, as co2sim/report/explore/grid.py has them.
function gridSource(grid) {
  const at = (values, place) => (Array.isArray(values) ? values[place] : values);

  function sides(control, knots, stop) {
    let low = 0;
    while (low + 1 < knots.length && knots[low + 1] <= stop) low += 1;
    if (knots[low] === stop) return [[low, 1]];
    const [first, here, last] = [knots[low], stop, knots[low + 1]].map((place) => Math.log(control.stops[place].value));
    const share = (here - first) / (last - first);
    return [[low, 1 - share], [low + 1, share]];
  }

  function corners(one, positions) {
    let found = [[0, 1]];
    one.controls.forEach((control, axis) => {
      const knots = one.knots[axis];
      const beside = sides(grid.controls[control], knots, positions[control]);
      found = found.flatMap(([place, weight]) => beside.map(([knot, share]) => [place * knots.length + knot, weight * share]));
    });
    return found;
  }

  function mixed(name, values, found, shift) {
    if (grid.chosen.includes(name)) return at(values, shift + found.reduce((best, one) => (one[1] > best[1] ? one : best))[0]);
    const parts = found.map(([place, weight]) => [at(values, shift + place), weight]);
    if (parts.some(([value]) => value === null)) return null;
    if (grid.logarithmic.includes(name) && parts.every(([value]) => value > 0)) {
      return Math.exp(parts.reduce((sum, [value, weight]) => sum + weight * Math.log(value), 0));
    }
    return parts.reduce((sum, [value, weight]) => sum + weight * value, 0);
  }

  function figures(one, positions) {
    const found = corners(one, positions);
    const wrong = found.find(([place]) => place in one.failed);
    if (wrong) return { error: one.failed[wrong[0]], strategy: at(one.values.strategy, wrong[0]) };
    const shown = {};
    for (const [name, values] of Object.entries(one.values)) shown[name] = mixed(name, values, found, 0);
    const size = one.knots.reduce((product, knots) => product * knots.length, 1);
    for (const [name, values] of Object.entries(one.lost)) {
      shown[name] = mixed(name, values, found, grid.failures === null ? 0 : size * positions[grid.failures]);
    }
    return shown;
  }

  return {
    grid,
    figures: async (many) => many.map((positions) => grid.strategies.map((one) => figures(one, positions))),
    kept: async ({ positions }) => grid.strategies.map((one) => figures(one, positions)),
  };
}
