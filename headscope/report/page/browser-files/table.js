// The table of heads: sorted by its headers, filtered by words, site, layer, function and numbers; saved as CSV.

const PAGE = 60;
const sorting = { key: '', down: true };
const filters = { words: '', site: '', label: '', measure: '', least: '', most: '', every: false, shown: PAGE };

function columnsOf(data) {
  const measures = filters.every ? data.measures : foremost(data).slice(0, 7);
  const columns = [
    { key: 'head', title: 'head', value: (row) => row },
    { key: 'labels', title: 'functions', value: (row) => data.functions[row].join(' ') },
  ];
  for (const measure of measures) columns.push({ key: measure.name, title: withUnit(measure), measure, value: (row) => measure.values[row] });
  const texts = filters.every ? data.texts : [];
  for (const text of texts) columns.push({ key: text.name, title: text.title, value: (row) => text.values[row] });
  return columns;
}

function matching(data) {
  const words = filters.words.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const measure = measureOf(data, filters.measure);
  const [least, most] = [filters.least, filters.most].map((text) => (text.trim() === '' ? null : Number(text.replace('−', '-').replace(',', '.'))));
  const fits = (row) => {
    const name = `${headName(data, row)} ${data.functions[row].join(' ')}`.toLowerCase();
    if (!words.every((word) => name.includes(word))) return false;
    if (filters.site && siteNames(data)[data.site[row]] !== filters.site) return false;
    const kinds = data.functions[row].map((label) => markOf(label).name);
    if (filters.label === 'none' ? kinds.length : filters.label && !kinds.includes(filters.label)) return false;
    if (!measure || (least === null && most === null)) return true;
    const value = measure.values[row];
    return value !== null && (least === null || value >= least) && (most === null || value <= most);
  };
  return data.site.map((_, row) => row).filter(fits);
}

function sorted(rows, columns) {
  const column = columns.find((entry) => entry.key === sorting.key);
  if (!column) return rows;
  const sign = sorting.down ? -1 : 1;
  const missing = (value) => value === null || value === undefined || value === '';
  return rows.slice().sort((a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (missing(x) || missing(y)) return missing(x) - missing(y) || a - b;
    return (x < y ? -sign : x > y ? sign : 0) || a - b;
  });
}

function buildTable() {
  const controls = make('div', { class: 'controls' });
  const status = make('p', { role: 'status', class: 'quiet' });
  const head = make('thead');
  const body = make('tbody');
  const more = make('button', { type: 'button', click: () => { filters.shown += 4 * PAGE; show(); } }, 'Show more');
  const save = csvButton('Save all columns as CSV', 'heads.csv', () => csvRows(current()));

  const show = () => {
    const data = current();
    const columns = columnsOf(data);
    const rows = sorted(matching(data), columns);
    const shown = rows.slice(0, filters.shown);
    put(status, `${rows.length} of ${data.site.length} heads${shown.length < rows.length ? `, the first ${shown.length} shown` : ''}`);
    put(head, make('tr', {}, columns.map((column) => header(column, show))));
    put(body, shown.map((row) => tableRow(data, columns, row)));
    more.hidden = shown.length === rows.length;
  };
  const build = () => {
    sorting.key = columnsOf(current()).some((column) => column.key === sorting.key) ? sorting.key : 'head';
    put(controls, filterFields(current(), () => { filters.shown = PAGE; show(); }));
    show();
  };
  onChange((what) => {
    if (what.has('run')) build();
    else if (what.has('head')) {
      for (const row of body.children) row.classList.toggle('chosen', Number(row.dataset.row) === state.head);
    }
  });
  sorting.key = 'head';
  sorting.down = false;
  build();
  const frame = make('div', { class: 'scroll tall', tabindex: 0, role: 'region', 'aria-label': 'Rows of the table' },
    make('table', { id: 'heads-table' }, make('caption', { class: 'hidden' }, 'Heads with their functions and measures'), head, body));
  return make('div', {}, controls, status, frame, make('div', { class: 'controls' }, more, save));
}

function header(column, show) {
  const chosen = sorting.key === column.key;
  const order = chosen ? (sorting.down ? 'descending' : 'ascending') : 'none';
  const sort = () => {
    sorting.down = sorting.key === column.key ? !sorting.down : Boolean(column.measure);
    sorting.key = column.key;
    hideTip();
    show();
    document.querySelector(`#heads-table [data-key="${CSS.escape(column.key)}"]`).focus();
  };
  const arrow = chosen ? (sorting.down ? ' ▼' : ' ▲') : '';
  const button = make('button', { type: 'button', 'data-key': column.key, click: sort }, column.title,
    make('span', { 'aria-hidden': 'true' }, arrow));
  if (column.measure) explain(button, () => definition(column.measure));
  return make('th', { scope: 'col', 'aria-sort': order, class: column.measure ? 'number' : null }, button);
}

function tableRow(data, columns, row) {
  const cells = columns.slice(1).map((column) => {
    if (column.key === 'labels') return make('td', {}, data.functions[row].map(chip));
    if (!column.measure) return make('td', {}, column.value(row));
    const ends = interval(column.measure, row);
    return make('td', { class: 'number', title: ends ? `95 %: ${ends}` : null }, number(column.value(row)));
  });
  const name = make('th', { scope: 'row' }, headButton(state.run, row));
  return make('tr', { 'data-row': row, class: row === state.head ? 'chosen' : null }, name, cells);
}

function filterFields(data, show) {
  const typed = (label, key, attributes = {}) => labelled(label, make('input', {
    type: 'search', value: filters[key], autocomplete: 'off', spellcheck: 'false', ...attributes,
    input: (event) => { filters[key] = event.target.value; show(); },
  }));
  const chosen = (label, key, options) => choice(label, options, filters[key], (value) => { filters[key] = value; show(); });
  const present = new Set(data.functions.flat().map((label) => markOf(label).name));
  const kinds = report.families.filter((family) => present.has(family.name)).map((family) => [family.name, family.name]);
  if (!siteNames(data).includes(filters.site)) filters.site = ''; // another run had them
  if (!present.has(filters.label) && filters.label !== 'none') filters.label = '';
  const every = make('input', { type: 'checkbox', checked: filters.every, change: (event) => { filters.every = event.target.checked; show(); } });
  return [
    typed('Filter by name or function', 'words', { id: 'filter', placeholder: 'encoder-self.2 nsubj' }),
    siteNames(data).length > 1 ? chosen('Site', 'site', [['', 'all'], ...siteNames(data).map((name) => [name, name])]) : null,
    chosen('Function', 'label', [['', 'all'], ...kinds, ['none', 'no label']]),
    chosen('Number', 'measure', [['', 'none'], ...measureChoices(data)]),
    typed('at least', 'least', { type: 'text', inputmode: 'decimal', class: 'short' }),
    typed('at most', 'most', { type: 'text', inputmode: 'decimal', class: 'short' }),
    make('label', { class: 'field check' }, every, make('span', {}, 'all columns')),
  ];
}

/** Every head and column, with the ends of intervals: the names of columns are those of the run's own heads.csv. */
function csvRows(data) {
  const ends = (measure) => (measure.bounds ? ['', '_low', '_high'] : ['']);
  const names = data.measures.flatMap((measure) => ends(measure).map((end) => measure.name + end));
  const rows = data.site.map((site, row) => [
    siteNames(data)[site], data.layer[row], data.head[row],
    ...data.measures.flatMap((measure) => [measure.values[row], ...(measure.bounds ? measure.bounds.map((end) => end[row]) : [])]),
    ...data.texts.map((text) => text.values[row]), data.functions[row].join(';'),
  ]);
  return [['site', 'layer', 'head', ...names, ...data.texts.map((text) => text.name), 'functions'], ...rows];
}
