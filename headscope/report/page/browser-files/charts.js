// Charts: curves with bands, dots with intervals, points in a plane. Hand-made SVG that takes the page's colours.

const COLORS = ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#7f3fbf', '#8c6d1f'];

/** Round numbers that divide a range into about `count` steps. */
function ticks(low, high, count = 4) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((part) => part * power).find((part) => part >= raw);
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-6; tick += step) {
    found.push(Math.abs(tick) < step * 1e-9 ? 0 : Number(tick.toPrecision(12)));
  }
  return found;
}

function range(values, { zero = false, pad = 0.04 } = {}) {
  const known = values.filter((value) => value !== null && value !== undefined && Number.isFinite(value));
  let [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const more = (high - low) * pad;
  return [zero && low === 0 ? 0 : low - more, high + more];
}

/** Ticks as words, all with the decimals that tell them apart. */
function tickWords(found, percent = false) {
  const scale = percent ? 100 : 1;
  const step = found.length > 1 ? (found[1] - found[0]) * scale : 1;
  const power = Math.floor(Math.log10(step) + 1e-9);
  const decimals = Math.min(8, Math.max(0, -power + (Math.abs(step / 10 ** power - 2.5) < 1e-6 ? 1 : 0)));
  const format = new Intl.NumberFormat('en', { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  return found.map((tick) => `${format.format(tick * scale).replaceAll('-', '−')}${percent ? ' %' : ''}`);
}

/** Axes of a plane: returns the svg, its scales, and where to draw. On a narrow screen it is narrower, so that letters keep their size. */
function plane({ title, x, y, xLabel, yLabel, width: wanted = 460, height = 240, percent = false }) {
  const width = narrow() ? Math.min(wanted, 320) : wanted;
  const [left, below] = [ticks(y[0], y[1]), ticks(x[0], x[1])];
  const [leftWords, belowWords] = [tickWords(left), tickWords(below, percent)];
  const edge = { left: 30 + 6.5 * Math.max(...leftWords.map((word) => word.length)), right: 16, top: 10, bottom: 40 };
  const across = (value) => edge.left + ((value - x[0]) / (x[1] - x[0])) * (width - edge.left - edge.right);
  const up = (value) => height - edge.bottom - ((value - y[0]) / (y[1] - y[0])) * (height - edge.top - edge.bottom);
  const svg = draw('svg', { viewBox: `0 0 ${width} ${height}`, class: 'chart', role: 'img', 'aria-label': title });
  left.forEach((tick, place) => {
    svg.append(draw('line', { x1: edge.left, x2: width - edge.right, y1: up(tick), y2: up(tick), class: 'rule' }),
      draw('text', { x: edge.left - 6, y: up(tick) + 4, class: 'tick end' }, leftWords[place]));
  });
  below.forEach((tick, place) => {
    svg.append(draw('text', { x: across(tick), y: height - edge.bottom + 16, class: 'tick middle' }, belowWords[place]));
  });
  svg.append(draw('line', { x1: edge.left, x2: width - edge.right, y1: height - edge.bottom, y2: height - edge.bottom, class: 'axis' }),
    draw('text', { x: (edge.left + width - edge.right) / 2, y: height - 6, class: 'tick middle' }, xLabel),
    draw('text', { x: 12, y: edge.top + (height - edge.top - edge.bottom) / 2, class: 'tick middle turned' }, yLabel));
  const turned = svg.querySelector('.turned');
  turned.setAttribute('transform', `rotate(-90 12 ${turned.getAttribute('y')})`);
  return { svg, across, up };
}

/** Curves: each has `points` [x, y, low, high], a `name`, and may be dashed, thin or in steps. */
function curves({ title, xLabel, yLabel, series, zero = false, percent = false, band = null, whiskers = false }) {
  const all = series.flatMap((line) => line.points);
  const x = range(all.map((point) => point[0]), { pad: 0.02 });
  const y = range(all.flatMap((point) => point.slice(1)), { zero });
  const { svg, across, up } = plane({ title, x, y, xLabel, yLabel, percent });
  const known = (points) => points.filter((point) => point[1] !== null);
  const area = (points, low, high) => [...points.map((point) => `${across(point[0])},${up(point[high])}`),
    ...points.slice().reverse().map((point) => `${across(point[0])},${up(point[low])}`)].join(' ');
  if (band) svg.append(draw('polygon', { points: area(band, 1, 2), class: 'chance' }));
  for (const line of series) {
    const points = known(line.points);
    const bounded = points.filter((point) => point[2] !== null && point[2] !== undefined && point[3] !== null);
    if (whiskers) {
      for (const point of bounded) {
        svg.append(draw('line', { x1: across(point[0]), x2: across(point[0]), y1: up(point[2]), y2: up(point[3]), stroke: line.color, 'stroke-width': 1.2 }));
      }
    } else if (bounded.length > 1) svg.append(draw('polygon', { points: area(bounded, 2, 3), fill: line.color, opacity: 0.18 }));
    const path = points.map((point, place) => {
      const [left, top] = [across(point[0]), up(point[1])];
      if (!place) return `M${left},${top}`;
      return line.steps ? `H${left}V${top}` : `L${left},${top}`;
    }).join('');
    svg.append(draw('path', {
      d: path, fill: 'none', stroke: line.color, 'stroke-width': line.thin ? 1 : 2,
      'stroke-dasharray': line.dash || null, class: line.thin ? 'thin' : null,
    }));
    if (points.length > 40) continue;
    for (const point of points) {
      const ends = point[2] === null || point[2] === undefined ? '' : ` (95 %: ${number(point[2])} to ${number(point[3])})`;
      svg.append(draw('circle', { cx: across(point[0]), cy: up(point[1]), r: line.thin ? 1.5 : 3, fill: line.color },
        draw('title', {}, `${line.name}: ${number(point[1], 4)}${ends} at ${number(point[0], 4)}`)));
    }
  }
  return make('figure', {}, make('figcaption', {}, title), svg, legend(series, band));
}

function legend(series, band) {
  const entries = [...new Map(series.filter((line) => line.name).map((line) => [line.name, line])).values()];
  const stroke = (line) => draw('svg', { width: 24, height: 10, 'aria-hidden': 'true' }, draw('line', {
    x1: 0, x2: 24, y1: 5, y2: 5, stroke: line.color, 'stroke-width': line.thin ? 1 : 2, 'stroke-dasharray': line.dash || null,
  }));
  const items = entries.map((line) => make('li', {}, stroke(line), ` ${line.name}`));
  if (band) {
    const swatch = draw('svg', { width: 24, height: 10, 'aria-hidden': 'true' },
      draw('rect', { width: 24, height: 10, class: 'chance' }));
    items.push(make('li', {}, swatch, ' random orders, least to most'));
  }
  return items.length > 1 || band ? make('ul', { class: 'legend' }, items) : null;
}

/** Rows of a name and a number with its interval, on one axis, which `shared` rows of other tables have too; an `under` is a line below its row. */
function dots(caption, rows, { zero = true, unit = '', shared = rows } = {}) {
  const x = range(shared.flatMap((row) => [row.value, row.low, row.high, row.mark]), { zero, pad: 0.03 });
  const across = (value) => ((value - x[0]) / (x[1] - x[0])) * 100;
  const bar = (row) => {
    const svg = draw('svg', { viewBox: '0 0 100 12', preserveAspectRatio: 'none', class: 'dots', 'aria-hidden': 'true' });
    if (x[0] <= 0 && x[1] >= 0) svg.append(draw('line', { x1: across(0), x2: across(0), y1: 0, y2: 12, class: 'axis' }));
    if (row.value === null || row.value === undefined) return svg;
    const from = x[0] <= 0 && x[1] >= 0 ? 0 : x[0];
    svg.append(draw('rect', {
      x: Math.min(across(from), across(row.value)), width: Math.abs(across(row.value) - across(from)), y: 3, height: 6,
      fill: row.color || COLORS[0], class: 'measured',
    }));
    if (row.low !== null && row.low !== undefined) {
      svg.append(draw('rect', { x: across(row.low), width: Math.max(across(row.high) - across(row.low), 0.3), y: 5.4, height: 1.2, class: 'whisker' }));
    }
    if (row.mark !== null && row.mark !== undefined) {
      svg.append(draw('rect', { x: across(row.mark) - 0.4, width: 0.8, y: 0, height: 12, class: 'mark' }));
    }
    return svg;
  };
  const body = rows.map((row) => [make('tr', { class: row.under ? 'over' : null }, make('th', { scope: 'row' }, row.name), make('td', { class: 'bar' }, bar(row)),
    make('td', { class: 'number' }, number(row.value)), make('td', { class: 'number quiet' }, row.note || '')),
  row.under ? make('tr', {}, make('td', { colspan: 4, class: 'quiet' }, row.under)) : null]);
  const marks = [2, 3, 5].map((count) => ticks(x[0], x[1], count)).find((found) => found.length > 1) || [];
  const words = tickWords(marks).map((text, place) => {
    const mark = make('span', {}, marks[place] ? text : '0');
    mark.style.setProperty('left', `${across(marks[place])}%`);
    return mark;
  });
  const foot = make('tr', {}, make('td'), make('td', { class: 'bar' }, make('div', { class: 'ticks', 'aria-hidden': 'true' }, words)), make('td'), make('td'));
  const head = make('tr', {}, ['', '', unit || 'value', rows.some((row) => row.note) ? '95 %' : ''].map((words) => (
    words ? make('th', { scope: 'col', class: 'number' }, words) : make('td', {}))));
  return make('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption },
    make('table', { class: 'bars' }, captioned(caption), make('thead', {}, head), make('tbody', {}, body), make('tfoot', {}, foot)));
}

/** Points with names; a click on one calls its `pick`. */
function scatter({ title, xLabel, yLabel, points, x, y }) {
  const { svg, across, up } = plane({ title, x, y, xLabel, yLabel, width: 360, height: 320 });
  const low = Math.max(x[0], y[0]);
  const high = Math.min(x[1], y[1]);
  if (high > low) svg.append(draw('line', { x1: across(low), y1: up(low), x2: across(high), y2: up(high), class: 'rule' }));
  for (const point of points) {
    svg.append(draw('circle', { cx: across(point.x), cy: up(point.y), r: 4, class: 'point', click: point.pick },
      draw('title', {}, `${point.name}: ${number(point.x)} and ${number(point.y)}`)));
  }
  return make('figure', { class: 'square' }, make('figcaption', {}, title), svg);
}
