// Runs of `headscope prune` and `headscope train`.

function buildPruning() {
  const { runs, removals } = report.pruning;
  if (!runs.length && !removals.length) return;
  const made = section('pruning', 'Pruning');
  for (const run of runs) made.append(pruningOf(run));
  for (const removal of removals) made.append(removalOf(removal));
}

function pruningOf(run) {
  const { cells, columns } = run;
  const places = cells.cell.map((_, place) => place);
  const made = make('div', {}, make('h3', {}, run.name), make('p', { class: 'quiet' }, run.model));
  if (run.measured) made.append(qualityOf(run, places));
  const rows = (some) => places.map((place) => some.map((column) => (column === 'size' ? cells.size[place].replaceAll(' ', '\u00a0') : cells[column][place])));
  const filled = columns.filter((column) => cells[column].some((value) => value !== null && value !== ''));
  made.append(table(run.measured ? 'Cells of the sweep' : 'Runs that chose heads', filled.map((column) => run.titles[columns.indexOf(column)]), rows(filled)),
    csvButton('Save as CSV', 'pruning.csv', () => [columns, ...rows(columns)]), survivorsOf(run));
  for (const [cell, gates] of Object.entries(run.gates)) made.append(gatesOf(cell, gates));
  if (run.more_gates) made.append(make('p', { class: 'quiet' }, `${run.more_gates} more ${run.more_gates === 1 ? 'run' : 'runs'} learnt gates: `, make('code', {}, 'headscope plot pruning … --figure gates'), ' draws those of all.'));
  return made;
}

/** Quality against the number of heads kept, a line for each method, means over seeds, from the unpruned model on. */
function qualityOf(run, places) {
  const { cells } = run;
  const unpruned = places.find((place) => cells.method[place] === 'unpruned');
  const names = [...new Set(places.filter((place) => place !== unpruned).map((place) => seriesName(cells, place)))];
  const mean = (values) => { const known = values.filter((value) => value !== null); return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null; };
  const point = (kept, some) => [kept, mean(some.map((place) => cells.value[place])),
    some.length === 1 ? cells.low[some[0]] : null, some.length === 1 ? cells.high[some[0]] : null];
  const dashes = [null, '6 3', '2 2', '8 3 2 3'];
  const used = {};
  const series = names.map((name) => {
    const own = places.filter((place) => place !== unpruned && seriesName(cells, place) === name);
    const sizes = [...new Set(own.map((place) => cells.kept[place]))];
    const points = sizes.map((kept) => point(kept, own.filter((place) => cells.kept[place] === kept)));
    if (unpruned !== undefined) points.push(point(cells.kept[unpruned], [unpruned]));
    const color = report.methodColors[cells.method[own[0]]];
    used[color] = (used[color] || 0) + 1;
    return { name, color, dash: dashes[(used[color] - 1) % dashes.length], points: points.sort((one, other) => one[0] - other[0]) };
  });
  const metric = cells.metric[0] === 'bleu' ? 'BLEU' : cells.metric[0];
  return curves({ title: `${metric} against heads kept`, xLabel: 'heads kept', yLabel: metric, series, whiskers: true });
}

function seriesName(cells, place) { return [cells.method[place], cells.control[place]].filter(Boolean).join(', '); }

/** Which heads a cell keeps, as maps; with an analysis of the same layout a click leads to the head. */
function survivorsOf(run) {
  const names = Object.keys(run.survivors).filter((name) => name !== 'unpruned');
  if (!names.length) return null;
  const whole = run.survivors.unpruned || {};
  const body = make('div', { class: 'maps' });
  const show = (name) => put(body, run.sites.map((site) => survivorMap(site, (run.survivors[name] || {})[site] || [], whole[site] || [])));
  show(names[0]);
  return make('div', {}, make('h4', {}, 'Heads that stay'), make('div', { class: 'controls' }, choice('Cell', names.map((name) => [name, name]), names[0], show)), body);
}

function survivorMap(site, kept, whole) {
  const layers = Math.max(kept.length, whole.length);
  const widest = Math.max(0, ...[...kept, ...whole].flat()) + 1;
  const size = 16;
  const svg = draw('svg', { viewBox: `0 0 ${widest * size + 24} ${layers * size + 18}`, class: 'survivors', role: 'img', 'aria-label': `${site}: ${kept.flat().length} heads stay` });
  svg.style.setProperty('max-width', `${widest * size + 24}px`);
  for (let layer = 0; layer < layers; layer += 1) {
    svg.append(draw('text', { x: 16, y: layer * size + 12, class: 'tick end' }, layer));
    const stay = new Set(kept[layer] || []);
    const known = new Set([...(whole[layer] || []), ...stay]);
    for (const head of known) {
      const row = analyses.length ? rowOf(analyses[0], `${site}.${layer}.${head}`) : -1;
      const labels = row >= 0 ? analyses[0].functions[row] : [];
      const color = labels.length ? markOf(labels[0]).color : null;
      svg.append(draw('rect', { x: head * size + 20, y: layer * size + 1, width: size - 2, height: size - 2, rx: 2, class: stay.has(head) ? 'stays' : 'gone', fill: stay.has(head) && color ? color : null },
        draw('title', {}, `${site}.${layer}.${head} ${stay.has(head) ? 'stays' : 'goes'}${labels.length ? `; ${labels.join(', ')}` : ''}`)));
    }
  }
  for (let head = 0; head < widest; head += widest > 12 ? 4 : 1) svg.append(draw('text', { x: head * size + 27, y: layers * size + 13, class: 'tick middle' }, head));
  return make('div', { class: 'site' }, make('h5', {}, `${site}: ${kept.flat().length} stay`), svg);
}

function gatesOf(cell, gates) {
  const series = gates.heads.map((head, place) => ({
    name: head.split('.')[0], color: COLORS[['encoder-self', 'decoder-self', 'cross'].indexOf(head.split('.')[0])] || COLORS[0], thin: true,
    points: gates.updates.map((update, at) => [update, gates.gates[place][at]]),
  }));
  return make('details', {}, make('summary', {}, `Gates of ${cell} while they learnt`), curves({ title: `Gates of ${cell}`, xLabel: 'update', yLabel: 'gate', series }));
}

function removalOf(removal) {
  const share = (before, after) => (before ? `${number((100 * (after - before)) / before)}\u00a0%` : '–');
  const made = make('div', {}, make('h3', {}, removal.name), make('p', { class: 'quiet' }, removal.source),
    table('Before and after the removal', ['', 'before', 'after', 'change'],
      [...removal.quality, ...removal.sizes].map(([name, before, after]) => [name, before, after, share(before, after)])),
    removal.verdict ? make('p', {}, removal.verdict) : null);
  if (removal.times.length) {
    made.append(table('Seconds', ['pass', 'sentences', 'before', 'after', 'times as fast', 'from round to round'], removal.times));
  }
  if (removal.compared.rows.length) {
    made.append(table(`Compensation, ${removal.compared.text}`, removal.compared.columns, removal.compared.rows));
  }
  made.append(table('How it was checked', ['', ''], removal.verified.map(([name, value]) => [name, value])),
    make('details', {}, make('summary', {}, `${removal.removed.length} removed heads`), make('p', {}, removal.removed.join(', '))));
  return made;
}

function buildTraining() {
  const { runs, panels } = report.training;
  if (!runs.length) return;
  const made = section('training', 'Training');
  const dashes = { 'encoder-self': null, 'decoder-self': '6 3', cross: '2 3' };
  const whole = (panel, curve) => !curve.site && panel.curves.some((other) => other.site); // of all sites, beside those of each
  const name = (panel, curve) => [runs.length > 1 ? runs[curve.run].name : '', curve.site || (whole(panel, curve) ? 'all sites' : '')].filter(Boolean).join(', ');
  made.append(make('div', { class: 'columns' }, panels.map((panel) => curves({
    title: panel.title, xLabel: 'update', yLabel: panel.unit || panel.title,
    series: panel.curves.map((curve) => ({
      name: name(panel, curve), color: COLORS[curve.run % COLORS.length], dash: whole(panel, curve) ? '8 3 2 3' : dashes[curve.site], thin: curve.column === 'nll', steps: panel.steps,
      points: curve.x.map((x, place) => [x, curve.y[place]]),
    })),
  }))), table('Training runs', ['run', 'variant', 'updates', 'seconds'], runs.map((run) => [run.name, run.variant, run.updates, run.seconds])),
  csvButton('Save the curves as CSV', 'training.csv', () => [['run', 'column', 'update', 'value'],
    ...panels.flatMap((panel) => panel.curves.flatMap((curve) => curve.x.map((x, place) => [runs[curve.run].name, curve.column, x, curve.y[place]])))]));
}
