// All heads on one sentence: a tiny matrix a head, layers down, heads across.

/** A matrix as a picture: a pixel a weight, as its square root, so that small ones show. */
function paint(canvas, steps, start, levels) {
  const context = canvas.getContext('2d');
  const image = context.createImageData(canvas.width, canvas.height);
  for (let place = 0; place < canvas.width * canvas.height; place += 1) {
    image.data.set([0, 114, 178, Math.round((255 * steps[start + place]) / levels)], 4 * place);
  }
  context.putImageData(image, 0, 0);
}

function glanceOf(data, site, sentence, levels) {
  const name = siteNames(data)[site];
  const entry = sentence.sites[name];
  const [queries, keys] = entry.sides.map((side) => sentence.subwords[side].length);
  const counts = data.layout[name];
  const widest = Math.max(...counts, 1);
  const grid = make('div', { class: 'map glance', role: 'grid', 'aria-label': `Attention of every head, ${name}: layers down, heads across` });
  grid.style.setProperty('--columns', widest);
  const numbers = Array.from({ length: widest }, (_, head) => make('span', { role: 'columnheader', 'aria-label': `head ${head}`, class: 'edge' }, head));
  grid.append(make('div', { role: 'row' }, make('span', { role: 'columnheader', class: 'edge' }, make('span', { class: 'hidden' }, 'layer')), numbers));
  counts.forEach((count, layer) => {
    const cells = Array.from({ length: count }, (_, head) => rowOf(data, `${name}.${layer}.${head}`)).filter((row) => row >= 0).map((row) => {
      const words = [headName(data, row), ...data.functions[row]].join(', ');
      return make('button', {
        type: 'button', role: 'gridcell', class: 'tiny', 'data-row': row, tabindex: -1, 'aria-label': words, title: words, click: () => select(analyses.indexOf(data), row, true),
      }, make('canvas', { width: keys, height: queries }));
    });
    grid.append(make('div', { role: 'row' }, make('span', { role: 'rowheader', class: 'edge', 'aria-label': `layer ${layer}` }, layer), cells));
  });
  const cells = () => [...grid.querySelectorAll('[data-row]')];
  if (cells().length) cells()[0].setAttribute('tabindex', '0');
  roving(grid, cells, (place, event) => step(data, cells(), place, event.key));
  unpacked(entry).then((steps) => {
    for (const cell of cells()) paint(cell.firstChild, steps, placeInSite(data, Number(cell.dataset.row)) * queries * keys, levels);
  }).catch(() => put(grid, make('p', { class: 'quiet' }, 'This browser cannot unpack the weights; take a newer one.')));
  return make('div', { class: 'site' }, make('h3', {}, name), make('div', { class: 'scroll' }, grid));
}

function buildGlance() {
  if (!analyses.some((data) => data.examples)) return;
  const controls = make('div', { class: 'controls' });
  const maps = make('div', { class: 'maps' });
  const mark = () => {
    for (const cell of maps.querySelectorAll('[data-row]')) cell.setAttribute('aria-selected', Number(cell.dataset.row) === state.head ? 'true' : 'false');
  };
  const show = () => {
    const data = current();
    const sentences = data.examples ? data.examples.sentences : [];
    const sentence = sentences[state.sentence] || sentences[0];
    put(controls, runChoice(), sentence ? choice('Sentence', sentences.map(({ line, texts }, place) => [place, `${line}: ${brief(texts.source)}`]),
      sentences.indexOf(sentence), (place) => change({ sentence: Number(place) })) : null);
    put(maps, sentence ? siteNames(data).map((name, site) => (sentence.sites[name] ? glanceOf(data, site, sentence, data.examples.levels) : null))
      : make('p', { class: 'quiet' }, 'This run kept no example sentences.'));
    mark();
  };
  onChange((what) => { if (what.has('run') || what.has('sentence')) show(); else mark(); });
  show();
  section('glance', 'All heads on one sentence', make('p', { class: 'quiet' }, 'A small map is a head, rows are layers: in each map queries go down and keys across; the stronger the colour, the larger the weight. Choose a head to see its lines between words.'), controls, maps);
}
