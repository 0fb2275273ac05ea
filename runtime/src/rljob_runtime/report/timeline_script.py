"""The script of the timeline's page: renders the lanes on a canvas, moves and zooms them, and says what lies under the pointer."""

SCRIPT = """
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("lanes"), tip = document.getElementById("tip"), ctx = canvas.getContext("2d");
  const ROW = 22, BAND = 9, GAP = 9, AXIS = 24, MIN = 1e-4;
  let from = 0, to = data.end, drag = null, places = [];
  const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const labels = () => canvas.clientWidth < 600 ? 104 : 168;
  const text = index => data.texts[index];
  const seconds = s => s < 1e-3 ? (s * 1e6).toFixed(0) + " \\u00b5s"
    : s < 1 ? (s * 1e3).toFixed(s < 0.1 ? 1 : 0) + " ms" : s.toFixed(s < 10 ? 2 : 1) + " s";
  const height = () => AXIS + data.lanes.reduce((sum, lane) => sum + ROW + (lane.bands.length ? BAND : 0) + GAP, 0);

  function clip(words, width) {
    if (ctx.measureText(words).width <= width) return words;
    let end = words.length;
    while (end > 1 && ctx.measureText(words.slice(0, end) + "\\u2026").width > width) end -= 1;
    return words.slice(0, end) + "\\u2026";
  }
  function axis(left, width) {
    const raw = (to - from) / Math.max(width / 90, 1), base = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(f => f * base).find(s => s >= raw);
    ctx.fillStyle = style("--dim"); ctx.strokeStyle = style("--line"); ctx.lineWidth = 1;
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      const x = left + (t - from) / (to - from) * width;
      ctx.beginPath(); ctx.moveTo(x, AXIS - 5); ctx.lineTo(x, height()); ctx.stroke();
      ctx.fillText(Number(t.toPrecision(6)) + " s", x + 3, 12);
    }
  }
  function box(x, y, w, h, color) { ctx.fillStyle = color; ctx.fillRect(x, y, w, h); }
  function draw() {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, high = height();
    canvas.style.height = high + "px";
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(high * ratio);
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.font = "12px system-ui, sans-serif"; ctx.textBaseline = "middle";
    const left = labels(), room = width - left, scale = room / (to - from);
    places = [];
    axis(left, room);
    let y = AXIS;
    for (const lane of data.lanes) {
      ctx.fillStyle = style("--ink"); ctx.fillText(clip(lane.name, left - 10), 0, y + ROW / 2);
      ctx.save(); ctx.beginPath(); ctx.rect(left, y - 2, room, ROW + BAND + 4); ctx.clip();
      for (const [phase, start, end, step, note] of lane.spans) {
        if (end < from || start > to) continue;
        const x = left + (start - from) * scale, w = Math.max((end - start) * scale, 1), waits = text(phase) === "wait";
        const top = waits ? y + 7 : y, h = waits ? ROW - 14 : ROW;
        box(x, top, w, h, waits ? style("--wait") : data.colors[text(phase)] || data.other);
        if (waits) {
          ctx.strokeStyle = style("--waitline"); ctx.lineWidth = 1; ctx.strokeRect(x + 0.5, top + 0.5, Math.max(w - 1, 0.5), h - 1);
        }
        else if (w > 30) { ctx.fillStyle = "#fff"; ctx.fillText(clip(text(phase), w - 8), x + 4, y + ROW / 2); }
        places.push({x, y, w, h: ROW, words: [`${lane.name}: ${text(phase)}`, `${seconds(end - start)}, step ${step}`, text(note)]});
      }
      y += ROW;
      if (lane.bands.length) {
        for (const [start, end, what, moves, partly] of lane.bands) {
          if (end < from || start > to) continue;
          const x = left + (start - from) * scale, w = Math.max((end - start) * scale, 1), h = partly ? BAND - 5 : BAND - 2;
          box(x, y + 2, w, h, style(moves ? "--bandmove" : "--band"));
          const words = [`${lane.name}: ${text(what)}`, `on its devices for ${seconds(end - start)}`, moves ? "on its way" : ""];
          places.push({x, y, w, h: BAND, words});
        }
        y += BAND;
      }
      ctx.restore();
      y += GAP;
    }
  }
  function zoom(factor, at) {
    const length = Math.min(Math.max((to - from) * factor, MIN), data.end), share = (at - from) / (to - from);
    from = Math.min(Math.max(at - length * share, 0), data.end - length); to = from + length; draw();
  }
  function move(by) { const length = to - from; from = Math.min(Math.max(from + by, 0), data.end - length); to = from + length; draw(); }
  const timeAt = x => from + Math.max(x - labels(), 0) / (canvas.clientWidth - labels()) * (to - from);
  function point(event) {
    const area = canvas.getBoundingClientRect(), x = event.clientX - area.left, y = event.clientY - area.top;
    if (drag !== null) { move((drag - x) / (canvas.clientWidth - labels()) * (to - from)); drag = x; tip.style.display = "none"; return; }
    const hit = places.filter(p => x >= p.x && x <= p.x + p.w && y >= p.y && y <= p.y + p.h && x >= labels()).pop();
    tip.style.display = hit ? "block" : "none";
    if (!hit) return;
    tip.replaceChildren(...hit.words.filter(Boolean).map((words, index) => {
      const line = document.createElement(index ? "div" : "b"); line.textContent = words; return line;
    }));
    const size = tip.getBoundingClientRect();
    tip.style.left = Math.max(Math.min(event.clientX + 14, innerWidth - size.width - 6), 6) + "px";
    tip.style.top = Math.max(Math.min(event.clientY + 14, innerHeight - size.height - 6), 6) + "px";
  }
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  canvas.addEventListener("pointerdown", event => {
    drag = event.clientX - canvas.getBoundingClientRect().left; canvas.setPointerCapture(event.pointerId);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { drag = null; });
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event.clientX - canvas.getBoundingClientRect().left));
  }, {passive: false});
  canvas.addEventListener("keydown", event => {
    const keys = {"+": () => zoom(0.7, (from + to) / 2), "-": () => zoom(1.4, (from + to) / 2),
      ArrowLeft: () => move((from - to) / 5), ArrowRight: () => move((to - from) / 5)};
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  document.getElementById("in").onclick = () => zoom(0.6, (from + to) / 2);
  document.getElementById("out").onclick = () => zoom(1.6, (from + to) / 2);
  document.getElementById("all").onclick = () => { from = 0; to = data.end; draw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("resize", draw);
  draw();
})();
"""
