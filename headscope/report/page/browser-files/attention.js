// Attention of a head on an example sentence: lines from each query on the left to the keys on the right.

const LINE = 0.04; // weights below are not drawn until their query is pointed at
const opened = new WeakMap();

/** The weights of a site on one sentence, unpacked once: levels by head, query and key. */
async function unpacked(site) {
  if (!opened.has(site)) {
    const bytes = Uint8Array.from(atob(site.packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
    opened.set(site, new Response(stream).arrayBuffer().then((buffer) => new Uint8Array(buffer)));
  }
  return opened.get(site);
}

/** Where the maps of a head begin among those of its site. */
function placeInSite(data, row) {
  const counts = data.layout[siteNames(data)[data.site[row]]];
  return counts.slice(0, data.layer[row]).reduce((sum, count) => sum + count, 0) + data.head[row];
}

function attentionPart(data, row) {
  const part = make('div', { class: 'attention' });
  const kept = data.examples;
  if (!kept) {
    part.append(make('p', { class: 'quiet' }, 'This run kept no example sentences. ',
      make('code', {}, 'headscope analyze … --report'), ' keeps twelve of at most 32 subwords a side, ', make('code', {}, '--examples N'), ' another number.'));
    return part;
  }
  const site = siteNames(data)[data.site[row]];
  const sentences = kept.sentences.map((sentence, place) => [sentence, place]).filter(([sentence]) => sentence.sites[site]);
  if (!sentences.length) {
    part.append(make('p', { class: 'quiet' }, `No example sentence shows ${site}.`));
    return part;
  }
  const start = sentences.some(([, place]) => place === state.sentence) ? state.sentence : sentences[0][1];
  const picture = make('div');
  const show = (place) => {
    state.sentence = Number(place);
    const sentence = kept.sentences[state.sentence];
    const mine = Symbol('request');
    picture.request = mine;
    weightsOf(data, row, sentence, site).then((weights) => {
      if (picture.request === mine) put(picture, lines(weights, sentence, site, kept.levels));
    }).catch(() => put(picture, make('p', { class: 'quiet' }, 'This browser cannot unpack the weights; take a newer one.')));
  };
  const picker = choice('Sentence', sentences.map(([sentence, place]) => [place, `${sentence.line}: ${brief(sentence.texts.source)}`]), start, show);
  part.append(picker, picture);
  if (kept.left_out) part.append(make('p', { class: 'quiet' }, `${kept.left_out} more sentences had no room in the page.`));
  show(start);
  return part;
}

async function weightsOf(data, row, sentence, site) {
  const entry = sentence.sites[site];
  const [queries, keys] = entry.sides.map((side) => sentence.subwords[side]);
  const all = await unpacked(entry);
  const size = queries.length * keys.length;
  const place = placeInSite(data, row);
  return all.subarray(place * size, (place + 1) * size);
}

function lines(steps, sentence, site, levels) {
  const [queries, keys] = sentence.sites[site].sides.map((side) => sentence.subwords[side]);
  const weight = (query, key) => (steps[query * keys.length + key] / levels) ** 2;
  const height = 20;
  const [left, right, width] = [130, 230, 360];
  const at = (place) => place * height + 34;
  const svg = draw('svg', { viewBox: `0 0 ${width} ${Math.max(queries.length, keys.length) * height + 28}`, class: 'lines', role: 'group', 'aria-label': `Attention on: ${sentence.texts.source}` });
  const drawn = draw('g');
  const status = make('p', { class: 'quiet', role: 'status' }, 'Point at a word on the left, or move with the arrow keys, to see where it looks.');
  const keyTexts = keys.map((subword, place) => draw('text', { x: right + 8, y: at(place) + 4, class: 'word' }, shown(subword)));
  const show = (only) => {
    put(drawn);
    for (let query = 0; query < queries.length; query += 1) {
      if (only !== null && query !== only) continue;
      for (let key = 0; key < keys.length; key += 1) {
        const value = weight(query, key);
        if (value < (only === null ? LINE : 0.01)) continue;
        drawn.append(draw('line', { x1: left, y1: at(query), x2: right, y2: at(key), class: 'attends', opacity: Math.min(1, 0.08 + value), 'stroke-width': 0.5 + 2.5 * value }));
      }
    }
    keyTexts.forEach((text, key) => text.classList.toggle('strong', only !== null && weight(only, key) >= 0.1));
    if (only === null) return;
    const best = keys.map((_, key) => key).sort((a, b) => weight(only, b) - weight(only, a)).slice(0, 4).filter((key) => weight(only, key) >= 0.01);
    put(status, `${shown(queries[only])} looks at `, best.map((key) => `${shown(keys[key])} (${Math.round(weight(only, key) * 100)} %)`).join(', ') || 'no word above 1 %', '.');
  };
  const words = queries.map((subword, query) => draw('text', {
    x: left - 8, y: at(query) + 4, class: 'word query', tabindex: query ? -1 : 0, role: 'button', 'aria-label': `query ${query + 1}: ${shown(subword)}`,
    mouseenter: () => show(query), focus: () => show(query), click: () => show(query),
  }, shown(subword)));
  const moves = { ArrowDown: 1, ArrowUp: -1 };
  roving(svg, () => words, (place, event) => {
    if (event.key === 'Home') return 0;
    if (event.key === 'End') return words.length - 1;
    return moves[event.key] ? place + moves[event.key] : undefined;
  });
  svg.addEventListener('mouseleave', () => show(null));
  svg.append(draw('text', { x: left - 8, y: 14, class: 'side end' }, 'query'), draw('text', { x: right + 8, y: 14, class: 'side' }, 'key'));
  svg.append(drawn, ...words, ...keyTexts);
  show(null);
  const target = sentence.texts.target ? make('p', { class: 'quiet', dir: 'auto' }, `→ ${sentence.texts.target}`) : null;
  return make('div', {}, make('p', { dir: 'auto' }, sentence.texts.source), target,
    svg, status);
}

/** A sentence in a list to choose from. */
function brief(text) { return text.length > 60 ? `${text.slice(0, 58)}…` : text; }

/** A subword as the tokenizer writes it, no longer than a line. */
function shown(subword) { return subword.length > 16 ? `${subword.slice(0, 15)}…` : subword || '∅'; }
