// Head maps: one grid a site, layers × heads, of one measure or of the functions.

const FUNCTIONS = 'functions';

function rowsOfSite(data, site) {
  return data.site.map((own, row) => [own, row]).filter(([own]) => own === site).map(([, row]) => row);
}

/** Labels that lack evidence, where they are asked for. */
function weakLabels(data, row) {
  return state.unsupported ? data.unsupported[row].map((label) => label.split(' (')[0]) : [];
}

/** What a cell shows of a head: its colour, and words for whoever cannot see that. */
function cellOf(data, measureName, row) {
  const labels = data.functions[row];
  const weak = weakLabels(data, row);
  const named = [labels.length ? labels.join(', ') : 'no label', ...(weak.length ? [`not enough evidence: ${weak.join(', ')}`] : [])].join('; ');
  if (measureName === FUNCTIONS) {
    return { color: labels.length ? markOf(labels[0]).color : null, words: `${headName(data, row)}: ${named}` };
  }
  const measure = measureOf(data, measureName);
  const value = measure.values[row];
  const ends = interval(measure, row);
  const words = `${headName(data, row)}: ${measure.title} ${number(value)}${ends ? ` (95 %: ${ends})` : ''}; ${named}`;
  return { color: shade(measure.scale, value), words };
}

/** The glyphs of a head's functions, as many as a small cell can take. */
function glyphs(labels) {
  const known = [...new Set(labels.map((label) => markOf(label).glyph))];
  return known.length > 2 ? `${known[0]}+${known.length - 1}` : known.join('');
}

function mapOf(data, site, measureName) {
  const name = siteNames(data)[site];
  const counts = data.layout[name];
  const widest = Math.max(...counts, 1);
  const title = measureName === FUNCTIONS ? 'functions' : measureOf(data, measureName).title;
  const grid = make('div', {
    class: widest <= 4 ? 'map fewest' : widest <= 8 ? 'map few' : 'map', role: 'grid', 'aria-label': `${title}, ${name}: layers down, heads across`, 'aria-rowcount': counts.length + 1,
  });
  grid.style.setProperty('--columns', widest);
  const numbers = Array.from({ length: widest }, (_, head) => make('span', { role: 'columnheader', 'aria-label': `head ${head}`, class: 'edge' }, head));
  grid.append(make('div', { role: 'row' }, make('span', { role: 'columnheader', class: 'edge' }, make('span', { class: 'hidden' }, 'layer')), numbers));
  counts.forEach((count, layer) => {
    const cells = [];
    for (let head = 0; head < widest; head += 1) {
      const row = head < count ? rowOf(data, `${name}.${layer}.${head}`) : -1;
      cells.push(row < 0 ? make('span', { role: 'gridcell', class: 'cell none', 'aria-label': 'no head' })
        : cellButton(data, measureName, row));
    }
    grid.append(make('div', { role: 'row' }, make('span', { role: 'rowheader', class: 'edge', 'aria-label': `layer ${layer}` }, layer), cells));
  });
  const cells = () => [...grid.querySelectorAll('[data-row]')];
  roving(grid, cells, (place, event) => step(data, cells(), place, event.key));
  return make('div', { class: 'site' }, make('h3', {}, name), make('div', { class: 'scroll' }, grid));
}

function cellButton(data, measureName, row) {
  const { color, words } = cellOf(data, measureName, row);
  const run = analyses.indexOf(data);
  const weak = weakLabels(data, row);
  const cell = make('button', {
    type: 'button', role: 'gridcell', class: color ? 'cell' : 'cell blank', 'data-row': row, tabindex: -1, 'aria-label': words, title: words,
    click: () => select(run, row),
  }, glyphs(data.functions[row]), weak.length ? make('span', { class: 'hollow' }, glyphs(weak)) : null);
  if (color) {
    cell.style.setProperty('background-color', color);
    cell.style.setProperty('color', ink(color));
  }
  return cell;
}

/** The cell that a key leads to from another; layers may have different numbers of heads. */
function step(data, cells, place, key) {
  const at = (cell) => [data.layer[cell.dataset.row], data.head[cell.dataset.row]];
  const [layer, head] = at(cells[place]);
  const find = (wanted) => {
    const found = cells.findIndex((cell) => at(cell)[0] === wanted && at(cell)[1] === head);
    if (found >= 0) return found;
    return cells.findLastIndex((cell) => at(cell)[0] === wanted);
  };
  const layers = [...new Set(cells.map((cell) => at(cell)[0]))];
  const moves = {
    ArrowRight: () => place + 1,
    ArrowLeft: () => place - 1,
    ArrowDown: () => find(layers[layers.indexOf(layer) + 1]),
    ArrowUp: () => find(layers[layers.indexOf(layer) - 1]),
    Home: () => cells.findIndex((cell) => at(cell)[0] === layer),
    End: () => cells.findLastIndex((cell) => at(cell)[0] === layer),
  };
  return moves[key] ? moves[key]() : undefined;
}

/** The scale of a measure as a bar with its ends; of functions what the glyphs mean. */
function scaleBar(data, measureName) {
  if (measureName === FUNCTIONS || !measureName) return functionLegend(data);
  const { scale } = measureOf(data, measureName);
  const stops = (report.palettes[scale.cmap] || report.palettes.viridis);
  const width = 100 / stops.length;
  const bar = draw('svg', { viewBox: '0 0 100 10', preserveAspectRatio: 'none', class: 'scale', 'aria-hidden': 'true' },
    stops.map((color, place) => draw('rect', { x: place * width, width: width + 0.3, height: 10, fill: color })));
  const middle = scale.diverging ? make('span', {}, '0') : null;
  const name = make('div', { class: 'ends' }, withUnit(measureOf(data, measureName)));
  return make('div', {}, make('div', { class: 'scalebar' }, bar,
    make('div', { class: 'ends' }, make('span', {}, number(scale.low)), middle, make('span', {}, number(scale.high))), name), functionLegend(data));
}

function functionLegend(data) {
  const labels = data.functions.flatMap((own, row) => [...own, ...weakLabels(data, row)]);
  const present = new Set(labels.map((label) => markOf(label).name));
  const entries = report.families.filter((family) => present.has(family.name));
  return entries.length ? make('ul', { class: 'legend' }, entries.map((family) => make('li', {},
    draw('svg', { width: 12, height: 12, 'aria-hidden': 'true', class: 'swatch' }, draw('rect', { width: 12, height: 12, rx: 2, fill: family.color })),
    ` ${family.glyph} ${family.meaning}`))) : null;
}

const THUMBS = 9;

/** Small maps of several measures; each is a button that shows its measure. */
function thumbs(data, shown) {
  const names = [FUNCTIONS, ...foremost(data).map((measure) => measure.name)].slice(0, THUMBS);
  return make('div', { class: 'thumbs' }, names.map((name) => make('button', {
    type: 'button', class: 'thumb', 'aria-pressed': name === shown ? 'true' : 'false', 'data-measure': name,
    click: () => {
      change({ measure: name });
      document.querySelector(`.thumb[data-measure="${CSS.escape(name)}"]`).focus();
    },
  }, name === FUNCTIONS ? 'functions' : measureOf(data, name).title, make('span', {}, siteNames(data).map((_, site) => thumb(data, site, name))))));
}

function thumb(data, site, name) {
  const counts = data.layout[siteNames(data)[site]];
  const size = Math.max(...counts) > 12 || counts.length > 12 ? 3 : 6;
  const cells = rowsOfSite(data, site).map((row) => {
    const { color } = cellOf(data, name, row);
    return draw('rect', { x: data.head[row] * size, y: data.layer[row] * size, width: size - 0.5, height: size - 0.5, fill: color, class: color ? null : 'empty' });
  });
  return draw('svg', { width: Math.max(...counts, 1) * size, height: Math.max(counts.length, 1) * size, 'aria-hidden': 'true' }, cells);
}

function buildMaps() {
  const maps = make('div', { class: 'maps' });
  const controls = make('div', { class: 'controls' });
  const bar = make('div');
  const small = make('div');
  const show = () => {
    const data = current();
    const shown = state.measure || FUNCTIONS;
    const measure = shown === FUNCTIONS ? null : measureOf(data, shown);
    const picker = choice('Measure', [[FUNCTIONS, 'functions'], ...measureChoices(data)], shown, (value) => change({ measure: value }));
    const box = make('input', { type: 'checkbox', checked: state.unsupported, change: (event) => change({ unsupported: event.target.checked }) });
    const weak = data.unsupported.some((labels) => labels.length)
      ? make('label', { class: 'field check' }, box, make('span', {}, 'functions without enough evidence too (hollow)')) : null;
    put(controls, runChoice(), picker, measure ? question(measure) : null, weak);
    put(bar, scaleBar(data, shown));
    put(small, make('h3', {}, 'At a glance'), thumbs(data, shown));
    put(maps, siteNames(data).map((_, site) => mapOf(data, site, shown)).filter((map) => map.querySelector('[data-row]')));
    mark();
  };
  const mark = () => {
    for (const grid of maps.querySelectorAll('.map')) {
      let kept = null;
      for (const cell of grid.querySelectorAll('[data-row]')) {
        const chosen = Number(cell.dataset.row) === state.head;
        cell.setAttribute('aria-selected', chosen ? 'true' : 'false');
        cell.setAttribute('tabindex', '-1');
        if (chosen || !kept) kept = cell;
      }
      if (kept) kept.setAttribute('tabindex', '0');
    }
  };
  onChange((what) => {
    if (what.has('run') || what.has('measure') || what.has('unsupported')) show();
    else mark();
  });
  show();
  const help = make('p', { class: 'quiet' }, 'Choose a head by a click, or with the arrow keys and Enter; its detail is beside the maps, on a narrow screen below them. Rows are layers, columns heads.');
  return make('div', {}, controls, small, help, maps, bar);
}

/** The select of the run, where there is more than one. */
function runChoice() {
  if (analyses.length < 2) return null;
  const react = (value) => {
    const run = Number(value);
    const row = rowOf(analyses[run], headName(current(), state.head));
    const measure = measureOf(analyses[run], state.measure) ? state.measure : FUNCTIONS;
    change({ run, head: Math.max(row, 0), measure });
  };
  return choice('Run', analyses.map((data, run) => [run, data.name]), state.run, react);
}
