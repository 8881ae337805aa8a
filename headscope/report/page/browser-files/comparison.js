// Analysis runs side by side: whether functions predict importance over all of them; and of the first with each other
// one which heads changed function, how alike each measure orders the heads, and head against head.

function buildComparison() {
  if (!report.comparisons.length) return;
  const made = section('comparison', 'Runs compared', needs());
  for (const comparison of report.comparisons) made.append(comparisonOf(comparison));
}

/** Functions × importances: how likely a head with the function is needed more than another head of its model. */
function needs() {
  if (!report.needs) return null;
  const { runs, measures, cells } = report.needs;
  const across = (value) => 4 + 92 * value;
  const color = (place) => COLORS[place % COLORS.length];
  const cell = (found) => {
    if (!found) return make('td', {}, '–');
    const [mean, low, high, each, heads] = found;
    const svg = draw('svg', { viewBox: '0 0 100 14', class: 'needed', 'aria-hidden': 'true' },
      draw('line', { x1: across(0), x2: across(1), y1: 7, y2: 7, class: 'rule' }),
      draw('line', { x1: across(0.5), x2: across(0.5), y1: 0, y2: 14, class: 'axis' }));
    if (low !== null) {
      svg.append(draw('line', { x1: across(low), x2: across(high), y1: 7, y2: 7, class: 'whiskerline' }));
    }
    each.forEach((value, place) => {
      if (value !== null) svg.append(draw('circle', { cx: across(value), cy: 7, r: 3, fill: color(place) }));
    });
    const title = runs.map((run, place) => `${analyses[run].name}: ${number(each[place])}`).join('; ');
    return make('td', { title: `${title}; ${heads} heads in all` }, svg, make('span', {}, number(mean, 2)),
      make('span', { class: 'quiet whole' }, low === null ? '' : ` ${number(low, 2)} to ${number(high, 2)}`));
  };
  const names = Object.keys(measures).filter((measure) => Object.values(cells).some((row) => row[measure]));
  const seen = runs.map((_, place) => Object.values(cells).some((row) => names.some((measure) => row[measure] && row[measure][3][place] !== null)));
  const caption = 'Functions and importances over runs';
  const head = make('tr', {}, make('td'), names.map((name) => make('th', { scope: 'col' }, measures[name])));
  const body = Object.entries(cells).map(([name, row]) => make('tr', {}, make('th', { scope: 'row' }, name), names.map((measure) => cell(row[measure]))));
  const key = runs.map((run, place) => {
    if (!seen[place]) return null;
    const dot = draw('svg', { width: 10, height: 10, 'aria-hidden': 'true' }, draw('circle', { cx: 5, cy: 5, r: 4, fill: color(place) }));
    return make('li', {}, dot, ` ${analyses[run].name}: ${analyses[run].model}`);
  });
  const rows = Object.entries(cells).flatMap(([name, row]) => Object.entries(row).map(([measure, [mean, low, high, each, heads]]) => [name, measure, mean, low, high, ...each, heads]));
  return make('div', {}, make('h3', {}, 'Do functions predict importance?'),
    make('p', {}, 'How likely a head with the function is needed more than another head of its model (½: the function says nothing): the mean over runs, its 95 % interval for which models are a sample of models, and a dot a run.'),
    make('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption },
      make('table', { class: 'overruns' }, captioned(caption), make('thead', {}, head), make('tbody', {}, body))),
    make('ul', { class: 'legend' }, key),
    csvButton('Save this table as CSV', 'needs.csv', () => [['function', 'measure', 'needed', 'needed_low', 'needed_high', ...runs.map((run) => analyses[run].name), 'heads'], ...rows]));
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
