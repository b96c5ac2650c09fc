// The page: asks for the timeline of the shown range again and again, and offers its packets. What is
// shown is what is downloaded.

import { Chart, clock, short } from './chart.js';
import { known } from './user.js';

const SECOND = 1000000000n;
const byId = (id) => document.getElementById(id);
const grouped = (number) => Number(number).toLocaleString('en');

/** The shown range as the API takes it; `last`: so many seconds before the last packet. */
let view = { from: '', to: '', last: 0 };
const before = [];
/** The timeline that is shown, and its first and last time as BigInt. */
let shown = null, left = 0n, right = 0n;
let places = [];
let filterIsGood = true;
/** What is missing or cannot be read in the shown range, as the last count found. */
let damaged = [];
let asking = null, timer = 0, counting = null, countTimer = 0, polls = 0;

const chart = new Chart(byId('chart'), {
  brushed: (from, to) => zoomTo(left + BigInt(Math.floor(from)), left + BigInt(Math.ceil(to))),
  hovered: tellBin,
});

// --- asking -------------------------------------------------------------------------------------

/** JSON from the server; throws its words. */
async function ask(path, parameters, signal) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) if (value !== '') query.set(name, value);
  const response = known(await fetch(`${path}?${query}`, { signal }));
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.error), { told: true });
  return answer;
}

/** Asks for the timeline now, and again a second after the answer. */
async function update() {
  clearTimeout(timer);
  asking?.abort();
  const mine = asking = new AbortController();
  const began = performance.now();
  let pause = 1000;
  try {
    if (places.length === 0) {
      ({ places } = await ask('api/recordings', {}, mine.signal));
      byId('places').textContent = places.join('  ');
    }
    const bins = Math.min(2000, Math.max(50, Math.floor((byId('chart').clientWidth - 76) / 2)));
    const answer = await ask('api/timeline', { ...range(), bins }, mine.signal);
    if (mine !== asking) return;
    // A long recording takes long: the server is left most of its time.
    pause = Math.max(pause, 4 * (performance.now() - began));
    show(answer);
    rangeError('');
    if (answer.pending_bytes > 0) pause = 100;
  } catch (error) {
    if (mine !== asking || error.name === 'AbortError') return;
    if (error.told) rangeError(error.message);
    else status('The server does not answer; trying again', 'The server does not answer');
  }
  timer = setTimeout(update, document.hidden ? 10000 : pause);
}

/** The shown range as parameters. */
function range() {
  if (!view.last || !shown?.all) return { from: view.from, to: view.to };
  const from = BigInt(shown.all.to_ns) - BigInt(view.last) * SECOND;
  return { from: seconds(from > 0n ? from : 0n), to: '' };
}

/** Nanoseconds as the API takes times, to the nanosecond. */
function seconds(ns) {
  return `${ns / SECOND}.${(ns % SECOND).toString().padStart(9, '0')}`;
}

// --- changing the range -------------------------------------------------------------------------

function setView(next, remember = true) {
  if (remember) before.push(view);
  if (before.length > 100) before.shift();
  view = next;
  byId('back').disabled = before.length === 0;
  byId('last').value = view.last ? String(view.last) : '';
  update();
  countSoon();
}

function zoomTo(from, to) {
  if (from < 0n) from = 0n;
  if (to <= from) to = from + 1n;
  setView({ from: seconds(from), to: seconds(to), last: 0 });
}

/** Zooms by a factor around the middle; moves by a share of the range. */
function change(factor, share = 0) {
  if (!shown?.all) return;
  const span = right - left;
  const middle = left + span / 2n + BigInt(Math.round(Number(span) * share));
  const half = BigInt(Math.max(1, Math.round(Number(span) * factor / 2)));
  zoomTo(middle - half, middle + half);
}

const everything = () => setView({ from: '', to: '', last: 0 });
const back = () => { if (before.length > 0) setView(before.pop(), false); };

byId('everything').onclick = everything;
byId('back').onclick = back;
byId('in').onclick = () => change(0.5);
byId('out').onclick = () => change(2);
byId('last').onchange = (event) => {
  const last = Number(event.target.value);
  if (last) setView({ from: '', to: '', last });
};
for (const id of ['from', 'to']) {
  byId(id).onchange = () => {
    setView({ from: byId('from').value.trim(), to: byId('to').value.trim(), last: 0 });
  };
}
byId('chart').onkeydown = (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const action = {
    ArrowLeft: () => change(1, -0.1), ArrowRight: () => change(1, 0.1),
    '+': () => change(0.5), '=': () => change(0.5), '-': () => change(2),
    Home: everything, Escape: () => { if (!chart.cancel()) back(); },
  }[event.key];
  if (action) {
    event.preventDefault();
    action();
  }
};
document.onvisibilitychange = () => { if (!document.hidden) update(); };

// --- showing ------------------------------------------------------------------------------------

function show(answer) {
  shown = answer;
  polls += 1;
  left = BigInt(answer.from_ns);
  right = BigInt(answer.to_ns);
  const offset = (ns) => Number(BigInt(ns) - left);
  const bin = Number(answer.bin_ns);
  const rate = (values, factor) => values.map((value, n) => value * factor / (wide(n) / 1e9));
  chart.show(answer.all && {
    origin: left, span: Number(right - left), bin,
    rates: [rate(answer.packets, 1), rate(answer.bytes, 8), rate(answer.lost, 1)],
    gaps: answer.gaps.map((pair) => pair.map(offset)),
    parts: answer.segments.map((part) => [offset(part.from_ns), offset(part.to_ns)]),
    marks: answer.recordings.filter((one) => one.mark_ns !== '0')
      .map((one) => [offset(one.mark_ns), one.recording]),
  });
  showEmpty(answer);
  for (const [id, ns] of [['from', left], ['to', right]]) {
    if (document.activeElement !== byId(id)) byId(id).value = answer.all ? clock(ns) : '';
  }
  summarize(answer);
  const pending = answer.pending_bytes;
  if (pending > 0) {
    status(`Reading: ${short(pending)}B of ${short(answer.len_bytes)}B to go. \`vnplug index\` makes it faster.`,
      'Reading the files');
  } else status(`Updated ${clock(BigInt(Date.now()) * 1000000n, 0).slice(11)}`, 'Up to date');
  showTables(answer);
  offer();
  // A range that grows is counted again now and then; without a filter, that is done.
  if (!answer.all) byId('count').textContent = '';
  else if (byId('filter').value.trim() === '') tellCount(packets(answer.total.packets), answer.spread_ns === '0');
  else if (polls % 5 === 0 && (view.to === '' || view.last)) countSoon();
}

function showEmpty(answer) {
  const empty = byId('empty');
  empty.hidden = answer.total.packets > 0;
  if (answer.all) empty.textContent = 'No packets in this range.';
  else if (answer.pending_bytes > 0) empty.textContent = 'Reading…';
  else if (answer.files === 0) empty.textContent = 'There are no capture files here yet.';
  else empty.textContent = 'Nothing is recorded yet.';
}

/** Nanoseconds of a bin: the last one ends with the range. */
function wide(bin) {
  const all = Number(shown.bin_ns);
  return Math.max(1, Math.min(all, Number(right - left) - bin * all));
}

function summarize(answer) {
  const { packets: total, bytes, lost } = answer.total;
  const span = Number(right - left) / 1e9;
  const words = [
    packets(total), `${short(bytes)}B on the wire`, `${duration(span * 1e9)}`,
    `${short(total / span)}packets/s`, `${short(bytes * 8 / span)}bit/s`, `${grouped(lost)} lost`,
  ];
  const spread = Number(answer.spread_ns);
  words.push(spread > 0 ? `times to within ${duration(spread)}` : 'exact');
  const summary = byId('summary');
  summary.textContent = answer.all ? words.join(' · ') : '';
  Object.assign(summary.dataset, { packets: total, bytes, lost, polls });
}

function duration(ns) {
  const units = [[86400e9, 'd'], [3600e9, 'h'], [60e9, 'min'], [1e9, 's'], [1e6, 'ms'], [1e3, 'µs']];
  const [factor, unit] = units.find(([factor]) => ns >= factor) ?? [1, 'ns'];
  return `${+(ns / factor).toFixed(1)} ${unit}`;
}

function tellBin(bin) {
  if (bin === null || !shown?.all) {
    byId('hover').textContent = '';
    return;
  }
  const at = left + BigInt(bin) * BigInt(shown.bin_ns);
  const per = (value) => value / (wide(bin) / 1e9);
  byId('hover').textContent = `${clock(at)} + ${duration(wide(bin))}: ${grouped(shown.packets[bin])} packets · `
    + `${short(per(shown.packets[bin]))}packets/s · ${short(per(shown.bytes[bin] * 8))}bit/s · `
    + `${grouped(shown.lost[bin])} lost`;
}

// --- tables -------------------------------------------------------------------------------------

/** Fills a table; numbers are set to the right, functions become buttons' actions. */
function fill(id, rows) {
  byId(id).hidden = rows.length === 0;
  const body = byId(id).querySelector('tbody');
  // A button that has the focus would lose it.
  const text = JSON.stringify(rows);
  if (body.dataset.text === text) return;
  body.dataset.text = text;
  body.replaceChildren(...rows.map((cells) => {
    const row = document.createElement('tr');
    for (const cell of cells) {
      const place = document.createElement('td');
      if (typeof cell === 'number') {
        place.className = 'n';
        place.textContent = grouped(cell);
      } else if (typeof cell === 'object') {
        const button = document.createElement('button');
        button.textContent = cell.text;
        button.title = 'Show this range';
        button.onclick = () => zoomTo(BigInt(cell.from), BigInt(cell.to) + 1n);
        place.append(button);
      } else {
        place.textContent = cell;
        if (cell.length > 40) place.className = 'why';
      }
      row.append(place);
    }
    return row;
  }));
}

function showTables(answer) {
  const number = (value) => (typeof value === 'number' ? value : 0);
  fill('recordings', answer.recordings.map((one) => {
    const lost = [...Object.values(one.lost), ...Object.values(one.earlier.lost)]
      .reduce((sum, count) => sum + number(count), 0);
    const paused = (one.disks ?? []).filter((disk) => disk.paused)
      .map((disk) => `${disk.directory}: ${disk.paused}`);
    const mark = one.mark_ns === '0' ? 'nothing yet' : clock(BigInt(one.mark_ns), 3);
    return [one.recording, mark, number(one.taken), number(one.durable), number(one.buffered), lost,
      [`${one.ended ? 'ended' : 'at'} ${clock(BigInt(one.written_ns), 0)}`, ...paused].join('; ')];
  }));
  const losses = answer.recordings.flatMap((one) => one.losses).slice(-50).reverse();
  fill('losses', losses.map((loss) => [
    { text: clock(BigInt(loss.from_ns), 3), from: loss.from_ns, to: loss.to_ns },
    clock(BigInt(loss.to_ns), 3), number(loss.packets), String(loss.kind), String(loss.reason),
  ]));
  fill('segments', answer.segments.slice(-100).reverse().map((part) => [
    { text: part.name, from: part.from_ns, to: part.to_ns },
    clock(BigInt(part.from_ns), 3), part.packets, `${short(part.len_bytes)}B`,
  ]));
  const problems = [...new Set([...answer.problems, ...damaged])];
  byId('problems').hidden = problems.length === 0;
  byId('problems').querySelector('ul').replaceChildren(...problems.map((text) => {
    const item = document.createElement('li');
    item.textContent = text;
    return item;
  }));
}

/** Shows what is going on; of what kind that is, is announced when it changes. */
function status(text, kind) {
  byId('status').textContent = text;
  announce(kind);
}

/** Has screen readers say something, once. */
function announce(text) { if (byId('news').textContent !== text) byId('news').textContent = text; }

function rangeError(text) { tell(byId('range-error'), text); }

/** Shows an error, or hides it; one that stays is not announced again. */
function tell(element, text) {
  element.hidden = text === '';
  if (element.textContent !== text) element.textContent = text;
}

// --- the packets --------------------------------------------------------------------------------

/** Lets the links point to what is shown; where nothing is recorded they lead nowhere. */
function offer() {
  const filter = byId('filter').value.trim();
  const parameters = { ...range(), filter };
  for (const format of ['pcapng', 'pcap']) {
    const query = new URLSearchParams(Object.entries({ ...parameters, format })
      .filter(([, value]) => value !== ''));
    const link = byId(format);
    if (filterIsGood && shown?.all) link.href = `api/extract?${query}`;
    else link.removeAttribute('href');
  }
  const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
  const words = ['vnplug extract'];
  if (parameters.from) words.push('--from', quoted(parameters.from));
  if (parameters.to) words.push('--to', quoted(parameters.to));
  words.push(...places.map(quoted));
  if (filter) words.push(quoted(filter));
  byId('command').textContent = `${words.join(' ')} -w found.pcapng`;
}

const packets = (number) => `${grouped(number)} ${number === 1 ? 'packet' : 'packets'}`;

function tellCount(words, known, about = 'about ') {
  const text = `The file will have ${known ? '' : about}${words}.`;
  if (filterIsGood && byId('count').textContent !== text) byId('count').textContent = text;
}

function countSoon() {
  clearTimeout(countTimer);
  countTimer = setTimeout(count, 300);
}

/** Checks the filter, and counts what it finds in the range. */
async function count() {
  counting?.abort();
  const mine = counting = new AbortController();
  const filter = byId('filter').value.trim();
  const field = byId('filter');
  try {
    const { ok, error } = await ask('api/check', { filter }, mine.signal);
    filterIsGood = ok;
    field.setAttribute('aria-invalid', String(!ok));
    tell(byId('filter-error'), ok ? '' : error);
    offer();
    if (!ok) {
      byId('count').textContent = '';
      return;
    }
    const found = await ask('api/count', { ...range(), filter }, mine.signal);
    damaged = [...found.problems, ...found.losses];
    if (filter === '') return;
    const isNew = byId('count').dataset.filter !== filter;
    tellCount(`${packets(found.packets)}, ${short(found.bytes)}B`, found.complete, 'more than ');
    if (isNew) announce(byId('count').textContent);
    Object.assign(byId('count').dataset, { packets: found.packets, complete: found.complete, filter });
  } catch (error) {
    if (error.name !== 'AbortError') byId('count').textContent = error.told ? '' : 'Not counted.';
  }
}

byId('filter').oninput = () => {
  delete byId('count').dataset.filter;
  // The links have it at once; if it is wrong, the server says so.
  filterIsGood = true;
  offer();
  countSoon();
};

update();
countSoon();
