// What the daemon does now: asks once a second, and draws the figures. All foreign words are set as text.

import { short } from './chart.js';
import { known } from './user.js';

const byId = (id) => document.getElementById(id);
const grouped = (number) => Number(number).toLocaleString('en');
const SVG = 'http://www.w3.org/2000/svg';

/** Columns: head, key, and how a value is shown; `n` are numbers, which are sorted largest first. */
const WORD = (value) => ({ text: value });
const RATE = (value) => ({ text: brief(value), n: true });
const COUNT = (value) => ({ text: grouped(value), n: true });
const LOSS = (value) => ({ text: brief(value), n: true, bad: value > 0 });
const STATE = (value, row) => ({ text: value, bad: row.bad });
const PATIENCE = (ms) => ({ text: ms === null ? '–' : span(ms), n: true, bad: ms !== null && ms < 20 });
const TABLES = {
  sources: { sort: 'seen', columns: [
    ['Source', 'name', WORD], ['Kind', 'kind', WORD], ['State', 'state', STATE], ['Seen/s', 'seen', RATE],
    ['bit/s', 'bits', RATE], ['Lost/s', 'losing', LOSS], ['Lost', 'lost', COUNT], ['Early/s', 'early', RATE],
    ['Patience', 'patience_ms', PATIENCE],
  ] },
  ports: { sort: 'delivered', columns: [
    ['Port', 'name', (value) => ({ text: value, n: true })], ['Device', 'device', WORD], ['Reader', 'reader', WORD],
    ['State', 'state', STATE], ['Read/s', 'delivered', RATE], ['bit/s', 'bits', RATE], ['Lost/s', 'losing', LOSS],
    ['Lost', 'lost', COUNT], ['Patience', 'patience_ms', PATIENCE], ['Owner', 'owner', WORD], ['Group', 'group', WORD],
  ] },
  vms: { sort: 'delivered', columns: [
    ['VM', 'name', WORD], ['Kind', 'kind', WORD], ['State', 'state', STATE], ['Ports', 'ports', COUNT],
    ['Read/s', 'delivered', RATE], ['Lost/s', 'losing', LOSS],
    ['Pool', 'pool_bytes', (bytes) => ({ text: `${grouped(Math.floor(bytes / 1048576))} MiB`, n: true })],
    ['Used', 'used_percent', (used) => ({ text: `${Math.round(used)} %`, n: true, bad: used > 90 })],
  ] },
};
/** How each table is sorted: by which key, and whether the other way round. */
const order = Object.fromEntries(Object.entries(TABLES).map(([id, table]) => [id, { by: table.sort, turned: false }]));
let shown = null, polls = 0;

/** A number in three digits: more would only flicker. */
function brief(number) {
  return number < 0.05 ? '0' : short(+Number(number).toPrecision(3)).trim();
}

function span(ms) {
  for (const [unit, name] of [[3600e3, 'h'], [60e3, 'min'], [1e3, 's']]) {
    if (ms >= unit) return `${+(ms / unit).toFixed(1)} ${name}`;
  }
  return `${ms} ms`;
}

/** An element with text in it. */
function make(name, text = '', kind = '') {
  const element = document.createElement(name);
  element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

/** The rates of a curve as a line; what is there is seen. */
function curve(rates, kind, width, height) {
  const picture = document.createElementNS(SVG, 'svg');
  picture.setAttribute('viewBox', `0 0 ${width} ${height}`);
  picture.setAttribute('class', `curve ${kind}`);
  picture.setAttribute('aria-hidden', 'true');
  const most = Math.max(...rates, 0);
  if (most > 0) {
    const step = width / Math.max(1, (width > 100 ? 60 : 20) - 1);
    const from = width - step * (rates.length - 1);
    const points = rates.map((rate, n) => `${(from + n * step).toFixed(1)},${(height - 1 - rate / most * (height - 2)).toFixed(1)}`);
    const line = document.createElementNS(SVG, 'polyline');
    line.setAttribute('points', points.join(' '));
    picture.append(line);
  }
  return picture;
}

function tile(name, value, rates, kind, help = '') {
  const box = make('div', '', `tile ${kind}`);
  box.append(make('span', name, 'quiet'), make('b', value), curve(rates, kind, 160, 32));
  if (help) box.title = help;
  return box;
}

function showTotals(answer) {
  const last = (rates) => rates.at(-1) ?? 0;
  const { seen, bits, delivered } = answer.totals;
  byId('totals').replaceChildren(
    tile('seen', `${brief(last(seen))}/s`, seen, 'packets'),
    tile('read', `${brief(last(bits))}bit/s`.replace(/(\d)bit/, '$1 bit'), bits, 'bits'),
    tile('delivered', `${brief(last(delivered))}/s`, delivered, 'packets'),
  );
  byId('stages').replaceChildren(...answer.stages.map((stage) => {
    const box = tile(stage.name, `${brief(stage.now)}/s`, stage.curve, stage.now > 0 ? 'lost bad' : 'lost', stage.help);
    box.append(make('span', `${grouped(stage.lost)} in all`, 'quiet'));
    return box;
  }));
  const worst = answer.stages.reduce((a, b) => (b.now > a.now ? b : a));
  byId('lost').textContent = `${grouped(answer.lost)} lost in all`
    + (worst.now > 0 ? ` · now at ${worst.name}: ${worst.help}` : '');
}

function sorted(id, rows) {
  const { by, turned } = order[id];
  const figure = (row) => (row[by] === null ? -Infinity : row[by]);
  const compare = (a, b) => {
    const [x, y] = [figure(a), figure(b)];
    if (id === 'ports' && by === 'name') return x - y;
    return typeof x === 'number' && typeof y === 'number' ? y - x : String(x).localeCompare(String(y));
  };
  return [...rows].sort((a, b) => (turned ? compare(b, a) : compare(a, b)));
}

function showTable(id, name, rows, count) {
  const { columns } = TABLES[id];
  const left = count > rows.length ? `, the ${rows.length} that lose or do most` : '';
  byId(`${id}-title`).textContent = `${name} (${grouped(count)}${left})`;
  const table = byId(id);
  if (!table.tHead) {
    const head = make('tr');
    head.append(...columns.map(([title, key]) => {
      const cell = make('th');
      cell.scope = 'col';
      const button = make('button', title, 'sort');
      button.onclick = () => {
        order[id] = { by: key, turned: order[id].by === key && !order[id].turned };
        if (shown) show(shown);
      };
      cell.append(button);
      return cell;
    }));
    table.createTHead().append(head);
    table.createTBody();
  }
  columns.forEach(([, key, kind], n) => {
    // Words and ports' numbers begin with the first one, figures with the greatest.
    const isUp = (key === 'name' || kind === WORD || kind === STATE) !== order[id].turned;
    const sign = order[id].by !== key ? 'none' : isUp ? 'ascending' : 'descending';
    table.tHead.rows[0].cells[n].setAttribute('aria-sort', sign);
  });
  table.tBodies[0].replaceChildren(...sorted(id, rows).map((row) => {
    const line = make('tr');
    columns.forEach(([, key, cell], n) => {
      const { text, n: isNumber, bad } = cell(row[key], row);
      const place = make('td', text, [isNumber && 'n', bad && 'error', text.length > 40 && 'why'].filter(Boolean).join(' '));
      if (isNumber) table.tHead.rows[0].cells[n].className = 'n';
      line.append(place);
    });
    if (row.curve) {
      const place = make('td');
      place.append(curve(row.curve, 'packets', 60, 16));
      line.append(place);
    }
    return line;
  }));
}

function tell(answer) {
  const trouble = byId('trouble');
  const words = [];
  if (answer.error !== null) {
    words.push(`The daemon does not answer at ${answer.socket} for ${answer.silent_seconds} s: ${answer.error}.`
      + (answer.server ? ' The figures are the last ones.' : ''));
  } else if (!answer.sees_all) {
    words.push('The daemon shows this page only what its own user opened: name that user under `observers` in the daemon\'s configuration.');
  }
  trouble.hidden = words.length === 0;
  if (trouble.textContent !== words.join(' ')) trouble.textContent = words.join(' ');
  const restarts = answer.restarts > 0 ? ` · restarted while this was watched: ${answer.restarts}` : '';
  byId('places').textContent = answer.server ? `${answer.server} at ${answer.socket}${restarts}` : answer.socket;
}

function show(answer) {
  shown = answer;
  tell(answer);
  showTotals(answer);
  showTable('sources', 'Sources', answer.sources, answer.counts.sources);
  showTable('ports', 'Ports', answer.ports, answer.counts.ports);
  showTable('vms', 'Virtual machines', answer.vms, answer.counts.vms);
  document.body.dataset.polls = ++polls;
}

function status(text, kind) {
  byId('status').textContent = text;
  if (byId('news').textContent !== kind) byId('news').textContent = kind;
}

async function update() {
  clearTimeout(update.timer);
  const began = performance.now();
  try {
    const response = known(await fetch('api/now'));
    const answer = await response.json();
    if (!response.ok) throw Object.assign(new Error(answer.error), { told: true });
    show(answer);
    status(`Updated ${new Date().toISOString().slice(11, 19)}Z`, answer.error === null ? 'Up to date' : 'The daemon does not answer');
  } catch (error) {
    const text = error.told ? error.message : 'The server does not answer; trying again';
    status(text, text);
  }
  const pause = Math.max(1000, 4 * (performance.now() - began));
  update.timer = setTimeout(update, document.hidden ? 10000 : pause);
}

document.onvisibilitychange = () => { if (!document.hidden) update(); };
fetch('api/recordings').then(async (response) => {
  byId('recordings-link').hidden = !response.ok || (await response.json()).places.length === 0;
}).catch(() => {});
update();
