// The detail of one head: its functions, its card, every measure with its interval, offsets, relations, similar heads, sentences.

function buildDetail() {
  const pane = make('aside', { id: 'detail', 'aria-label': 'Detail of the chosen head' });
  const show = () => {
    const data = current();
    const row = state.head;
    if (!data.site.length) return;
    put(pane, make('h3', { tabindex: -1 }, headName(data, row)), make('p', { class: 'chips' }, chips(data.functions[row])),
      make('p', { class: 'controls' }, stepButton('Previous head', -1), stepButton('Next head', 1)),
      data.unsupported[row].length ? make('p', { class: 'quiet' }, `Not enough evidence: ${data.unsupported[row].join(', ')}`) : null,
      cardPart(data, row),
      part('Where it looks: example sentences', attentionPart(data, row), true),
      data.evidence && data.evidence.rows[row] ? part('Evidence for its labels', evidencePart(data, row), true) : null,
      part('Measures', measuresPart(data, row), true),
      data.offsets ? part('Offsets of the most attended token', offsetsPart(data, row), true) : null,
      data.relations ? part('Relations against their baselines', relationsPart(data, row), true) : null,
      data.similar ? part('Most similar heads of the layer', similarPart(data, row), true) : null);
  };
  onChange((what) => { if (what.has('run') || what.has('head')) show(); });
  show();
  return pane;
}

function stepButton(words, by) {
  const count = current().site.length;
  return make('button', { type: 'button', click: () => {
    change({ head: (state.head + by + count) % count });
    const buttons = [...document.querySelectorAll('#detail .controls button')];
    buttons.find((button) => button.textContent === words).focus();
  } }, words);
}

const closed = new Set();

function part(title, content, open) {
  return make('details', {
    open: open && !closed.has(title),
    toggle: (event) => { if (event.target.open) closed.delete(title); else closed.add(title); },
  }, make('summary', {}, title), content);
}

/** The place of a head among all, from the highest value. */
function rank(measure, row) {
  const value = measure.values[row];
  if (value === null) return '';
  const above = measure.values.filter((other) => other !== null && other > value).length;
  return `${above + 1} of ${measure.values.filter((other) => other !== null).length}`;
}

function measuresPart(data, row) {
  const known = data.measures.filter((measure) => measure.values[row] !== null);
  const rows = known.map((measure) => {
    const name = make('th', { scope: 'row' }, explain(make('button', { type: 'button', class: 'link', click: () => change({ measure: measure.name }) }, withUnit(measure)), () => definition(measure)));
    const ends = interval(measure, row);
    const value = make('td', { class: 'number' }, number(measure.values[row]), ends ? make('span', { class: 'quiet ends' }, ends) : null);
    return make('tr', {}, name, value, make('td', {}, span(measure, row)), make('td', { class: 'quiet number' }, rank(measure, row)));
  });
  const columns = [['measure', null], ['value, 95 %', 'number'], ['on its scale', null], ['place', 'number']];
  const head = make('tr', {}, columns.map(([words, kind]) => make('th', { scope: 'col', class: kind }, words)));
  const texts = data.texts.filter((text) => text.values[row] && !(data.cards && text.name === 'description')).map((text) => make('p', {}, `${text.title}: ${text.values[row]}`));
  return make('div', {}, make('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'Measures of the head' },
    make('table', { class: 'measures' }, make('caption', { class: 'hidden' }, 'Measures of the head'), make('thead', {}, head), make('tbody', {}, rows))), texts);
}

/** A value and its interval as a point on the scale of its measure. */
function span(measure, row) {
  const { low, high } = measure.scale;
  const across = (value) => Math.min(100, Math.max(0, ((value - low) / (high - low || 1)) * 100));
  const svg = draw('svg', { viewBox: '0 0 100 12', preserveAspectRatio: 'none', class: 'dots small', 'aria-hidden': 'true' },
    draw('line', { x1: 0, x2: 100, y1: 6, y2: 6, class: 'rule' }));
  if (low < 0 && high > 0) svg.append(draw('line', { x1: across(0), x2: across(0), y1: 0, y2: 12, class: 'axis' }));
  if (measure.bounds && measure.bounds[0][row] !== null) {
    const [from, to] = [across(measure.bounds[0][row]), across(measure.bounds[1][row])];
    svg.append(draw('rect', { x: from, width: Math.max(to - from, 1), y: 4, height: 4, fill: COLORS[0], opacity: 0.45 }));
  }
  svg.append(draw('rect', { x: across(measure.values[row]) - 1, width: 2, y: 1, height: 10, class: 'mark' }));
  return svg;
}

function offsetsPart(data, row) {
  const entries = data.offsets[row];
  if (!entries) return make('p', { class: 'quiet' }, 'Offsets are of self attention.');
  const reach = 15;
  const [x, y] = [[-reach - 0.6, reach + 0.6], [0, Math.max(...entries.map((entry) => Math.max(entry[1], entry[3] || 0)), 0.05)]];
  const { svg, across, up } = plane({ title: `Shares of offsets of ${headName(data, row)}`, x, y, xLabel: 'offset of the key from the query, in tokens', yLabel: 'share of queries', height: 190 });
  for (const [offset, share, low, high] of entries) {
    const wide = (across(1) - across(0)) * 0.8;
    const beyond = Math.abs(offset) === reach ? ` and ${offset < 0 ? 'less' : 'more'}` : '';
    svg.append(draw('rect', { x: across(offset) - wide / 2, width: wide, y: up(share), height: up(0) - up(share), class: 'bar' },
      draw('title', {}, `${number(offset)}${beyond}: ${number(share)}${low === null ? '' : ` (95 %: ${number(low)} to ${number(high)})`}`)));
    if (low !== null) svg.append(draw('line', { x1: across(offset), x2: across(offset), y1: up(low), y2: up(high), class: 'whiskerline' }));
  }
  return make('div', {}, svg, make('p', { class: 'quiet' }, `Of the queries that have a token at the offset; from ±${reach} on, at the ends, of all queries.`));
}

/** What the labels of a head rest on, a column for each label; columns are those of labels.csv. */
function evidencePart(data, row) {
  const { columns, rows } = data.evidence;
  const labels = rows[row];
  const lines = columns.slice(1).map((name, place) => [name, ...labels.map((label) => label[place + 1])])
    .filter(([, ...values]) => values.some((value) => value !== ''));
  return table('Evidence', ['', ...labels.map(([label]) => label)], lines.map(([name, ...values]) => [
    name, ...values.map((value) => (typeof value === 'boolean' ? (value ? 'yes' : 'no') : value))]));
}

function relationsPart(data, row) {
  const entries = data.relations.rows[row];
  if (!entries) return make('p', { class: 'quiet' }, 'No relation was counted for this head.');
  const { labels, more } = data.relations;
  const rows = entries.map(([label, count, offset, accuracy, low, high, baseline, margin, marginLow, marginHigh, ...others]) => ({
    name: labels[label], value: accuracy, low, high, mark: baseline,
    under: [`n = ${number(count)}; baseline ${number(baseline)} at ${number(offset)}; margin ${number(margin)} (${number(marginLow)} to ${number(marginHigh)})`,
      ...others.map((value, place) => `${more[place]} ${typeof value === 'number' ? number(value) : value}`)].join('; '),
  }));
  return make('div', {}, dots('Accuracy (bar, with its 95 % interval) and baseline (mark)', rows, { unit: 'accuracy' }),
    make('p', { class: 'quiet' }, 'nsubj> looks from the head word to its dependent, nsubj< the other way. n counts the instances; the baseline is the best fixed offset, the margin is how far the head lies above it.'));
}

function similarPart(data, row) {
  return make('div', {}, data.similar.kinds.map((kind) => {
    const rows = data.similar.rows[kind.name][row];
    if (!rows) return null;
    return dots(kind.title, rows.map(([other, value]) => ({ name: headButton(state.run, other), value })));
  }));
}
