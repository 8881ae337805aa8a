// How much the model needs each head: the importances, how much they agree, and which ranking removal bears out.

function buildImportance() {
  const runs = analyses.map((data, run) => [data, run]).filter(([data]) => data.importance);
  if (!runs.length) return;
  const made = section('importance', 'Importance');
  for (const [data, run] of runs) made.append(importanceOf(data, run, runs.length > 1));
}

function importanceOf(data, run, named) {
  const shown = { name: data.importance.measures[0] };
  const body = make('div');
  const show = () => {
    const measure = measureOf(data, shown.name);
    const sign = measure.keep === 'lowest' ? 1 : -1;
    const order = measure.values.map((_, row) => row).filter((row) => measure.values[row] !== null)
      .sort((a, b) => sign * (measure.values[a] - measure.values[b]));
    const tests = data.importance.zero[shown.name];
    const told = (row) => (tests && tests[row] !== null && tests[row] > 0.05 ? ', not told from zero' : '');
    const entry = (row) => ({
      name: headButton(run, row), value: measure.values[row], note: [make('span', { class: 'whole' }, interval(measure, row)), told(row)],
      low: measure.bounds ? measure.bounds[0][row] : null, high: measure.bounds ? measure.bounds[1][row] : null,
    });
    const most = order.slice(0, 10).map(entry);
    const least = order.slice(-10).reverse().map(entry);
    const look = { unit: measure.unit || measure.title, shared: [...most, ...least] };
    put(body, make('p', {}, measure.summary ? `${measure.title}: ${measure.summary}.` : ''), make('div', { class: 'columns' },
      dots('Needed most', most, look), dots('Needed least', least, look)), functionNeed(data, measure) || '');
  };
  const picker = choice('Importance', data.importance.measures.map((name) => [name, measureOf(data, name).title]), shown.name,
    (value) => { shown.name = value; show(); put(asked, question(measureOf(data, value))); });
  const asked = make('span', {}, question(measureOf(data, shown.name)));
  show();
  return make('div', {}, named ? make('h3', {}, data.name) : null, make('div', { class: 'controls' }, picker, asked), body, agreement(data));
}

/** The heads of every function beside all others, by one importance. */
function functionNeed(data, measure) {
  const found = data.importance.functions[measure.name];
  if (!found || !found.rows.length) return null;
  const ends = (low, high) => make('span', { class: 'whole' }, low === null ? '' : `${number(low)} to ${number(high)}`);
  const rows = found.rows.map(([kind, name, heads, mean, low, high, others, difference, least, most, first, of]) => [
    kind === 'mostly' ? `mostly ${name}` : name, heads, mean, ends(low, high), others, difference, ends(least, most), `${first} of ${of}`]);
  const columns = ['function', 'heads', 'mean', '95 %', 'mean of the others', 'difference', '95 %', 'among those needed most'];
  const said = found.said ? `${found.said[0].toUpperCase()}${found.said.slice(1)}.` : '';
  return make('div', {}, make('h3', {}, 'Do functions predict it?'), said ? make('p', {}, said) : null, table(`Functions and ${measure.title}`, columns, rows),
    make('p', { class: 'quiet' }, '“Mostly” is what explains the most of a head. Intervals take the heads for a sample of heads like them.'));
}

/** Spearman's correlations between importances, shaded. */
function agreement(data) {
  const { measures, agreement: matrix } = data.importance;
  if (measures.length < 2) return null;
  const scale = { low: -1, high: 1, cmap: 'RdBu_r' };
  const titles = measures.map((name) => measureOf(data, name).title);
  const cell = (value) => {
    const made = make('td', { class: 'number' }, number(value, 2));
    const color = shade(scale, value);
    if (color) {
      made.style.setProperty('background-color', color);
      made.style.setProperty('color', ink(color));
    }
    return made;
  };
  const rows = matrix.map((row, place) => make('tr', {}, make('th', { scope: 'row' }, titles[place]), row.map(cell)));
  const head = make('tr', {}, make('td'), titles.map((title) => make('th', { scope: 'col' }, title)));
  const caption = 'Do the importances agree? Spearman’s rank correlation over heads, each turned so that needed heads are high';
  return make('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'Agreement of importances' },
    make('table', { class: 'matrix' }, captioned(caption), make('thead', {}, head), make('tbody', {}, rows)));
}

function buildFaithfulness() {
  const runs = analyses.filter((data) => data.faithfulness);
  if (!runs.length) return;
  const made = section('faithfulness', 'Faithfulness',
    make('p', {}, 'Heads are removed in the order of every ranking, the most important first and the least important first. '
      + 'The larger the area between the two curves, the more the ranking deserves belief.'));
  for (const data of runs) made.append(faithfulnessOf(data, runs.length > 1));
}

const ORDERS = [['most important first', '#d55e00'], ['least important first', '#0072b2']];

function faithfulnessOf(data, named) {
  const { columns, rows, metrics, curves: found } = data.faithfulness;
  const at = (row, name) => row[columns.indexOf(name)];
  const rankings = rows.map((row) => at(row, 'ranking'));
  const shown = { metric: metrics[0].name, ranking: rankings[0] };
  const picture = make('div');
  const show = () => {
    const drawn = found[shown.metric] || {};
    const metric = metrics.find((entry) => entry.name === shown.metric);
    const series = ORDERS.map(([order, color]) => ({ name: order, color, points: (drawn[shown.ranking] || {})[order] || [] })).filter((line) => line.points.length);
    put(picture, curves({ title: `${shown.ranking}: ${metric.title}`, xLabel: 'heads removed', yLabel: metric.title, series, zero: true, percent: true, band: chance(drawn) }));
  };
  const bars = dots('Area between the curves, the best ranking first', rows.map((row) => ({
    name: make('button', { type: 'button', class: 'link', click: () => { shown.ranking = at(row, 'ranking'); picker.list.value = shown.ranking; show(); } }, at(row, 'ranking')),
    value: at(row, 'area'), low: at(row, 'area_low'), high: at(row, 'area_high'), note: `${number(at(row, 'area_low'))} to ${number(at(row, 'area_high'))}`,
    mark: at(row, 'area_random'),
  })), { unit: 'area' });
  const picker = choice('Ranking', rankings.map((name) => [name, name]), shown.ranking, (value) => { shown.ranking = value; show(); });
  const metricPicker = metrics.length > 1 ? choice('Metric', metrics.map((metric) => [metric.name, metric.title]), shown.metric, (value) => { shown.metric = value; show(); }) : null;
  show();
  return make('div', {}, named ? make('h3', {}, data.name) : null, bars, make('p', { class: 'quiet' }, 'The mark is the mean area of random orders.'),
    make('div', { class: 'controls' }, picker, metricPicker), picture,
    csvButton('Save the rankings as CSV', 'faithfulness_rankings.csv', () => [columns, ...rows]));
}

/** What random orders do at every share: the least and the most. */
function chance(drawn) {
  const points = new Map();
  for (const [name, orders] of Object.entries(drawn)) {
    if (!name.startsWith('random:')) continue;
    for (const [share, value] of Object.values(orders).flat()) {
      if (value === null) continue;
      const [low, high] = points.get(share) || [value, value];
      points.set(share, [Math.min(low, value), Math.max(high, value)]);
    }
  }
  const band = [...points].map(([share, [low, high]]) => [share, low, high]).sort((a, b) => a[0] - b[0]);
  return band.length > 1 ? band : null;
}
