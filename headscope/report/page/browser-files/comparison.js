// Two analysis runs: which heads changed function, how alike each measure orders the heads, and head against head.

function buildComparison() {
  if (!report.comparisons.length) return;
  const made = section('comparison', 'Runs compared');
  for (const comparison of report.comparisons) made.append(comparisonOf(comparison));
}

function comparisonOf(comparison) {
  const [one, other] = comparison.runs;
  const [a, b] = [analyses[one], analyses[other]];
  const made = make('div', {}, make('h3', {}, `A: ${a.name}, B: ${b.name}`),
    make('p', { class: 'quiet' }, `A: ${a.model}, ${a.data}. B: ${b.model}, ${b.data}.`));
  if (comparison.left_out.length) made.append(make('p', {}, `Not compared head by head, as the layouts differ: ${comparison.left_out.join(', ')}.`));
  if (comparison.means.length) made.append(table('Means over the heads of sites whose layouts differ', ['site', 'measure', 'A', 'B'], comparison.means));
  if (!comparison.pairs.length) return made;
  const changed = comparison.changed.map(([row, across]) => [headButton(one, row), make('span', {}, chips(a.functions[row])), make('span', {}, chips(b.functions[across]))]);
  if (changed.length) {
    made.append(table('Heads whose functions differ', ['head', 'in A', 'in B'], changed),
      csvButton('Save these as CSV', 'changed.csv', () => [['head', 'a', 'b'], ...comparison.changed.map(([row, across]) => (
        [headName(a, row), a.functions[row].join(';'), b.functions[across].join(';')]))]));
  } else made.append(make('p', {}, 'Every head has the same functions in both.'));
  const known = comparison.correlations.filter((entry) => entry.heads > 0);
  if (!known.length) {
    made.append(make('p', {}, 'The runs have no measure in common.'));
    return made;
  }
  const points = pointwise(comparison, a, b, known);
  made.append(make('div', { class: 'columns' }, correlations(comparison, a, known), points));
  return made;
}

function correlations(comparison, a, known) {
  const rows = known.map((entry) => [
    explain(make('button', { type: 'button', class: 'link', click: () => comparison.show(entry.name) }, measureOf(a, entry.name).title), () => definition(measureOf(a, entry.name))),
    entry.spearman, entry.difference, entry.heads]);
  return make('div', {}, table('Rank correlations of the measures', ['measure', 'Spearman', 'mean of B − A', 'heads'], rows),
    csvButton('Save the correlations as CSV', 'correlations.csv', () => [['measure', 'spearman', 'difference', 'heads'],
      ...known.map((entry) => [entry.name, entry.spearman, entry.difference, entry.heads])]));
}

function pointwise(comparison, a, b, known) {
  const picture = make('div');
  const picker = choice('Measure', known.map((entry) => [entry.name, measureOf(a, entry.name).title]), known[0].name, (value) => comparison.show(value));
  comparison.show = (name) => {
    picker.list.value = name;
    const [first, second] = [measureOf(a, name), measureOf(b, name)];
    const pairs = comparison.pairs.filter(([row, across]) => first.values[row] !== null && second.values[across] !== null);
    const both = range(pairs.flatMap(([row, across]) => [first.values[row], second.values[across]]));
    const points = pairs.map(([row, across]) => ({
      name: headName(a, row), x: first.values[row], y: second.values[across], pick: () => select(comparison.runs[0], row, true),
    }));
    put(picture, scatter({ title: `${first.title}: head against head`, xLabel: 'A', yLabel: 'B', points, x: both, y: both }), movers(comparison, pairs, first, second));
  };
  comparison.show(known[0].name);
  return make('div', {}, make('div', { class: 'controls' }, picker), picture);
}

/** The heads between whose values the difference is largest. */
function movers(comparison, pairs, first, second) {
  const difference = ([row, across]) => second.values[across] - first.values[row];
  const rows = pairs.slice().sort((one, other) => Math.abs(difference(other)) - Math.abs(difference(one))).slice(0, 8);
  return table(`Where ${first.title} differs most`, ['head', 'A', 'B', 'B − A'],
    rows.map((pair) => [headButton(comparison.runs[0], pair[0]), first.values[pair[0]], second.values[pair[1]], difference(pair)]));
}
