// Putting the page together: sections, navigation, theme, and links to heads.

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

function buildTheme() {
  const button = document.getElementById('theme');
  const show = (theme) => {
    if (theme === 'automatic') document.documentElement.removeAttribute('data-theme');
    else document.documentElement.setAttribute('data-theme', theme);
    button.textContent = `Theme: ${theme}`;
    button.dataset.theme = theme;
  };
  const kept = stored();
  show(THEMES.includes(kept) ? kept : 'automatic');
  button.addEventListener('click', () => {
    const theme = THEMES[(THEMES.indexOf(button.dataset.theme) + 1) % THEMES.length];
    stored(theme);
    show(theme);
  });
}

function buildHeads() {
  if (!analyses.length) return;
  const first = current().measures.filter((measure) => measure.overview).sort((a, b) => a.overview - b.overview)[0];
  state.measure = first ? first.name : FUNCTIONS;
  if (!current().site.length) return;
  state.head = striking(current(), first);
  section('heads', 'Head maps', make('div', { class: 'beside' }, buildMaps(), buildDetail()));
  buildGlance();
  buildCards();
  section('table', 'Table of heads', buildTable());
}

/** The head to begin with: the highest value of the first measure, among those with a label if there are any. */
function striking(data, measure) {
  const labelled = data.site.map((_, row) => row).filter((row) => data.functions[row].length);
  const rows = labelled.length ? labelled : data.site.map((_, row) => row);
  const value = (row) => (measure && measure.values[row] !== null ? measure.values[row] : -Infinity);
  return rows.reduce((best, row) => (value(row) > value(best) ? row : best), rows[0]);
}

/** What every measure is, where it comes from, and how each run was made. */
function buildAbout() {
  if (!analyses.length) return;
  const made = section('about', 'Measures and runs');
  const known = new Map(analyses.flatMap((data) => data.measures).map((measure) => [measure.analysis || measure.name, measure]));
  const titles = (analysis) => [...new Set(analyses.flatMap((data) => data.measures).filter((measure) => (measure.analysis || measure.name) === analysis).map((measure) => measure.title))];
  made.append(make('dl', {}, [...known].map(([analysis, measure]) => [make('dt', {}, analysis, make('span', { class: 'quiet' }, ` ${titles(analysis).join(', ')}`)),
    make('dd', {}, (measure.about || 'A column of heads.csv that no installed analysis declares.').split('\n\n').map((paragraph) => make('p', {}, prose(paragraph))))])));
  for (const data of analyses) {
    const lists = [['Remarks', data.remarks], ['Left out', data.left_out]].filter(([, lines]) => lines.length);
    made.append(make('h3', {}, `Run ${data.name}`), make('dl', { class: 'facts' }, data.facts.map(([name, value]) => [make('dt', {}, name), make('dd', {}, value)])),
      ...lists.flatMap(([title, lines]) => [make('h4', {}, title), make('ul', {}, lines.map((line) => make('li', {}, line)))]),
      make('p', { class: 'signature' }, data.signature.split(/(?<=[|+,:=])/).map((part) => [part, make('wbr')])));
  }
}

function buildNavigation() {
  const sections = [...document.querySelectorAll('main > section')];
  put(document.getElementById('nav'), sections.map((made) => make('a', { href: `#${made.id}` }, made.querySelector('h2').textContent)));
}

/** `#head=0/encoder-self.2.5` chooses a head. */
function follow() {
  let place = window.location.hash;
  try {
    place = decodeURIComponent(place);
  } catch {} // a lone % is not encoded: taken as it is
  const match = /^#head=(\d+)\/(.+)$/.exec(place);
  if (!match || !analyses[match[1]]) return;
  const row = rowOf(analyses[match[1]], match[2]);
  if (row >= 0) select(Number(match[1]), row, true);
}

buildTheme();
buildHeads();
buildImportance();
buildFaithfulness();
buildComparison();
buildPruning();
buildTraining();
buildAbout();
buildNavigation();
window.addEventListener('hashchange', follow);
document.addEventListener('click', (event) => { if (event.target.closest('a.head')) setTimeout(follow); });
window.addEventListener('keydown', (event) => { if (event.key === 'Escape') hideTip(); });
follow();
document.documentElement.dataset.ready = 'yes';
