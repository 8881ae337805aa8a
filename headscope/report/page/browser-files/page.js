// Search, the card of a head with attention on sentences, and the table of heads. All numbers come as texts.
(() => {
'use strict';

const { runs, labels } = JSON.parse(document.getElementById('data').textContent);
const state = { run: 0, head: 0, sentence: 0 };
const SVG = 'http://www.w3.org/2000/svg';
const find = (id) => document.getElementById(id);

/** An element with attributes, listeners (functions) and children; text is always text, never markup. */
function make(tag, attributes = {}, ...children) { return fill(document.createElement(tag), attributes, children); }

function draw(tag, attributes = {}, ...children) { return fill(document.createElementNS(SVG, tag), attributes, children); }

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === 'function') element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

function put(element, ...children) { element.replaceChildren(); fill(element, {}, children); }

// Heads

const current = () => runs[state.run];

/** The number of a head by its full or short name, or -1. */
function numberOf(run, name) {
  run.numbers ??= new Map([...run.heads.map((head, place) => [head.short, place]), ...run.heads.map((head, place) => [head.name, place])]);
  return run.numbers.get(name) ?? -1;
}

const rolesOf = (head) => [...new Set(head.labels.map((label) => labels[label][3]))];

/** A link to the card of a head of the current run. */
function headLink(name, words = name) {
  return make('button', { type: 'button', class: 'link', click: () => select(state.run, numberOf(current(), name), true) }, words);
}

/** Show a head's card; with `reveal` bring it into view and put the focus there. */
function select(run, head, reveal = false) {
  const changed = run !== state.run;
  Object.assign(state, { run, head });
  if (changed) showRun();
  showCard();
  const chosen = current().heads[head].name;
  for (const cell of cells()) {
    cell.setAttribute('aria-selected', cell.dataset.name === chosen ? 'true' : 'false');
    cell.setAttribute('tabindex', cell.dataset.name === chosen ? '0' : '-1');
  }
  for (const row of find('rows').tBodies[0].rows) row.classList.toggle('chosen', Number(row.dataset.head) === head);
  if (!reveal) return;
  const card = find('card');
  card.scrollTop = 0;
  const below = window.getComputedStyle(card).position === 'static'; // on a narrow screen
  card.scrollIntoView({ block: below || card.offsetHeight > window.innerHeight - 80 ? 'start' : 'nearest' });
  card.focus({ preventScroll: true });
}

function showRun() {
  for (const maps of document.querySelectorAll('.maps')) maps.hidden = Number(maps.dataset.run) !== state.run;
  if (find('run')) find('run').value = state.run;
  state.sentence = 0;
  put(find('shade'), make('option', { value: '' }, 'functions'), leads(current()).map(({ name, title }) => make('option', { value: name }, title)));
  shade();
  showTable();
}

// The map

const cells = () => [...document.querySelectorAll(`.maps[data-run="${state.run}"] .cell`)];

/** Arrow keys, Home and End among elements of which one at a time is in the tab order. */
function rove(group, elements, step) {
  group.addEventListener('keydown', (event) => {
    const all = elements();
    const place = all.indexOf(event.target);
    const target = place < 0 ? undefined : all[step(all, place, event.key)];
    if (!target) return;
    event.preventDefault();
    for (const element of all) element.setAttribute('tabindex', element === target ? '0' : '-1');
    target.focus();
  });
}

/** The cell that a key leads to; rows may have different numbers of heads. */
function cellStep(all, place, key) {
  const rows = [...new Set(all.map((cell) => cell.parentNode))];
  const row = all[place].parentNode;
  const own = [...row.querySelectorAll('.cell')];
  const across = own.indexOf(all[place]);
  const other = { ArrowDown: rows[rows.indexOf(row) + 1], ArrowUp: rows[rows.indexOf(row) - 1] }[key];
  const there = other ? [...other.querySelectorAll('.cell')] : [];
  const target = {
    ArrowRight: all[place + 1], ArrowLeft: all[place - 1], Home: own[0], End: own.at(-1),
    ArrowDown: there[Math.min(across, there.length - 1)], ArrowUp: there[Math.min(across, there.length - 1)],
  }[key];
  return all.indexOf(target);
}

/** The measures that have a number by which they stand in order, such as `lead`, of those that are shown first. */
const inOrder = (measures, key) => measures.filter((measure) => measure[key] !== null).sort((a, b) => a[key] - b[key]);
const leads = (run) => inOrder(run.measures, 'lead');

/** Colour the map by functions, or by the measure that is chosen. */
function shade() {
  const run = current();
  const measure = run.measures.find(({ name }) => name === find('shade').value);
  find('scale').hidden = !measure;
  for (const cell of cells()) {
    const place = numberOf(run, cell.dataset.name);
    const head = run.heads[place];
    const words = [rolesOf(head).join(', ') || 'none found', ...(measure ? [`${measure.title} ${measure.texts[place]}`] : [])].join('; ');
    cell.className = `cell ${measure ? `s${measure.shades[place]}` : head.labels.length ? labels[head.labels[0]][2] : ''}`;
    cell.title = `${head.short}: ${words}`;
    cell.setAttribute('aria-label', cell.title);
  }
}

// The card

const closed = new Set();

function part(title, content, open = true) {
  return make('details', {
    open: open && !closed.has(title),
    toggle: (event) => { if (event.target.open) closed.delete(title); else closed.add(title); },
  }, make('summary', {}, title), content);
}

const isNumber = (text) => /^[−+]?\d/.test(text);

function table(title, columns, rows) {
  const right = columns.map((_, place) => place > 0 && rows.every((row) => !row[place] || isNumber(row[place])));
  const kind = (place) => (right[place] ? 'number' : null);
  return make('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': title }, make('table', {},
    make('thead', {}, make('tr', {}, columns.map((column, place) => (column ? make('th', { scope: 'col', class: kind(place) }, column) : make('td'))))),
    make('tbody', {}, rows.map((row) => make('tr', {}, row.map((cell, place) => make('td', { class: kind(place) }, cell)))))));
}

function chips(head) {
  if (!head.labels.length) return make('span', { class: 'quiet' }, 'no known role');
  return head.labels.map((label) => make('span', { class: 'chip', title: label },
    make('span', { class: `swatch ${labels[label][2]}`, 'aria-hidden': 'true' }, labels[label][0]), ` ${labels[label][3]}`));
}

function showCard() {
  const run = current();
  const head = run.heads[state.head];
  const count = run.heads.length;
  const step = (by, words) => make('button', {
    type: 'button', 'data-step': by,
    click: () => {
      select(state.run, (state.head + by + count) % count);
      find('card').querySelector(`[data-step="${by}"]`).focus();
    },
  }, words);
  const known = run.measures.filter((measure) => measure.texts[state.head]);
  const rows = (measures) => measures.map(({ title, texts, ends, ranks }) => [title, ...[texts, ends, ranks].map((own) => own[state.head])]);
  const needs = inOrder(known, 'importance');
  put(find('card'), make('h3', {}, head.short), make('p', {}, chips(head)),
    head.sentence ? make('p', { class: 'sentence', dir: 'auto' }, head.sentence) : null, bar(head),
    needs.length ? table('Importance', ['importance', 'value', '95 %', 'place'], rows(needs)) : null,
    head.joint.map((line) => make('p', {}, line)),
    head.examples?.length ? part('Sharpest queries, underlined, and their keys', head.examples.map(example)) : null,
    make('p', { class: 'controls' }, step(-1, 'Previous head'), step(1, 'Next head')),
    head.weak.length ? make('p', { class: 'quiet' }, `Not enough evidence: ${head.weak.join(', ')}`) : null,
    run.examples ? part('Attention on example sentences', attention(run, head)) : null,
    head.pairs?.length ? part('Pairs of words', head.pairs.map(([kind, words, numbers]) => make('span', { class: 'chip', title: `${kind}: ${numbers}` }, words)), false) : null,
    head.tables.map(([title, columns, rows]) => part(title, table(title, columns, rows), false)),
    part('All measures', table('Measures of the head', ['measure', 'value', '95 %', 'place'], rows(known)), false));
}

/** What explains the weights: parts of a bar and their names. */
function bar(head) {
  if (!head.bar?.length) return null;
  const words = head.bar.map(([title, , share]) => `${title} ${share}`).join(', ');
  return make('div', {}, draw('svg', { viewBox: '0 0 100 10', preserveAspectRatio: 'none', class: 'bar', role: 'img', 'aria-label': `Explained by ${words}` },
    head.bar.map(([, kind, , left, width]) => draw('rect', { x: left, width, height: 10, class: kind }))),
  make('p', { class: 'quiet' }, 'Explained by ', head.bar.map(([title, kind, share], place) => [place ? ', ' : '', make('span', { class: `swatch ${kind}`, 'aria-hidden': 'true' }), ` ${title} ${share}`])));
}

/** The words about a query and a key: the query underlined, the key coloured. */
function example({ words, weight, line }) {
  const shownWords = words.map(([word, ends]) => {
    const marked = ends.includes('key') ? make('mark', {}, shown(word)) : shown(word);
    return [ends.includes('query') ? make('b', {}, marked) : marked, ' '];
  });
  return make('p', { class: 'example', dir: 'auto' }, shownWords, make('span', { class: 'quiet' }, `weight ${weight}, line ${line}`));
}

/** A subword as the tokenizer writes it, no longer than a line. */
function shown(subword) { return subword.length > 16 ? `${subword.slice(0, 15)}…` : subword || '∅'; }

// Attention on a sentence: lines from each query on the left to the keys on the right.

const opened = new WeakMap();

/** The levels of all heads of a site on one sentence, unpacked once. */
async function unpacked(site) {
  if (!opened.has(site)) {
    const bytes = Uint8Array.from(atob(site.packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
    opened.set(site, new Response(stream).arrayBuffer().then((buffer) => new Uint8Array(buffer)));
  }
  return opened.get(site);
}

function attention(run, head) {
  const [site] = head.place;
  const sentences = run.examples.sentences.map((sentence, place) => [place, sentence]).filter(([, sentence]) => sentence.sites[site]);
  if (!sentences.length) return make('p', { class: 'quiet' }, `No example sentence shows ${site}.`);
  if (!sentences.some(([place]) => place === state.sentence)) [[state.sentence]] = sentences;
  const picture = make('div');
  const show = () => {
    const sentence = run.examples.sentences[state.sentence];
    const [queries, keys] = sentence.sites[site].sides.map((side) => sentence.subwords[side]);
    const size = queries.length * keys.length;
    const wanted = state.sentence;
    unpacked(sentence.sites[site]).then((levels) => {
      if (wanted === state.sentence) put(picture, lines(levels.subarray(head.at * size, (head.at + 1) * size), queries, keys, sentence, run.examples.percents));
    }).catch(() => put(picture, make('p', { class: 'quiet' }, 'This browser cannot unpack the weights; take a newer one.')));
  };
  const list = make('select', { 'aria-label': 'Sentence', change: (event) => { state.sentence = Number(event.target.value); show(); } },
    sentences.map(([place, { line, texts }]) => make('option', { value: place, selected: place === state.sentence }, `${line}: ${texts.source.slice(0, 58)}`)));
  show();
  const rest = run.examples.left_out ? make('p', { class: 'quiet' }, `${run.examples.left_out} more sentences had no room in the page.`) : null;
  return make('div', {}, list, picture, rest);
}

function lines(levels, queries, keys, sentence, percents) {
  const [left, right, width, height] = [130, 230, 360, 20];
  const at = (place) => place * height + 34;
  const top = percents.length - 1;
  const level = (query, key) => levels[query * keys.length + key];
  const svg = draw('svg', { viewBox: `0 0 ${width} ${Math.max(queries.length, keys.length) * height + 28}`, class: 'lines', role: 'group', 'aria-label': `Attention on: ${sentence.texts.source}` });
  const drawn = draw('g');
  const status = make('p', { class: 'quiet', role: 'status' }, 'Point at a word on the left, or move with the arrow keys, to see where it looks.');
  const keyTexts = keys.map((subword, place) => draw('text', { x: right + 8, y: at(place) + 4, class: 'word' }, shown(subword)));
  const show = (only) => {
    put(drawn);
    for (let query = 0; query < queries.length; query += 1) {
      if (only !== null && query !== only) continue;
      for (let key = 0; key < keys.length; key += 1) {
        const strength = (level(query, key) / top) ** 2;
        if (strength < (only === null ? 0.04 : 0.01)) continue;
        drawn.append(draw('line', { x1: left, y1: at(query), x2: right, y2: at(key), class: 'attends', opacity: Math.min(1, 0.08 + strength), 'stroke-width': 0.5 + 2.5 * strength }));
      }
    }
    keyTexts.forEach((text, key) => text.classList.toggle('strong', only !== null && level(only, key) >= top / 3));
    if (only === null) return;
    const best = keys.map((_, key) => key).filter((key) => level(only, key)).sort((a, b) => level(only, b) - level(only, a)).slice(0, 4);
    put(status, `${shown(queries[only])} looks at `, best.map((key) => `${shown(keys[key])} (${percents[level(only, key)]})`).join(', ') || 'no word above 1 %', '.');
  };
  const words = queries.map((subword, query) => draw('text', {
    x: left - 8, y: at(query) + 4, class: 'word query', tabindex: query ? -1 : 0, role: 'button', 'aria-label': `query ${query + 1}: ${shown(subword)}`,
    mouseenter: () => show(query), focus: () => show(query), click: () => show(query),
  }, shown(subword)));
  rove(svg, () => words, (all, place, key) => ({ ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: all.length - 1 })[key]);
  svg.addEventListener('mouseleave', () => show(null));
  svg.append(draw('text', { x: left - 8, y: 14, class: 'end' }, 'query'), draw('text', { x: right + 8, y: 14 }, 'key'), drawn, ...words, ...keyTexts);
  show(null);
  const target = sentence.texts.target ? make('p', { class: 'quiet', dir: 'auto' }, `→ ${sentence.texts.target}`) : null;
  return make('div', {}, make('p', { dir: 'auto' }, sentence.texts.source), target, svg, status);
}

// The table of heads

const PAGE = 60;
const sorting = { key: 'head', down: false, shown: PAGE };

function columnsOf(run) {
  const known = run.measures.filter((measure) => measure.texts.some(Boolean));
  const leading = leads(run);
  return find('every').checked ? known : leading.length ? leading : known.slice(0, 6);
}

function showTable() {
  const run = current();
  const words = find('filter').value.toLowerCase().split(/\s+/).filter(Boolean);
  const columns = columnsOf(run);
  const described = run.heads.some((head) => head.sentence);
  const text = (head) => [head.name, ...head.labels, ...rolesOf(head), head.sentence || ''].join(' ').toLowerCase();
  const sorted = columns.find((column) => column.name === sorting.key);
  const orders = {
    functions: (a, b) => (rolesOf(run.heads[b]).join() > rolesOf(run.heads[a]).join() ? -1 : 1) || a - b,
    ...(sorted ? { [sorting.key]: (a, b) => (sorted.places[a] ?? Infinity) - (sorted.places[b] ?? Infinity) || a - b } : {}),
  };
  const rows = run.heads.map((_, place) => place).filter((place) => words.every((word) => text(run.heads[place]).includes(word)));
  rows.sort(orders[sorting.key] || ((a, b) => a - b));
  if (sorting.down) rows.reverse();
  const first = rows.slice(0, sorting.shown);
  put(find('shown'), `${rows.length} of ${run.heads.length} heads${first.length < rows.length ? `, the first ${first.length} shown` : ''}`);
  find('more').hidden = first.length === rows.length;
  const headers = [['head', 'head'], ['functions', 'functions'], ...(described ? [[null, 'what it does']] : []), ...columns.map((column) => [column.name, column.title])];
  put(find('rows').tHead, make('tr', {}, headers.map(([key, title]) => header(key, title))));
  put(find('rows').tBodies[0], first.map((place) => {
    const head = run.heads[place];
    return make('tr', { 'data-head': place, class: place === state.head ? 'chosen' : null }, make('th', { scope: 'row' }, headLink(head.name, head.short)),
      make('td', {}, head.labels.length ? chips(head) : null), described ? make('td', { class: 'sentence', dir: 'auto' }, head.sentence) : null,
      columns.map((column) => make('td', { class: 'number', title: column.ends[place] ? `95 %: ${column.ends[place]}` : null }, column.texts[place])));
  }));
}

function header(key, title) {
  if (!key) return make('th', { scope: 'col' }, title);
  const chosen = sorting.key === key;
  const sort = () => {
    sorting.down = chosen && !sorting.down;
    sorting.key = key;
    showTable();
    document.querySelector(`#rows [data-key="${CSS.escape(key)}"]`).focus();
  };
  return make('th', { scope: 'col', class: key === 'head' || key === 'functions' ? null : 'number', 'aria-sort': chosen ? (sorting.down ? 'descending' : 'ascending') : 'none' },
    make('button', { type: 'button', 'data-key': key, click: sort }, title, make('span', { 'aria-hidden': 'true' }, chosen ? (sorting.down ? ' ▲' : ' ▼') : '')));
}

// Search: heads by name (3.1 before 3.10), then by roles and what is said of them, then sections.

const MOST = 12;

/** How well a head answers: 0 its name, 1 its name begins so, 2 words; none where it does not. */
function match(head, query) {
  const names = [head.short, head.name, head.place.slice(1).join('.')].map((name) => name.toLowerCase());
  if (names.includes(query)) return 0;
  if (names.some((name) => name.startsWith(query))) return 1;
  return [...rolesOf(head), ...head.labels, head.sentence || ''].join(' ').toLowerCase().includes(query) ? 2 : null;
}

function startSearch() {
  const [field, list] = [find('search'), find('found')];
  let found = [];
  let chosen = 0;
  const close = () => {
    list.hidden = true;
    field.setAttribute('aria-expanded', 'false');
    field.removeAttribute('aria-activedescendant');
  };
  const mark = (place) => {
    chosen = place;
    [...list.children].forEach((item, at) => item.setAttribute('aria-selected', at === place ? 'true' : 'false'));
    if (found.length) {
      field.setAttribute('aria-activedescendant', `found-${place}`);
      list.children[place].scrollIntoView({ block: 'nearest' });
    } else field.removeAttribute('aria-activedescendant');
  };
  const go = (place) => {
    close();
    field.value = '';
    found[place].go();
  };
  const show = () => {
    const query = field.value.trim().toLowerCase();
    if (!query) { close(); return; }
    const heads = current().heads.map((head, place) => [match(head, query), place, head]).filter(([rank]) => rank !== null);
    heads.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const sections = [...document.querySelectorAll('nav a')].filter((link) => link.textContent.toLowerCase().includes(query));
    found = [
      ...heads.map(([, place, head]) => ({ words: head.short, more: rolesOf(head).join(', ') || head.sentence || 'none found', go: () => select(state.run, place, true) })),
      ...sections.map((link) => ({ words: link.textContent, more: 'section', go: () => link.click() })),
    ].slice(0, MOST);
    put(list, found.length ? found.map(({ words, more }, place) => make('li', { id: `found-${place}`, role: 'option', mousedown: (event) => { event.preventDefault(); go(place); } }, words, make('span', { class: 'quiet' }, ` ${more}`)))
      : make('li', { role: 'option', 'aria-disabled': 'true', 'aria-selected': 'false', class: 'quiet' }, 'nothing found'));
    list.hidden = false;
    field.setAttribute('aria-expanded', 'true');
    mark(0);
  };
  field.addEventListener('input', show);
  field.addEventListener('focus', show);
  field.addEventListener('blur', close);
  field.addEventListener('keydown', (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === 'Escape') close();
    else if (list.hidden || !found.length) return;
    else if (step) mark((chosen + step + found.length) % found.length);
    else if (event.key === 'Enter') go(chosen);
    else return;
    event.preventDefault();
  });
  document.addEventListener('keydown', (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === 'k') {
      event.preventDefault();
      field.focus();
      field.select();
    }
  });
}

// Theme and links

const THEMES = ['automatic', 'light', 'dark'];

/** The chosen theme, kept where the browser lets a file keep anything. */
function stored(value) {
  try {
    if (value !== undefined) localStorage.setItem('headscope-theme', value);
    return localStorage.getItem('headscope-theme');
  } catch {
    return value;
  }
}

function startTheme() {
  const button = find('theme');
  const show = (theme) => {
    if (theme === 'automatic') document.documentElement.removeAttribute('data-theme');
    else document.documentElement.setAttribute('data-theme', theme);
    button.textContent = `Theme: ${theme}`;
    button.dataset.theme = theme;
  };
  show(THEMES.includes(stored()) ? stored() : 'automatic');
  button.addEventListener('click', () => {
    const theme = THEMES[(THEMES.indexOf(button.dataset.theme) + 1) % THEMES.length];
    stored(theme);
    show(theme);
  });
}

/** `#encoder-self.3.1`, `#3.1` and `#head=1/encoder-self.3.1` (of another run) show the card of a head. */
function follow() {
  let place = window.location.hash.slice(1);
  try {
    place = decodeURIComponent(place);
  } catch {} // a lone % is not encoded: taken as it is
  const [, run, name] = /^(?:head=(\d+)\/)?(.+)$/.exec(place) || [null, null, ''];
  const head = runs[run || 0] ? numberOf(runs[run || 0], name) : -1;
  if (head >= 0) select(Number(run || 0), head, true);
}

startTheme();
if (runs.length && current().heads.length) {
  startSearch();
  for (const maps of document.querySelectorAll('.maps')) {
    rove(maps, cells, cellStep);
    maps.addEventListener('click', (event) => {
      const cell = event.target.closest('.cell');
      if (cell) select(state.run, numberOf(current(), cell.dataset.name));
    });
  }
  if (find('run')) find('run').addEventListener('change', (event) => {
    const run = Number(event.target.value);
    const same = numberOf(runs[run], current().heads[state.head].name);
    select(run, same < 0 ? runs[run].start : same);
  });
  find('shade').addEventListener('change', shade);
  find('filter').addEventListener('input', () => { sorting.shown = PAGE; showTable(); });
  find('every').addEventListener('change', showTable);
  find('more').addEventListener('click', () => { sorting.shown += 4 * PAGE; showTable(); });
  showRun();
  select(0, current().start);
  window.addEventListener('hashchange', follow);
  document.addEventListener('click', (event) => { if (event.target.closest('a.head')) setTimeout(follow); });
  follow();
}
document.documentElement.dataset.ready = 'yes';
})();
