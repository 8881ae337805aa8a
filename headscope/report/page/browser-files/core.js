// What every part of the page uses: the data, elements, numbers in words, colours, names of heads, the tooltip.

const report = JSON.parse(document.getElementById('data').textContent);
const analyses = report.analyses;
const SVG = 'http://www.w3.org/2000/svg';
const state = { run: 0, measure: '', head: 0, sentence: 0, unsupported: false };
const listeners = [];

/** Call `react(what)` whenever the run, the measure or the head changes. */
function onChange(react) { listeners.push(react); }

function change(values) {
  const what = new Set(Object.keys(values).filter((key) => state[key] !== values[key]));
  if (!what.size) return;
  Object.assign(state, values);
  for (const react of listeners) react(what);
}

/** An element with attributes, listeners (functions) and children; text is always text, never markup. */
function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === 'function') element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

function put(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
}

/** A section of the page with its heading, listed in the navigation. */
function section(id, title, ...children) {
  const heading = make('h2', { id: `${id}-title` }, title);
  const made = make('section', { id, 'aria-labelledby': `${id}-title` }, heading, ...children);
  document.getElementById('main').append(made);
  return made;
}

// Numbers

const GROUPS = new Intl.NumberFormat('en', { maximumFractionDigits: 0, roundingMode: 'halfEven' });

/** Three significant digits as `words` of numbers.py has them, a true minus sign; an en dash where there is no number. */
function number(value, digits = 3) {
  if (value === null || value === undefined) return '–';
  const size = Math.abs(value);
  let text;
  if (Number.isInteger(value) || size >= 999.5) text = GROUPS.format(value);
  else if (size < 1e-4) text = Number(value.toPrecision(digits)).toExponential();
  else text = String(Number(halfToEven(value, digits)));
  return text.replaceAll('-', '−');
}

/** Rounded as Python does: of two numbers that are equally near, the one with an even last digit. */
function halfToEven(value, digits) {
  const exact = Math.abs(value).toExponential(60).replace('.', ''); // all digits that the number has
  const between = /^50*e/.test(exact.slice(digits)) && Number(exact[digits - 1]) % 2 === 0;
  return (between ? value * (1 - Number.EPSILON) : value).toPrecision(digits);
}

function interval(measure, row) {
  if (!measure.bounds) return '';
  const [low, high] = [measure.bounds[0][row], measure.bounds[1][row]];
  return low === null || high === null || low === high ? '' : `${number(low)} to ${number(high)}`;
}

function withUnit(measure) { return measure.unit ? `${measure.title} (${measure.unit})` : measure.title; }

// Heads

function current() { return analyses[state.run]; }

function siteNames(data) { return Object.keys(data.layout); }

function headName(data, row) { return `${siteNames(data)[data.site[row]]}.${data.layer[row]}.${data.head[row]}`; }

/** The row of a head by its name, or -1. */
function rowOf(data, name) {
  if (!data.rows) data.rows = new Map(data.site.map((_, row) => [headName(data, row), row]));
  return data.rows.has(name) ? data.rows.get(name) : -1;
}

/** The measures that some head has, those for an overview first. */
function foremost(data) {
  const known = data.measures.filter((measure) => measure.values.some((value) => value !== null));
  return known.sort((a, b) => (a.overview || Infinity) - (b.overview || Infinity) || 0);
}

function measureOf(data, name) { return data.measures.find((measure) => measure.name === name); }

function families() { return new Map(report.families.map((family) => [family.name, family])); }

/** What a label is written as: glyph, letters, colour and meaning. */
function markOf(label) {
  const mark = report.marks[label] || { family: '', short: label };
  const family = families().get(mark.family) || { glyph: '✚', color: '#999999', meaning: label, name: label };
  return { ...family, label, short: mark.short };
}

/** A label as a chip: its colour, its glyph and its words. */
function chip(label) {
  const mark = markOf(label);
  const swatch = draw('svg', { width: 10, height: 10, 'aria-hidden': 'true', class: 'swatch' },
    draw('rect', { width: 10, height: 10, rx: 2, fill: mark.color }));
  return make('span', { class: 'chip', title: mark.meaning }, swatch, `${mark.glyph} ${label}`);
}

function chips(labels) {
  return labels.length ? labels.map(chip) : [make('span', { class: 'quiet' }, 'no label')];
}

/** A button that selects a head and brings its detail into view. */
function headButton(run, row) {
  const name = headName(analyses[run], row);
  return make('button', { type: 'button', class: 'link', click: () => select(run, row, true) }, name);
}

function select(run, row, reveal = false) {
  change({ run, head: row });
  if (reveal) {
    const detail = document.getElementById('detail');
    if (detail) {
      detail.scrollTop = 0;
      detail.scrollIntoView({ block: detail.offsetHeight > window.innerHeight ? 'start' : 'nearest' });
      detail.querySelector('h3').focus({ preventScroll: true });
    }
  }
}

// Colours

function channels(color) { return [1, 3, 5].map((place) => parseInt(color.slice(place, place + 2), 16)); }

/** The colour of a number on a scale; null for no number. */
function shade(scale, value) {
  if (value === null || value === undefined) return null;
  const stops = report.palettes[scale.cmap] || report.palettes.viridis;
  const width = scale.high - scale.low;
  const place = Math.min(1, Math.max(0, width ? (value - scale.low) / width : 0.5)) * (stops.length - 1);
  const below = Math.min(stops.length - 2, Math.floor(place));
  const [from, to] = [channels(stops[below]), channels(stops[below + 1])];
  const mixed = from.map((part, index) => Math.round(part + (to[index] - part) * (place - below)));
  return `#${mixed.map((part) => part.toString(16).padStart(2, '0')).join('')}`;
}

/** Black or white, whichever is easier to read on a colour (WCAG relative luminance). */
function ink(color) {
  const [red, green, blue] = channels(color).map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? '#000000' : '#ffffff';
}

// The tooltip: what a measure is, on hover and on focus; Escape hides it.

const tip = document.getElementById('tip');
let tipped = null;

function hideTip() {
  if (tipped) tipped.removeAttribute('aria-describedby');
  tipped = null;
  tip.hidden = true;
}

function showTip(anchor, lines) {
  hideTip();
  put(tip, lines);
  tip.hidden = false;
  tipped = anchor;
  anchor.setAttribute('aria-describedby', 'tip');
  const box = anchor.getBoundingClientRect();
  const room = document.documentElement.clientWidth;
  const left = Math.max(8, Math.min(box.left, room - tip.offsetWidth - 8));
  const below = box.bottom + 6 + tip.offsetHeight < window.innerHeight || box.top < tip.offsetHeight + 6;
  tip.style.setProperty('left', `${left + window.scrollX}px`);
  tip.style.setProperty('top', `${(below ? box.bottom + 6 : box.top - tip.offsetHeight - 6) + window.scrollY}px`);
}

/** Show lines beside an element while the pointer or the focus is on it. */
function explain(element, lines) {
  const show = () => showTip(element, typeof lines === 'function' ? lines() : lines);
  element.addEventListener('mouseenter', show);
  element.addEventListener('focus', show);
  element.addEventListener('mouseleave', hideTip);
  element.addEventListener('blur', hideTip);
  return element;
}

/** The definition of a measure with its source, as its analysis states it. */
function definition(measure) {
  const lines = [make('strong', {}, withUnit(measure))];
  if (measure.analysis) lines.push(make('span', { class: 'quiet' }, ` ${measure.name}, by the analysis ${measure.analysis}`));
  const about = measure.about.split('\n\n')[0] || measure.summary;
  if (about) lines.push(make('p', {}, prose(about)));
  const ranking = { highest: 'Heads with the highest values matter most', lowest: 'Heads with the lowest values matter most' };
  if (measure.keep) lines.push(make('p', {}, `${ranking[measure.keep]}: the others go first, as ${measure.why}.`));
  return lines;
}

/** Text in which `names` stand in code and *words* are stressed. */
function prose(text) {
  const stressed = (part) => part.split(/\*(\w+)\*/).map((word, place) => (place % 2 ? make('em', {}, word) : word));
  return text.split('`').map((part, place) => (place % 2 ? make('code', {}, part) : stressed(part)));
}

/** A question mark that explains a measure. */
function question(measure) {
  return explain(make('button', { type: 'button', class: 'what', 'aria-label': `What is ${measure.title}?` }, '?'),
    () => definition(measure));
}

// Small things

/** A labelled select; `options` are [value, words] or { label, options }. */
function choice(label, options, value, react) {
  const entry = ([key, words]) => make('option', { value: key, selected: String(key) === String(value) }, words);
  const body = options.map((option) => (Array.isArray(option) ? entry(option)
    : make('optgroup', { label: option.label }, option.options.map(entry))));
  const list = make('select', { change: (event) => react(event.target.value) }, body);
  const made = labelled(label, list);
  made.list = list;
  return made;
}

let fields = 0;

/** A field below its label. */
function labelled(label, field) {
  fields += 1;
  if (!field.id) field.id = `field-${fields}`;
  return make('div', { class: 'field' }, make('label', { for: field.id }, label), field);
}

/** The measures of a run for a select, by analysis. */
function measureChoices(data, wanted = () => true) {
  const groups = new Map();
  for (const measure of data.measures.filter(wanted)) {
    const group = measure.analysis || 'other columns';
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push([measure.name, withUnit(measure)]);
  }
  return [...groups].map(([label, options]) => ({ label, options }));
}

/** A caption that stays in view and no wider than the screen where its table is scrolled sideways. */
function captioned(text) { return make('caption', {}, make('span', {}, text)); }

/** Whether the screen is a phone's, as the style has it. */
function narrow() { return window.matchMedia('(max-width: 560px)').matches; }

/** A table of rows of cells; a cell is text, a number or an element. */
function table(caption, columns, rows) {
  const cell = (value) => (typeof value === 'number' || value === null
    ? make('td', { class: 'number' }, number(value)) : make('td', {}, value));
  const numeric = columns.map((_, place) => rows.some((row) => typeof row[place] === 'number'));
  const head = make('tr', {}, columns.map((column, place) => (
    column ? make('th', { scope: 'col', class: numeric[place] ? 'number' : null }, column) : make('td'))));
  const body = rows.map(([first, ...rest]) => make('tr', {}, make('th', { scope: 'row' }, first), rest.map(cell)));
  const made = make('table', {}, captioned(caption), make('thead', {}, head), make('tbody', {}, body));
  return make('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption }, made);
}

/** A button that saves rows as CSV, from memory. */
function csvButton(words, file, rows) {
  const quoted = (value) => {
    const text = value === null || value === undefined ? '' : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const save = () => {
    const content = rows().map((row) => row.map(quoted).join(',')).join('\n') + '\n';
    const address = URL.createObjectURL(new Blob([content], { type: 'text/csv;charset=utf-8' }));
    make('a', { href: address, download: file }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  };
  return make('button', { type: 'button', class: 'save', click: save }, words);
}

/** Arrow keys, Home and End within a group of which one element at a time is in the tab order. */
function roving(group, cells, next) {
  group.addEventListener('keydown', (event) => {
    const place = cells().indexOf(event.target);
    if (place < 0) return;
    const target = next(place, event);
    if (target === undefined || !cells()[target]) return;
    event.preventDefault();
    for (const cell of cells()) cell.setAttribute('tabindex', '-1');
    cells()[target].setAttribute('tabindex', '0');
    cells()[target].focus();
  });
}
