// A card a head: its sentence, what explains it, examples as words with a line, pairs of words, how much it is needed.

const measuring = document.createElement('canvas').getContext('2d');
const CARDS = 60; // heads in words that are shown at once

/** The parts of a head's bar, [title, colour, share]; the last is what only the sentence says. */
function shareParts(cards, row) {
  let room = 1;
  const parts = cards.groups.map(([title, color], place) => {
    const share = Math.min(Math.max(cards.shares[row][place] || 0, 0), room);
    room -= share;
    return [title, color, share];
  });
  return [...parts, ['only the sentence', null, room]];
}

/** Shares stacked from left to right; nothing for a head without any. */
function shareBar(cards, row, kind) {
  if (cards.shares[row].every((share) => share === null)) return null;
  let left = 0;
  const parts = shareParts(cards, row);
  const words = parts.filter(([, , share]) => share >= 0.005).map(([title, , share]) => `${title} ${number(share, 2)}`).join(', ');
  const bars = parts.map(([, color, share]) => {
    const made = draw('rect', { x: left, y: 0, width: share * 100, height: 10, fill: color, class: color ? null : 'empty' });
    left += share * 100;
    return made;
  });
  return draw('svg', { viewBox: '0 0 100 10', preserveAspectRatio: 'none', class: kind, role: 'img', 'aria-label': `Explained by: ${words}` },
    draw('title', {}, words), bars);
}

/** What the colours of a bar mean; with a row, the shares of that head too. */
function shareLegend(cards, row) {
  const entries = row === undefined ? [...cards.groups, ['only the sentence', null]] : shareParts(cards, row).filter(([, , share]) => share >= 0.005);
  return make('ul', { class: 'legend' }, entries.map(([title, color, share]) => make('li', {},
    draw('svg', { width: 12, height: 12, 'aria-hidden': 'true', class: 'swatch' }, draw('rect', { width: 12, height: 12, rx: 2, fill: color, class: color ? null : 'empty' })),
    ` ${title}${share === undefined ? '' : ` ${number(share, 2)}`}`)));
}

/** The card of a head, or nothing where the run described none. */
function cardPart(data, row) {
  const { cards } = data;
  if (!cards) return null;
  const said = cards.sentences[row];
  const bar = shareBar(cards, row, 'shares');
  const examples = cards.examples[row] || [];
  const pairs = cards.pairs[row] || [];
  return make('div', { class: 'card' },
    make('p', { class: 'said', dir: 'auto' }, said || 'Nothing is established about this head.'),
    bar, bar ? shareLegend(cards, row) : null, needPart(data, row),
    examples.length ? part('Its sharpest queries', make('div', {}, examples.map(exampleOf)), true) : null,
    pairs.length ? part('Pairs of words', pairsPart(pairs), true) : null);
}

/** How much the model needs a head, by every importance of the run. */
function needPart(data, row) {
  const names = data.importance ? data.importance.measures : [];
  const known = names.map((name) => measureOf(data, name)).filter((measure) => measure.values[row] !== null);
  if (!known.length) return null;
  const place = (measure) => {
    const above = measure.values.filter((value) => value !== null && (measure.keep === 'lowest' ? value < measure.values[row] : value > measure.values[row]));
    return `place ${above.length + 1} of ${measure.values.filter((value) => value !== null).length}`;
  };
  return make('ul', { class: 'needs' }, known.map((measure) => {
    const ends = interval(measure, row);
    return make('li', {}, `${measure.title} ${number(measure.values[row])}`, make('span', { class: 'quiet' }, `${ends ? ` (95 %: ${ends})` : ''}, ${place(measure)}`));
  }));
}

/** Where a line of an example begins and ends so that its words keep their size: those furthest from its ends go first. */
function fitting(widths, ends, room) {
  let [first, last] = [0, widths.length - 1];
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const wide = () => widths.slice(first, last + 1).reduce((sum, width) => sum + width, 0);
  while (wide() > room && (first < low || last > high)) {
    if (low - first > last - high) first += 1;
    else last -= 1;
  }
  return [first, last];
}

/** An example: the words about the query and the key, with a line from the one to the other. */
function exampleOf(example) {
  const [size, gap, edge] = [12, 7, 6];
  const several = example.words.length > 1;
  const style = window.getComputedStyle(document.body).fontFamily;
  const isEnd = (line, place) => example.ends.some(([onLine, at]) => onLine === line && at === place);
  const laid = example.words.map((words, line) => {
    const texts = words.map((word) => (word === null ? '…' : shown(word)));
    const widths = texts.map((text, place) => {
      measuring.font = `${isEnd(line, place) ? 'bold ' : ''}${size}px ${style}`;
      return measuring.measureText(text).width;
    });
    const ends = example.ends.filter(([onLine]) => onLine === line).map(([, at]) => at);
    const [first, last] = fitting(widths.map((wide) => wide + gap), ends, narrow() ? 300 : 430);
    let right = edge;
    return texts.map((text, place) => {
      if (place < first || place > last) return null;
      const made = { text, left: right, middle: right + widths[place] / 2 };
      right += widths[place] + gap;
      made.right = right;
      return made;
    });
  });
  const width = Math.max(...laid.flat().filter(Boolean).map((word) => word.right)) + edge;
  const below = several ? 76 : 56;
  const level = (line) => (several && line === 0 ? 14 : below - 8);
  const [from, to] = example.ends.map(([line, place]) => laid[line][place]);
  const strength = { class: 'attends', fill: 'none', opacity: 0.35 + 0.65 * example.weight, 'stroke-width': 0.8 + 2.2 * example.weight };
  const start = several ? 20 : below - 20;
  const bow = Math.min(34, 14 + Math.abs(to.middle - from.middle) / 8);
  const path = several ? `M${from.middle},${start}C${from.middle},${start + 20} ${to.middle},${below - 40} ${to.middle},${below - 21}`
    : from === to ? `M${from.middle - 5},${start}C${from.middle - 16},${start - 26} ${from.middle + 16},${start - 26} ${from.middle + 5},${start}`
      : `M${from.middle},${start}C${from.middle},${start - bow} ${to.middle},${start - bow} ${to.middle},${start}`;
  const words = laid.map((line, number) => line.map((word, place) => {
    if (!word) return null;
    const role = isEnd(number, place) ? (word === from ? 'word from' : 'word to') : 'word faint';
    return draw('text', { x: word.left, y: level(number), class: role }, word.text);
  }));
  const told = `${from.text} looks at ${to.text}, weight ${number(example.weight, 2)}, in line ${example.line}`;
  const svg = draw('svg', { viewBox: `0 0 ${Math.max(width, 240)} ${below}`, class: 'example', role: 'img', 'aria-label': told }, draw('title', {}, told), draw('path', { d: path, ...strength }),
    draw('circle', { cx: to.middle + (from === to ? 5 : 0), cy: several ? below - 21 : start, r: 2.5, class: 'tip' }), words);
  svg.style.setProperty('max-width', `${Math.max(width, 240)}px`);
  return make('figure', { class: 'line' }, svg, make('figcaption', { class: 'quiet' }, `weight ${number(example.weight, 2)}, line ${example.line}`));
}

function pairsPart(pairs) {
  const kinds = [['lexical', 'The word types scored highest, query → key'], ['surprising', 'Looked at far more than position expects']];
  return make('div', {}, kinds.map(([kind, title]) => {
    const own = pairs.filter(([of]) => of === kind);
    return own.length ? [make('h5', {}, title), make('ul', { class: 'pairs' }, own.map(([, query, key, score, weight, count]) => make('li', {
      class: 'chip', title: `score ${number(score)}, mean weight ${number(weight)}, seen ${number(count)} times`,
    }, `${shown(query)} → ${shown(key)}`)))] : null;
  }));
}

/** The sentences of all heads, by what explains the most of each. */
function buildCards() {
  if (!analyses.some((data) => data.cards)) return;
  const controls = make('div', { class: 'controls' });
  const list = make('div');
  const chosen = { mostly: '', shown: CARDS };
  const more = make('button', { type: 'button', click: () => { chosen.shown += 4 * CARDS; show(); } }, 'Show more');
  const show = () => {
    const data = current();
    const { cards } = data;
    more.hidden = true;
    if (!cards) {
      put(controls, runChoice());
      put(list, make('p', { class: 'quiet' }, 'This run describes no head: ', make('code', {}, 'headscope analyze … --also explained'), ' does.'));
      return;
    }
    const counts = new Map();
    for (const name of cards.mostly.filter(Boolean)) counts.set(name, (counts.get(name) || 0) + 1);
    const groups = [...counts].sort((a, b) => b[1] - a[1]);
    if (!counts.has(chosen.mostly)) chosen.mostly = '';
    put(controls, runChoice(), choice('Explained mostly by', [['', `anything (${data.site.length})`], ...groups.map(([name, count]) => [name, `${name} (${count})`])], chosen.mostly,
      (value) => { chosen.mostly = value; chosen.shown = CARDS; show(); }));
    const rows = data.site.map((_, row) => row).filter((row) => !chosen.mostly || cards.mostly[row] === chosen.mostly);
    const lines = rows.slice(0, chosen.shown).map((row) => make('li', {}, make('div', { class: 'who' }, headButton(state.run, row), shareBar(cards, row, 'shares small')),
      make('div', {}, data.functions[row].map(chip), make('span', { dir: 'auto' }, cards.sentences[row] || 'nothing is established'))));
    put(list, shareLegend(cards), make('ul', { class: 'inwords', tabindex: 0, 'aria-label': 'Heads in words' }, lines));
    more.hidden = lines.length === rows.length;
  };
  onChange((what) => { if (what.has('run')) show(); });
  show();
  section('words', 'Heads in words', make('p', { class: 'quiet' }, 'What is established about every head, in each sentence the strongest first; shares are of sentences that the description was not fitted to.'), controls, list, more);
}
