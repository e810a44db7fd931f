"use strict";
// All text goes through textContent: nothing from a server is ever read as HTML.
const $ = id => document.getElementById(id);
const open = new Map();   // per subscription: the table list, as the user left it
let latest = null, failed = 0;

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) made.append(child);
  return made;
}

function size(bytes) {
  if (bytes === null || bytes === undefined) return "unknown";
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  while (bytes >= 10240 && units.length > 1) { bytes /= 1024; units.shift(); }
  return `${Math.round(bytes)} ${units[0]}`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

// what an error of this kind means for someone who has not seen the program before
const MEANINGS = {TargetUnavailable: "The target does not answer", PublisherUnavailable: "The publisher does not answer", SlotInUse: "Another process uses the slot",
  ApplyError: "The target refuses a change", RelationError: "A table does not fit", SpoolError: "The spool cannot be written"};
const ORDER = ["bad", "warn", "good", "dim"];

const number = value => value === null || value === undefined ? "" : value.toLocaleString("en");
const ago = (time, now) => time ? `${duration(Math.max(now - time, 0))} ago` : "";

function verdict(found) {
  if (found.state === "paused") return ["warn", "paused"];
  if (!found.running) return found.enabled ? ["bad", found.state] : ["dim", found.state];
  if (found.slot && found.slot.wal_status === "lost") return ["bad", "slot lost"];
  if (found.retry) return ["bad", {TargetUnavailable: "target away", PublisherUnavailable: "publisher away", ApplyError: "change refused"}[found.error && found.error.kind] || "retrying"];
  if (!found.streaming) return ["bad", "not streaming"];
  const tables = found.tables || {};
  if (found.slot && (found.slot.danger || (found.slot.seconds_until_lost !== null && found.slot.seconds_until_lost < 3600))) return ["bad", "slot in danger"];
  if (found.verified && found.verified.differing.length) return ["bad", "differs"];
  if (tables.parked) return ["warn", tables.parked === 1 ? "1 table parked" : `${number(tables.parked)} tables parked`];
  if (found.retrying.length) return ["warn", "a copy is retried"];
  if (tables["left out"]) return ["warn", tables["left out"] === 1 ? "1 table left out" : `${number(tables["left out"])} tables left out`];
  if (found.copies && found.copies.begin !== null) return ["warn", "waits for copy_window"];
  if (found.limited) return ["warn", "limited by max_apply_rate"];
  return [found.state === "running" ? "good" : "warn", found.state.replaceAll("_", " ")];
}

function note(worst, title, error, ...more) {
  return el("div", {class: worst ? "note worst" : "note"}, el("p", {}, el("strong", {}, title)),
    error && error.text ? el("p", {}, error.text) : null,
    error && error.remedy ? el("p", {}, el("strong", {}, "What to do: "), error.remedy) : null, ...more);
}

// remedies of the program are written for any subscription
const named = (found, error) => ({...error, remedy: error.remedy && error.remedy.replaceAll(" NAME", ` ${found.name}`)});

function notes(found, now) {
  const made = [], slot = found.slot;
  if (slot && slot.wal_status === "lost") made.push(note(true, "The slot is lost: the publisher has removed WAL that this subscription needs",
    {text: found.error && found.error.text, remedy: `run \`subscriber recover ${found.name} --target URL\`: it creates a new slot, compares all tables and writes what differs. So that it does not happen again, raise max_slot_wal_keep_size on the publisher`}));
  else if (slot && slot.danger) made.push(note(true, "The slot will lose WAL soon", {remedy: "raise max_slot_wal_keep_size on the publisher if its disk has room, and find out why the target does not keep up"}));
  else if (slot && slot.seconds_until_lost !== null && (slot.seconds_until_lost < 3600 || (slot.seconds_until_lost < 86400 && slot.retained > slot.safe / 4))) made.push(note(slot.seconds_until_lost < 3600,
    `At the present rate, the slot is lost in ${duration(slot.seconds_until_lost)}`, {remedy: "raise max_slot_wal_keep_size on the publisher if its disk has room, and find out why the target does not keep up"}));
  if (slot && slot.wal_status === "lost") {
    // it is the reason of all other errors
  } else if (found.retry) {
    const wait = found.retry.next_attempt - now, meaning = found.error && MEANINGS[found.error.kind];
    made.push(note(true, `${meaning ? `${meaning}: attempt` : "Attempt"} ${number(found.retry.attempt)} failed${wait > 0 ? `, the next one is in ${duration(wait)}` : ""}`,
      found.error ? named(found, found.error) : {text: found.retry.error},
      found.error && found.error.finish_lsn ? action(found, {action: "skip", lsn: found.error.finish_lsn}, `Skip the transaction that finishes at ${found.error.finish_lsn}`,
        "All of its changes will be missing in the target.") : null));
  } else if (found.error) {
    const past = found.streaming;
    made.push(el("details", {}, el("summary", {}, `Last error, ${ago(found.error_time, now)}${past ? "; replication has continued" : ""}`), note(!past, found.error.kind, named(found, found.error))));
  }
  if (found.slot_error) made.push(note(true, "The publisher did not say how the slot is", named(found, found.slot_error)));
  if (found.relay_log && found.relay_log.paused) made.push(note(true, "The relay log is full: nothing is received", {remedy: "make the target faster, or raise relay_log_size"}));
  if (found.relay_log && found.relay_log.failure) made.push(note(true, "Receiving into the relay log has ended", {text: found.relay_log.failure}));
  if (found.limited) made.push(note(false, "Changes wait because of max_apply_rate", {remedy: `if the lag grows, raise it: subscriber alter ${found.name} --target URL -o max_apply_rate=RATE, or in the configuration file`}));
  for (const each of found.parked) made.push(note(false, `Table ${each.table} is parked ${each.since ? `since ${new Date(each.since * 1000).toLocaleString()}` : ""}: its changes are left out`,
    {text: each.error, remedy: `${each.remedy}; then synchronize the table again${found.can.includes("resync") ? "" : `: subscriber alter ${found.name} --target URL --resync ${each.table}`}`}, action(found, {action: "resync", table: each.table}, "Synchronize it again")));
  if ((found.tables.parked || 0) > found.parked.length) made.push(note(false, `${found.tables.parked - found.parked.length} more tables are parked: see the tables below`));
  if (found.retrying.length) made.push(note(false, `The synchronization of ${found.retrying.length === 1 ? found.retrying[0].table : `${found.retrying.length} tables or more`} fails and is retried`, {text: found.retrying[0].error}));
  if (found.verified) for (const each of found.verified.differing) made.push(note(true, `Table ${each.table} differs from the publisher's in ${number(each.rows)} rows`,
    {remedy: `find out who else writes to it; then subscriber verify ${found.name} --target URL --repair, or synchronize it again`}, action(found, {action: "resync", table: each.table}, "Synchronize it again")));
  if (found.left_out.length) made.push(note(false, `${found.tables["left out"]} published ${found.tables["left out"] === 1 ? "table is" : "tables are"} not replicated`, {text: found.left_out.slice(0, 5).map(each => `${each.table}: ${each.reason.replaceAll(" NAME", ` ${found.name}`)}`).join("; ")}));
  return made;
}

const fact = (name, value, more, tone) => el("div", {class: "fact"}, el("span", {class: "dim"}, name), el("b", {class: tone || ""}, value), more ? el("span", {class: "dim"}, more) : null);

function facts(found) {
  const slot = found.slot, rates = found.history, last = rates.length ? rates[rates.length - 1] : null;
  const whole = Object.entries(found.tables).reduce((sum, [state, count]) => state === "left out" ? sum : sum + count, 0);
  const made = [
    fact("Lag", found.lag_seconds === null ? "unknown" : duration(found.lag_seconds), found.lag_bytes === null ? "" : `${size(found.lag_bytes)} of WAL`, found.lag_seconds > 300 ? "bad" : ""),
    fact("Changes", last ? `${number(Math.round(last[2]))}/s` : "…", `${number(found.changes)} since this process began`),
    fact("Retained WAL", slot ? slot.wal_status === "lost" ? "none" : size(slot.retained) : "unknown", slot ? `slot ${slot.active ? "active" : "inactive"}, ${slot.wal_status}` : "", slot && slot.danger ? "bad" : ""),
    slot && slot.safe !== null && slot.wal_status !== "lost" ? fact("Slot is lost after", `${size(Math.max(slot.safe, 0))} more`, slot.seconds_until_lost === null ? "" : `in about ${duration(slot.seconds_until_lost)} at this rate`, slot.danger ? "bad" : found.streaming ? "" : "warn") : null,
    fact("Tables", whole || found.streaming ? number(whole) : "unknown", Object.entries(found.tables).map(([state, count]) => `${number(count)} ${state}`).join(", ")),
  ];
  const conflicts = Object.entries(found.conflicts);
  made.push(fact("Conflicts", number(conflicts.reduce((sum, each) => sum + each[1], 0)), conflicts.map(([name, count]) => `${number(count)} ${name}`).join(", "), conflicts.length ? "warn" : ""));
  if (found.verified) made.push(fact("Verified", `${number(found.verified.tables)} tables`, `the oldest ${ago(found.verified.oldest, latest.time)}`));
  if (found.relay_log) made.push(fact("Relay log", size(found.relay_log.size), `of ${size(found.relay_log.limit)}${found.relay_log.oldest ? `, from ${found.relay_log.oldest}` : ""}`));
  return el("div", {class: "facts"}, made);
}

function copies(found) {
  const copy = found.copies;
  if (!copy) return null;
  const known = copy.estimated_rows > 0, whole = Object.entries(found.tables).reduce((sum, [state, count]) => state === "left out" ? sum : sum + count, 0);
  // tables that wait have no estimate of rows yet: then the bar counts tables
  const bar = copy.complete && known ? {max: copy.estimated_rows, value: Math.min(copy.rows, copy.estimated_rows)} : {max: whole, value: whole - copy.tables};
  const left = copy.seconds_left === null ? "" : `, about ${duration(copy.seconds_left)} left`;
  return el("div", {}, el("h3", {}, "Copies"),
    copy.begin === null ? null : el("p", {}, `Copies wait for copy_window, which opens at ${new Date(copy.begin * 1000).toLocaleString()}, in ${duration(Math.max(copy.begin - latest.time, 0))}.`),
    el("progress", bar),
    el("div", {class: "dim"}, `${number(copy.rows)}${copy.complete && known ? ` of about ${number(copy.estimated_rows)}` : ""} rows, ${number(copy.rows_per_second)} rows/s, ${number(copy.tables)} of ${number(whole)} tables to do${left}`));
}

function chart(title, points, index, format) {
  const known = points.filter(point => point[index] !== null);
  const largest = Math.max(...known.map(point => point[index]), 0), last = points.length ? points[points.length - 1][index] : null;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 240 60"); svg.setAttribute("preserveAspectRatio", "none"); svg.setAttribute("aria-hidden", "true");
  if (known.length > 1) {
    const from = points[0][0], span = Math.max(points[points.length - 1][0] - from, 1);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    // the line has a gap where the value was not known
    path.setAttribute("d", points.map((point, at) => point[index] === null ? "" :
      `${at && points[at - 1][index] !== null ? "L" : "M"}${((point[0] - from) / span * 240).toFixed(1)} ${(58 - (largest ? point[index] / largest : 0) * 55).toFixed(1)}`).join(""));
    svg.append(path);
  }
  const span = known.length > 1 ? duration(points[points.length - 1][0] - points[0][0]) : "";
  return el("div", {class: "chart"}, el("div", {}, el("span", {}, title), el("strong", {}, points.length ? last === null ? "unknown" : format(last) : "")), svg,
    el("div", {class: "dim"}, el("span", {}, span ? `last ${span}` : "collecting…"), el("span", {}, largest ? `at most ${format(largest)}` : "")));
}

function charts(found) {
  return el("div", {class: "charts"}, chart("Lag", found.history, 1, duration), chart("Changes per second", found.history, 2, value => number(Math.round(value))),
    chart("Retained WAL", found.history, 3, size));
}

function action(found, wanted, label, warning) {
  if (!found.can.includes(wanted.action)) return null;
  return el("p", {}, el("button", {type: "button", onclick: () => act({subscription: found.name, ...wanted}, `${label}?${warning ? `\n${warning}` : ""}`)}, label));
}

async function act(wanted, question) {
  const token = sessionStorage.getItem("token");
  if (!token) { $("token").hidden = false; $("token-text").focus(); return; }
  if (!confirm(question)) return;
  const answer = await fetch("api/action", {method: "POST", headers: {"Content-Type": "application/json", "Authorization": `Bearer ${token}`}, body: JSON.stringify(wanted)});
  if (answer.status === 401) { sessionStorage.removeItem("token"); $("token").hidden = false; }
  if (!answer.ok) alert((await answer.json()).error);
  refresh();
}

function tables(found) {
  const state = open.get(found.name) || {open: false, search: "", problems: false, offset: 0, rows: null};
  open.set(found.name, state);
  const body = el("tbody"), count = el("span", {class: "dim"}), back = el("button", {type: "button"}, "‹"), on = el("button", {type: "button"}, "›");
  const show = found_ => {
    state.rows = found_;
    body.replaceChildren(...found_.rows.map(row => el("tr", {}, el("td", {}, row.table, row.problem ? el("div", {class: "bad"}, row.problem) : null),
      el("td", {class: row.problem ? "bad" : ""}, row.state), el("td", {class: "number"}, number(row.changes)),
      el("td", {class: "number"}, size(row.bytes)),
      el("td", {class: "number"}, row.rows === null || row.rows === undefined ? "" : `${number(row.rows)}${row.state === "copying" && row.estimated_rows ? ` of ~${number(row.estimated_rows)}` : ""}`))));
    const last = Math.min(state.offset + found_.rows.length, found_.total);
    count.textContent = found_.total ? `${number(state.offset + 1)}–${number(last)} of ${number(found_.total)}` : "none";
    back.disabled = state.offset === 0; on.disabled = last >= found_.total;
  };
  const load = async () => {
    const query = new URLSearchParams({subscription: found.name, offset: state.offset, search: state.search});
    if (state.problems) query.set("problems", "1");
    const answer = await fetch(`api/tables?${query}`);
    if (answer.ok) show(await answer.json());
  };
  back.addEventListener("click", () => { state.offset = Math.max(state.offset - 100, 0); load(); });
  on.addEventListener("click", () => { state.offset += 100; load(); });
  const search = el("input", {type: "search", placeholder: "name", "aria-label": "search tables", oninput: event => { state.search = event.target.value; state.offset = 0; load(); }});
  search.value = state.search;
  const problems = el("input", {type: "checkbox", onchange: event => { state.problems = event.target.checked; state.offset = 0; load(); }});
  problems.checked = state.problems;
  if (state.rows) show(state.rows);
  if (state.open) load();
  return el("details", {open: state.open, ontoggle: event => { if (state.open !== event.target.open) { state.open = event.target.open; if (state.open) load(); } }},
    el("summary", {}, "Tables"), el("div", {class: "tools"}, search, el("label", {}, problems, " only problems"), back, on, count),
    el("div", {class: "scroll"}, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "table"), el("th", {}, "state"), el("th", {class: "number"}, "changes"), el("th", {class: "number"}, "bytes"), el("th", {class: "number"}, "rows copied"))), body)));
}

function card(found) {
  const [tone, word] = verdict(found);
  const buttons = el("span", {class: "actions"}, action(found, {action: found.enabled ? "disable" : "enable"}, found.enabled ? "Disable" : "Enable"),
    found.enabled ? action(found, {action: "pause"}, "Pause", "It does not run until it is resumed, or the program is started again. The publisher retains WAL.") : null, action(found, {action: "resume"}, "Resume"));
  const title = el("div", {class: "title"}, el("h2", {}, found.name), el("span", {class: `badge ${tone}`}, word), buttons);
  if (!found.running) return el("section", {class: "card"}, title);
  return el("section", {class: "card"}, title, notes(found, latest.time), facts(found), copies(found), charts(found), tables(found));
}

function draw() {
  const focused = document.activeElement;
  if (focused && focused.type === "search") return;  // do not take the text field from the user
  const all = latest.subscriptions, tones = all.map(found => verdict(found)[0]);
  const said = (tone, otherwise) => {
    const words = new Set(all.map(verdict).filter(each => each[0] === tone).map(each => each[1]));
    const what = words.size === 1 ? `: ${[...words][0]}` : ` ${otherwise}`;
    return all.length === 1 ? [...words][0] : `${tones.filter(each => each === tone).length} of ${all.length}${what}`;
  };
  const bad = tones.filter(tone => tone === "bad").length, warn = tones.filter(tone => tone === "warn").length;
  $("verdict").className = `badge ${bad || latest.target_error ? "bad" : warn ? "warn" : "good"}`;
  $("verdict").textContent = latest.target_error ? "target unavailable" : bad ? said("bad", "need attention") : warn ? said("warn", "with a warning") : all.length ? "all is well" : "nothing runs";
  document.title = `${bad || latest.target_error ? "✗" : warn ? "!" : "✓"} subscriber`;
  const told = latest.target_error && all.some(found => found.retry && found.error && found.error.text === latest.target_error.text);
  $("alerts").replaceChildren(...(latest.target_error && !told ? [note(true, "The target's catalog cannot be read", latest.target_error)] : []));
  const worst = [...all].sort((one, other) => ORDER.indexOf(verdict(one)[0]) - ORDER.indexOf(verdict(other)[0]));
  $("subscriptions").replaceChildren(...(all.length ? worst.map(card) : [el("p", {class: "dim"}, "No subscription runs. Create one with `subscriber create`.")]));
  $("unlock").hidden = !latest.actions || sessionStorage.getItem("token") !== null;
  $("log").hidden = !latest.log.length;
  $("log").querySelector("ul").replaceChildren(...latest.log.map(each => el("li", {class: each.state === "failed" ? "bad" : ""},
    `${new Date(each.time * 1000).toLocaleTimeString()} ${each.subscription}: ${each.action}: ${each.state}${each.error ? `: ${each.error.text}${each.error.remedy ? ` (${each.error.remedy})` : ""}` : ""}`)));
}

async function refresh() {
  try {
    const answer = await fetch("api/overview", {signal: AbortSignal.timeout(10000)});
    if (!answer.ok) throw new Error(answer.status);
    latest = await answer.json(); failed = 0;
    $("updated").textContent = `as of ${new Date(latest.time * 1000).toLocaleTimeString()}`;
    draw();
  } catch (error) {
    failed += 1;
    if (failed > 1) {
      $("verdict").className = "badge bad"; $("verdict").textContent = "no answer: does subscriber run?";
      document.title = "✗ subscriber";
    }
  }
}

$("unlock").addEventListener("click", () => { $("token").hidden = false; $("token-text").focus(); });
$("token").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("token", $("token-text").value.trim());
  $("token-text").value = ""; $("token").hidden = true; if (latest) draw();
});
(async function loop() { if (!document.hidden) await refresh(); setTimeout(loop, 5000); })();
